"""A file of tests that cannot be imported fails the run, though doctests skip such modules."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_unimportable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_a.py").write_text("from json import nothing\ndef test_it(): assert False\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "test_a.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert "cannot import name 'nothing'" in done.stdout

"""`ctxguard doctor`: a line for each part, the mend for what is wrong, and the exit code."""

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from running import Run, as_toml

from ctxguard._support import extras
from ctxguard.cli import doctor
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor.store import Batch, SampleStore
from ctxguard.profile.schema import Profile
from tests.stored import written


def findings(run: Run, *places: object) -> tuple[dict[str, list[tuple[str, str]]], int]:
    """Status and text of each finding by its part, and the exit code."""
    result = run("doctor", *places, "--json")
    document = json.loads(result.stdout)
    assert document["ok"] is (result.exit_code == 0)
    by_part: dict[str, list[tuple[str, str]]] = {}
    for finding in document["findings"]:
        by_part.setdefault(finding["part"], []).append((finding["status"], finding["text"]))
    return by_part, result.exit_code


def test_installation_is_always_looked_at(run: Run) -> None:
    found, code = findings(run)
    assert code == 0
    assert found["installation"][0][0] == "ok"
    assert "embedded" in found["extras"][0][1]


def test_foreign_distribution_has_a_mend(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_FOREIGN", "pytest")
    found, code = findings(run)
    assert code == 1
    status, text = found["installation"][0]
    assert status == "wrong"
    assert "pip uninstall" in text


@pytest.mark.model
def test_own_index_and_profile_are_well(
    run: Run, index: Path, profile: Path, tmp_path: Path
) -> None:
    found, code = findings(run, index, profile)
    assert code == 0, found
    assert "36 passages" in found["index"][0][1]
    assert ("ok", "made on this system") in found["profile"]

    file = tmp_path / "system.toml"
    system = {"index": str(index), "profile": str(profile)}
    file.write_text(as_toml(system), encoding="utf-8")
    assert findings(run, file) == (found, 0)


@pytest.mark.model
def test_foreign_profile_is_wrong(run: Run, index: Path, profile: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    changed = {"fingerprint": {"embedder": "another"}, "corpus": None}
    Profile.load(profile).model_copy(update=changed).save(other)
    found, code = findings(run, index, other)
    assert code == 1
    assert any(
        status == "wrong" and "calibrate on this one" in text for status, text in found["profile"]
    )


def test_store_says_what_waits(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/samples.db"
    with SampleStore.open(url) as store:
        assert findings(run, url)[0]["store"][-1][1].startswith("no samples yet")
        store.append("worker", Batch([written(time_seconds=1.7e9)], 1))
    found, code = findings(run, url)
    assert code == 1
    assert "0 judged, 1 waiting, 0 labels" in found["store"][0][1]
    status, text = found["monitor"][0]
    assert status == "wrong"
    assert "run `ctxguard monitor`" in text


def test_metrics_are_recognised_by_their_names(run: Run) -> None:
    registry = CollectorRegistry()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    try:
        assert findings(run, url)[0]["metrics"][0][0] == "wrong"
        Telemetry(registry, all_metrics=True)
        assert findings(run, url)[0]["metrics"][0][0] == "ok"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "is the service running there?" in findings(run, url)[0]["metrics"][0][1]


def test_missing_names_mend_on_80_columns(run: Run, tmp_path: Path) -> None:
    missing = (tmp_path / "profile.json", f"sqlite:///{tmp_path}/none.db")
    says = ("`ctxguard calibrate` writes one", "there is no sample store")
    result = run.finding("doctor", *missing, columns="80", says=says)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_every_extra_is_looked_for() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    # The others bring a model, frameworks, or other extras and tools.
    others = {"model", "all", "dev", "docs", "clients", "image"}
    others |= {"haystack", "langchain", "llamaindex"}
    assert set(extras) - others == set(doctor._EXTRAS)

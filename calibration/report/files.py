"""Writing a report: whole or not at all, and an error that says what mends it."""

import json
import os
import tempfile
from pathlib import Path

from calibration.report.data import ReportData
from calibration.report.page import page
from ctxguard.errors import ConfigurationError


def write_html(data: ReportData, path: Path | str) -> None:
    """Write the report as one HTML file that needs nothing else, from ``file://`` as well.

    Raises:
        ConfigurationError: nothing can be written at this path.
        MissingExtraError: plotly is not installed.
    """
    _write(page(data), Path(path))


def write_json(data: ReportData, path: Path | str) -> None:
    """Write the report's data as JSON; the same data gives the same bytes.

    Raises:
        ConfigurationError: nothing can be written at this path.
    """
    document = data.model_dump(mode="json")
    _write(json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n", Path(path))


def _write(text: str, path: Path) -> None:
    """Write beside and rename: a reader never meets half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigurationError(
            f"the report cannot be written to {path} ({error.strerror or error}); name a file in "
            "a folder that can be written to"
        ) from error

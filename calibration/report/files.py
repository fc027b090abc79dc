"""Write a report to a file, as a page or as JSON."""

import json
from pathlib import Path

from calibration.report.data import ReportData
from calibration.report.page import page
from ctxguard._support.atomic_write import atomic_write
from ctxguard.errors import ConfigurationError


def write_html(data: ReportData, path: Path | str) -> None:
    """Write the report as one HTML file, which needs no other file and no network.

    Raises:
        ConfigurationError: the file cannot be written.
        MissingExtraError: Jinja2 is not installed.
    """
    _write(page(data), Path(path))


def write_json(data: ReportData, path: Path | str) -> None:
    """Write the report's data as JSON; the same data gives the same bytes.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    document = data.model_dump(mode="json")
    _write(json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n", Path(path))


def _write(text: str, path: Path) -> None:
    try:
        with atomic_write(path) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise ConfigurationError(
            f"the report cannot be written to {path} ({error.strerror or error}); name a file in "
            "a folder that can be written to"
        ) from error

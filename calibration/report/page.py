"""Writes reports as HTML pages, from the templates next to this file, or as JSON.

Everything that comes from labels, passages or settings is escaped, and the page makes no request.
Its one script turns the dial; the policy of the page names its digest, so that no other runs. Reads
the templates, and writes the report. Pages need the extra `report`, JSON does not.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from calibration.evaluate import DESCRIPTIONS
from calibration.report.chart import frontier
from calibration.report.content import ReportData
from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.extras import require
from ctxguard._support.words import count, figure
from ctxguard.errors import ConfigurationError
from ctxguard.measure.interval import CONFIDENCE

NO_DATA = "no data"

_DIGITS = 6

_ANSWERS = {
    "enforce": "Yes: switch it on.",
    "shadow": "Not yet: run it in shadow.",
    "keep": "No: keep what you serve today.",
}


def page(data: ReportData) -> str:
    """Write the report as one HTML document; the same data gives the same text."""
    script = files(__package__).joinpath("templates", "dial.js").read_text("utf-8").strip()
    text: str = (
        _templates()
        .get_template("page.html.j2")
        .render(
            data=data,
            profile=data.profile,
            confidence=CONFIDENCE,
            chart_of=frontier,
            answers=_ANSWERS,
            descriptions=DESCRIPTIONS,
            script=script,
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            dial=json.dumps(_rounded(to_jsonable_python(data.dial)), separators=(",", ":")),
        )
    )
    return text


def _templates() -> Any:
    """Open the templates next to this file, with their filters."""
    jinja2 = require("jinja2", "report")
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("calibration.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "anchor": lambda route: f"route-{route.route.value.replace('+', '-')}",
        "count": "{:,}".format,
        "counted": count,
        "markup": require("markupsafe", "report").Markup,
        "number": number,
    }
    return found


def number(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    """Write a value with at most three digits, or ``no data``.

    >>> number(0.12345), number(-0.0001, signed=True), number(None)
    ('0.123', '+0.000', 'no data')
    """
    if value is None:
        return NO_DATA
    # Rounded twice, so that the last digit of another machine changes no text.
    return figure(_rounded(value), digits, "+" if signed else "").replace("-", "−")


def write_html(data: ReportData, path: Path | str) -> None:
    """Write the report as one HTML file, which needs no other file and no network.

    Raises:
        ConfigurationError: the file cannot be written.
        MissingExtraError: Jinja2 is not installed.
    """
    _write(page(data), Path(path))


def write_judged(evidence: Mapping[str, Any], path: Path) -> None:
    """Write the table of judged requests by k: JSON if the name ends in .json, else a page.

    Args:
        evidence: The output of ``ctxguard calibrate --store --json``.

    Raises:
        ConfigurationError, MissingExtraError: as ``write_html``.
    """
    if path.suffix == ".json":
        write_json(evidence, path)
    else:
        _write(_templates().get_template("judged.html.j2").render(**evidence), path)


def write_json(data: Any, path: Path | str) -> None:
    """Write the report's data as JSON, as ``write_html`` does; equal data give equal bytes."""
    document = _rounded(to_jsonable_python(data))
    _write(json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n", Path(path))


def _rounded(value: Any) -> Any:
    """Round floats to six significant digits: stable as text, and more than is known."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _write(text: str, path: Path) -> None:
    """Write the whole page, or nothing."""
    try:
        with atomic_write(path) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise ConfigurationError(
            f"the report cannot be written to {path} ({error.strerror or error}); name a file in a "
            "folder that you may write to"
        ) from error

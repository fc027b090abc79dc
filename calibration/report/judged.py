"""The report of judged requests: the table by k, as one HTML page or as JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibration.report.page import templates, write_json, write_text


def write_judged(evidence: Mapping[str, Any], path: Path) -> None:
    """Write the figures, as JSON where the name ends in .json and else as a page.

    Args:
        evidence: As ``ctxguard calibrate --store --json`` prints it.

    Raises:
        ConfigurationError: the file cannot be written.
        MissingExtraError: Jinja2 is not installed.
    """
    if path.suffix == ".json":
        write_json(evidence, path)
        return
    page = templates().get_template("judged.html.j2").render(**evidence)
    write_text(page, path)

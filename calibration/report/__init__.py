"""Writes the report of a calibration: one HTML page that a person can check, and JSON.

``report`` gathers the evidence as data; ``write_html`` and ``write_json`` write it to a file.
"""

from calibration.report.content import ReportData, certificate_words, report
from calibration.report.page import write_html, write_json, write_judged
from calibration.report.summary import summarise

__all__ = [
    "ReportData",
    "certificate_words",
    "report",
    "summarise",
    "write_html",
    "write_json",
    "write_judged",
]

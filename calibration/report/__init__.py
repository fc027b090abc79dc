"""The report of a calibration: one HTML file that a person can check, and the same as JSON.

``report`` gathers the evidence as data, ``write_html`` and ``write_json`` write it.
"""

from calibration.report.data import ReportData
from calibration.report.evidence import report
from calibration.report.files import write_html, write_json

__all__ = ["ReportData", "report", "write_html", "write_json"]

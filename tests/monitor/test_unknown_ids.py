"""The id that was meant, where a spreadsheet or a person has made another of it."""

import pytest

from ctxguard.monitor.labels.unknown_ids import probably_meant


@pytest.mark.parametrize(
    ("wrong", "known"),
    [
        ("12-May", "may-12"),
        ("May-12", "may-12"),
        ("05-Jan", "Jan 5"),
        ("1-Mar", "MARCH1"),
        ("2026-05-12", "may-12"),
        ("05/12/2026", "may-12"),
        ("12.05.2026", "may-12"),
        ("May-12", "may-2012"),
        ("1067", "01067"),
        ("1.1", "1.10"),
        ("1,1", "1.10"),
        ("1E+05", "1e5"),
        ("TRUE", "true"),
        ("'doc-7 ", "doc-7"),
        ("kettel-cleaning", "kettle-cleaning"),
    ],
)
def test_of_what_spreadsheets_and_people_write(wrong: str, known: str) -> None:
    assert probably_meant(wrong, [known, "quite another"]) == known


@pytest.mark.parametrize(
    ("wrong", "known"),
    [
        ("1", ["01", "001"]),
        ("doc-77", ["doc-78", "doc-79"]),
        ("3-Feb", ["2-3", "3-2"]),
        ("unlike", ["anything"]),
        ("", ["a"]),
    ],
)
def test_none_unless_one_can_be_meant(wrong: str, known: list[str]) -> None:
    assert probably_meant(wrong, known) is None

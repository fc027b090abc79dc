"""Columns of metadata as signals: what each kind of value says of one list of candidates."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.columns import MOST_SOURCES, SignalColumn, read_column, with_columns
from ctxguard.core.types import Hit, Passage, PassagesBy, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError

UPDATED = SignalColumn("updated_at", "time")


def ranking_of(*metadata: dict[str, object]) -> Ranking:
    hits = [Hit(f"p{n}", 1.0, "text", metadata=each) for n, each in enumerate(metadata)]
    return Ranking.from_hits(hits, ScoreKind.RATIO)


def test_ages_count_from_the_newest_candidate() -> None:
    dates = ["2024-03-01", "2024-02-28", "2023-03-02T12:00:00Z"]
    later = ["2034-03-01", "2034-02-27", "2033-03-01T12:00:00+02:00"]
    ages = UPDATED.signals("q", dates)["updated_at:age"]
    assert np.expm1(ages) == pytest.approx([0.0, 2.0, 364.5])
    assert UPDATED.signals("q", later)["updated_at:age"] == pytest.approx(ages)


def test_version_age_counts_releases_between() -> None:
    """Versions are aged by the releases between and not by their text."""
    ages = SignalColumn("v", "version").signals("q", ["1.9", "1.10", "v1.10rc1", "2.0.1"])["v:age"]
    assert np.expm1(ages) == pytest.approx([2.0, 1.0, 1.0, 0.0])


def test_missing_value_is_the_mean() -> None:
    """A candidate without a value has the mean, and a list without any has no signal."""
    ages = UPDATED.signals("q", ["2024-03-01", None, "soon", "2024-02-01"])["updated_at:age"]
    assert ages[1] == ages[2] == pytest.approx((ages[0] + ages[3]) / 2)
    assert UPDATED.signals("q", [None, "soon"]) == {}


@pytest.mark.parametrize(
    ("kind", "query", "values", "named"),
    [
        (
            "version",
            "how was it in 2.1?",
            ["2.1", "2.1.3", "2.10", "1.2.1", None],
            [1, 1, -1, -1, -1],
        ),
        ("version", "how was it in 2.1.0?", ["2.1", "2.1.3"], [1, -1]),
        ("version", "how is it, in 5 steps?", ["5", "6.1"], [0, 0]),
        ("version", f"how is it in 1.{'9' * 5_000}?", ["1.9", "2.0"], [0, 0]),
        ("time", "what did it cost in 2021?", ["2021-05-01", "2022-05-01", None], [1, -1, -1]),
        ("time", "what does it cost?", ["2021-05-01", "2022-05-01"], [0, 0]),
        ("source", "what does the Help Centre say?", ["help-centre", "forum"], [1, -1]),
        ("source", "does the forumite know?", ["help centre", "forum"], [0, 0]),
    ],
)
def test_names_in_the_query_stand_out(
    kind: str, query: str, values: list[object], named: list[int]
) -> None:
    """What the query names stands out from the others of the list."""
    column = SignalColumn("c", kind, sources=("forum",))  # type: ignore[arg-type]
    assert column.signals(query, values)["c:named"].tolist() == named


def test_each_common_source_has_a_signal() -> None:
    column = read_column("source", ["wiki"] * 9 + ["forum.example"] * 5 + ["rare"])
    assert column.sources == ("forum.example", "wiki")
    signals = column.signals("q", ["forum.example", "wiki", "rare", None])
    assert signals["source:forum_example"].tolist() == [1, 0, 0, 0]
    assert signals["source:wiki"].tolist() == [0, 1, 0, 0]


def test_numbers_age_in_units_of_spread() -> None:
    column = read_column("clicks", [0, 10, 20, 30])
    assert (column.kind, column.unit) == ("number", pytest.approx(np.std([0, 10, 20, 30])))
    ages = column.signals("q", [20, 30])["clicks:age"]
    assert np.expm1(ages) == pytest.approx([10 / column.unit, 0.0])
    assert read_column("clicks", [0, 10]).signals("q", [1]).keys() == {"clicks:age"}


def test_only_the_commonest_sources_are_kept() -> None:
    values = [f"s{n}" for n in range(MOST_SOURCES + 9) for _ in range(4 + n)]
    column = read_column("source", values)
    assert len(column.sources) == MOST_SOURCES
    assert "s0" not in column.sources


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": ""}, "must not be empty"),
        ({"name": "a:b"}, "contain a colon"),
        ({"unit": 0.0}, "must be finite and > 0"),
        ({"unit": math.inf}, "must be finite and > 0"),
        ({"unit": math.nan}, "must be finite and > 0"),
    ],
)
def test_impossible_columns_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        SignalColumn(**{"name": "age", "kind": "number", **settings})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([None, ""], "no candidate has"),
        (["2024-01-01"] * 3, "the same value"),
        ([f"https://example.org/{n}" for n in range(30)], "most of its values are rare"),
    ],
)
def test_column_without_signal_is_refused_by_name(values: list[object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'link'.*{says}|{says}.*'link'"):
        read_column("link", values)


def test_signals_stand_beside_the_rankings_own() -> None:
    ranking = ranking_of({"updated_at": "2024-03-01"}, {"updated_at": "2024-02-28"}, {})
    ranking = replace(ranking, signals={"clicks": np.array([1.0, 2.0, 3.0])})
    found = with_columns(ranking, [UPDATED], "q").signals
    assert list(found) == ["clicks", "updated_at:age", "updated_at:named"]


def test_unreadable_passages_give_no_signals() -> None:
    def unreadable(_position: int) -> Passage:
        raise OSError

    ranking = replace(ranking_of({}, {}), passages=PassagesBy(unreadable))
    assert with_columns(ranking, [UPDATED], "q").signals == {}


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.dates(),
    st.datetimes(), st.sampled_from(["2024-02-30", "1.2.3", "0000-01-01", "9" * 40, "v1"]),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip


@given(
    st.sampled_from(["time", "version", "number", "source"]),
    st.text(max_size=20),
    st.lists(VALUES, max_size=6),
)
def test_any_values_give_finite_signals(kind: str, query: str, values: list[object]) -> None:
    column = SignalColumn("c", kind, sources=("True", "v1"))  # type: ignore[arg-type]
    for signal in column.signals(query, values).values():
        assert signal.shape == (len(values),)
        assert np.isfinite(signal).all()

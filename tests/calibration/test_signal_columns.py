"""Columns of metadata, from a retriever's passages through calibration to a guard."""

from pathlib import Path

import numpy as np
import pytest
from simulated_pools import guard_of

from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query
from calibration.settings import Settings
from ctxguard import ExpectedUtilityPolicy, Flag, Hit, Profile
from ctxguard.errors import ConfigurationError
from ctxguard.measure.worth import STRICT

N, DEPTH = 60, 10
YEARS = (2004, 2011, 2019)


class Handbook:
    """Three editions of a page, of which cosines say nothing, among seven other pages.

    The newest edition is right, unless the query names the year of the oldest.
    """

    def __init__(self, *, without: str = "") -> None:
        self.without = without

    def right(self, query: str) -> int:
        return 0 if "2004" in query else 2

    def retrieve(self, query: str, *, depth: int) -> list[Hit]:
        number = int(query.split()[1])
        luck = np.random.default_rng(number)
        hits = []
        for row in luck.permutation(DEPTH)[:depth].tolist():
            year = YEARS[row] if row < len(YEARS) else YEARS[int(luck.integers(len(YEARS)))]
            metadata = {
                "updated_at": f"{year}-05-{1 + number % 9:02}",
                "source": ("wiki", "forum")[int(luck.integers(2))],
                "link": f"https://example.org/{number}/{row}",
                "checked": int(row == self.right(query)),
            }
            metadata.pop(self.without, None)
            cosine = luck.normal(0.8 if row < len(YEARS) else 0.3, 0.05)
            hits.append(
                Hit(f"{query}-{row}", float(cosine), f"A page, edition {row}.", metadata=metadata)
            )
        return hits

    def dataset(self) -> Dataset:
        qrels = {name: {f"{name}-{self.right(name)}": 1} for name in map(query, range(N))}
        return Dataset("handbook", tuple(Query(name, name) for name in qrels), qrels)


def query(number: int) -> str:
    return f"page {number}" if number % 3 else f"page {number} in 2004"


def settings(*columns: str) -> Settings:
    return Settings(
        depth=DEPTH, held_out=0.0, context="utility", utilities=STRICT, signal_columns=columns
    )


def served(book: Handbook, profile: Profile) -> float:
    """The share of new queries whose right edition is served, alone."""
    guard = guard_of(book, profile, score_kind="cosine", mode="enforce")
    kept = [guard.retrieve(query(n)).kept_ids for n in range(N, N + 30)]
    right = [(f"{query(n)}-{book.right(query(n))}",) for n in range(N, N + 30)]
    return float(np.mean([one == other for one, other in zip(kept, right, strict=True)]))


def test_asked_edition_is_served(tmp_path: Path) -> None:
    book = Handbook()
    made = calibrate(book, book.dataset(), settings("updated_at", "source"), score_kind="cosine")
    made.profile.save(tmp_path / "profile.json")
    profile = Profile.load(tmp_path / "profile.json")
    assert [column.kind for column in profile.signal_columns] == ["time", "source"]
    (policy,) = {route.policy for route in profile.routes.values()}
    assert isinstance(policy, ExpectedUtilityPolicy)
    weights = dict(zip(policy.model.features, policy.model.coefficients[5:], strict=True))
    assert weights["updated_at:age"] < 0.0 < weights["updated_at:named"]
    assert abs(weights["source:wiki"]) < -0.2 * weights["updated_at:age"]
    without = calibrate(book, book.dataset(), settings(), score_kind="cosine")
    assert without.profile.signal_columns == ()
    assert served(book, without.profile) < 0.5
    assert served(book, profile) > 0.9


def test_lost_column_is_flagged() -> None:
    book = Handbook()
    made = calibrate(book, book.dataset(), settings("updated_at"), score_kind="cosine")
    book = Handbook(without="updated_at")
    guard = guard_of(book, made.profile, score_kind="cosine", mode="enforce")
    assert Flag.MISSING_SIGNALS in guard.retrieve("page 7").flags


def test_label_made_column_is_left_out() -> None:
    book = Handbook()
    made = calibrate(book, book.dataset(), settings("checked", "updated_at"), score_kind="cosine")
    assert [column.name for column in made.profile.signal_columns] == ["updated_at"]
    assert all(
        "checked" not in name
        for each in made.outcomes.values()
        for name in each.route.pools.signals
    )
    (note,) = [note for note in made.profile.provenance.notes if "checked" in note]
    assert "left out: alone it puts 100% of the relevant candidates above the others" in note


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (("link",), "'link' holds neither times, versions nor numbers"),
        (("authors",), "no candidate has the signal column 'authors'"),
        (("source", "source"), "each once"),
        (tuple("abcdefghi"), "at most 8"),
    ],
)
def test_signalless_columns_are_refused(columns: tuple[str, ...], says: str) -> None:
    book = Handbook()
    with pytest.raises(ConfigurationError, match=says):
        calibrate(book, book.dataset(), settings(*columns), score_kind="cosine")

"""Signals of a retriever and columns of its metadata: from hits through a profile to a guard."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_pools import guard_of, labelled, ranking_of

from calibration.calibrate import Calibration, calibrate
from calibration.data.dataset import Dataset, Query
from calibration.fit import pool_features
from calibration.settings import Settings
from ctxguard import ContextGuard, Flag, Hit, Profile, Ranking, ScoreKind
from ctxguard.core.decision import decide
from ctxguard.core.signals import feature_names
from ctxguard.errors import ConfigurationError
from ctxguard.measure.worth import STRICT
from ctxguard.monitor.sampling.record import SampleRecord, record_of
from tests.counted import Counted

N, DEPTH = 60, 12
GARBAGE = (math.nan, math.inf, -3.4e38)


class Shop:
    """Cosines that say little, and an authority that says which passage is right."""

    def __init__(self, *, without: str = "") -> None:
        self.without = without

    def truth(self, query: str) -> int:
        return int(query.rsplit(maxsplit=1)[-1]) % DEPTH

    def retrieve(self, query: str, *, depth: int) -> list[Hit]:
        random = np.random.default_rng(int(query.rsplit(maxsplit=1)[-1]))
        noise, authority = random.random(DEPTH), random.random(DEPTH)
        authority[self.truth(query)] += 1.0
        return [
            Hit(
                f"{query}-{row}",
                float(noise[row]),
                f"Passage {row}.",
                signals={
                    name: value
                    for name, value in (("authority", authority[row]), ("price", noise[-row - 1]))
                    if name != self.without
                },
            )
            for row in np.argsort(-noise)[:depth].tolist()
        ]

    def fingerprint(self) -> dict[str, str]:
        return {"engine": "shop"}


def dataset() -> Dataset:
    queries = tuple(Query(f"q{i:03d}", f"question {i}") for i in range(N))
    qrels = {q.query_id: {f"{q.text}-{Shop().truth(q.text)}": 1} for q in queries}
    return Dataset("shop", queries, qrels)


@cache
def calibrated() -> Calibration:
    asked = Settings(depth=DEPTH, context="utility", utilities=STRICT)
    return calibrate(Shop(), dataset(), asked, score_kind=ScoreKind.COSINE)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    calibrated().profile.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def guarded(retriever: object, profile: Path, **settings: Any) -> ContextGuard:
    return guard_of(retriever, profile, score_kind=ScoreKind.COSINE, **settings)


class TestFromHitsToTheAnswer:
    def test_right_passage_comes_first(self, profile: Path) -> None:
        guard = guarded(Shop(), profile)
        contexts = {i: guard.retrieve(f"question {i}") for i in range(1000, 1030)}
        first = [c.kept_ids[0] == f"question {i}-{i % DEPTH}" for i, c in contexts.items()]
        assert np.mean(first) > 0.9
        assert np.mean([len(context.passages) for context in contexts.values()]) < 2.0
        # One in twenty may be called insufficient although it is not.
        assert np.mean([context.flags == () for context in contexts.values()]) > 0.8

    def test_missing_signal_keeps_top_k(self, profile: Path) -> None:
        counted = Counted()
        guard = guarded(Shop(without="authority"), profile, telemetry=counted.telemetry)
        context = guard.retrieve("question 7")
        assert context.flags == (Flag.MISSING_SIGNALS,)
        assert context.differences == (
            "the policy requires signals that the answer lacks: authority",
        )
        assert counted.by_label("flags") == {("missing_signals",): 1}

    def test_sample_is_decided_again_alike(self, profile: Path) -> None:
        guard = guarded(Shop(), profile)
        context = guard.retrieve("question 9")
        record = SampleRecord.from_bytes(record_of(context, 0.5, 1.0).to_bytes())
        again = decide(record.ranking(), context.decision.policy)
        assert again.kept_ids == context.decision.kept_ids
        assert again.probabilities == pytest.approx(context.decision.probabilities, abs=1e-5)


def test_scores_without_legs_are_a_leg() -> None:
    (route,) = calibrated().profile.routes.values()
    policy = route.policy
    assert policy.model.legs == ("ranking",)
    assert policy.model.signals == ("authority", "price")
    assert "1 scorer, 2 named signals" in route.why


def with_signals(**signals: Sequence[float]) -> Ranking:
    arrays = {name: np.array(values) for name, values in signals.items()}
    return replace(ranking_of([0.9, 0.5, 0.1], kind=ScoreKind.COSINE), signals=arrays)


class TestPools:
    def test_signals_follow_candidate_order(self) -> None:
        ranking = ranking_of([0.1, 0.9], kind=ScoreKind.COSINE)
        ranking = replace(ranking, signals={"price": np.array([5.0, 7.0])})
        pools = labelled([ranking], [{"p0": 1}], depth=3)
        assert pools.passage_ids == (("p1", "p0"),)
        assert pools.signals["price"][0, :2].tolist() == [7.0, 5.0]
        assert math.isnan(pools.signals["price"][0, 2])
        (again,) = pools.rankings()
        assert again.signals["price"].tolist() == [7.0, 5.0]
        names = feature_names(["ranking"], ["price", "price.z", "price.gap"])
        assert pool_features(pools).shape == (2, len(names))

    @pytest.mark.parametrize("lacking", [{}, *[{"age": [1.0, n, 2.0]} for n in GARBAGE]])
    def test_lacking_signal_is_left_out(self, lacking: dict[str, list[float]]) -> None:
        rankings = [
            with_signals(price=[1.0, 2.0, 3.0], **lacking),
            with_signals(price=[1.0, 2.0, 3.0], age=[1.0, 1.0, 2.0]),
            ranking_of([], kind=ScoreKind.COSINE),  # without a candidate nothing is lacking
        ]
        pools = labelled(rankings, [{"p0": 1}, {}, {}])
        assert list(pools.signals) == ["price"]
        (note,) = pools.notes
        assert note == "signal 'age' is left out: 1 of 3 queries have a candidate without it"

    def test_the_note_is_in_the_profile(self) -> None:
        class Half(Shop):
            def retrieve(self, query: str, *, depth: int) -> list[Hit]:
                hits = super().retrieve(query, depth=depth)
                return [replace(hit, signals=None) for hit in hits] if "7" in query else hits

        found = calibrate(Half(), dataset(), Settings(depth=DEPTH), score_kind=ScoreKind.COSINE)
        notes = "\n".join(found.profile.provenance.notes)
        assert "external: signal 'authority' is left out" in notes

    @pytest.mark.parametrize("name", ["price.z", "a.b", ""])
    def test_feature_like_name_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match="contain a full stop"):
            labelled([with_signals(**{name: [1.0, 2.0, 3.0]})], [{"p0": 1}])

    def test_what_is_no_number_is_unknown(self) -> None:
        values: list[object] = [1, "2", None, "free", 10**400, True]
        hits = [Hit(f"p{i}", 1.0, signals={"price": v}) for i, v in enumerate(values)]  # type: ignore[dict-item]
        found = Ranking.from_hits(hits, ScoreKind.COSINE).signals["price"]
        assert np.array_equal(found, [1.0, 2.0, math.nan, math.nan, math.nan, 1.0], equal_nan=True)


EDITIONS = 10
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
        for row in luck.permutation(EDITIONS)[:depth].tolist():
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
        depth=EDITIONS, held_out=0.0, context="utility", utilities=STRICT, signal_columns=columns
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

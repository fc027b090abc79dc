"""The decision: every property of the relative filter, and what happens to garbage."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ctxguard.core.decision import Decision, decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.scores import relative_scores
from ctxguard.core.types import DropReason, Flag, Hit, Ranking, ScoreKind
from ctxguard.errors import ConfigurationError

RANGES = {
    ScoreKind.RATIO: (0.0, 64.0),
    ScoreKind.COSINE: (-1.0, 1.0),
    ScoreKind.INNER_PRODUCT: (-64.0, 64.0),
    ScoreKind.LOGIT: (-16.0, 16.0),
    ScoreKind.DISTANCE: (-64.0, 0.0),
    ScoreKind.PROBABILITY: (0.0, 1.0),
}
GARBAGE = [None, math.nan, math.inf, -math.inf, 1e37, -3.4e38, "0.9"]

relative_kinds = st.sampled_from(list(RANGES))


@st.composite
def rankings(draw: st.DrawFn) -> Ranking:
    """Scores of a kind, with many ties, in any order."""
    kind = draw(relative_kinds)
    low, high = RANGES[kind]
    coarse = st.integers(0, 8).map(lambda step: low + (high - low) * step / 8)
    scores = draw(st.lists(st.one_of(coarse, st.floats(low, high)), max_size=25))
    with_ranks = draw(st.booleans())
    places = draw(st.permutations(range(len(scores))))
    return Ranking.from_hits(
        [
            Hit(f"p{place:02d}", score, rank=place + 1 if with_ranks else None)
            for place, score in zip(places, scores, strict=True)
        ],
        kind,
    )


@st.composite
def policies(draw: st.DrawFn) -> RatioPolicy:
    k = draw(st.integers(1, 30))
    return RatioPolicy(
        k=k,
        min_ratio=draw(st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.5, 0.75, 1.0]))),
        temperature=draw(st.one_of(st.just(1.0), st.floats(0.05, 20.0))),
        min_keep=draw(st.integers(0, k)),
    )


def ranked(scores: Sequence[float | None], kind: ScoreKind = ScoreKind.RATIO) -> Ranking:
    """Passages ``a``, ``b``, … with these scores."""
    return Ranking.from_hits([Hit(chr(97 + i), score) for i, score in enumerate(scores)], kind)


def outcome(decision: Decision) -> list[tuple[object, ...]]:
    return [
        (candidate.passage_id, candidate.rank, candidate.score, candidate.reason, candidate.kept_if)
        for candidate in decision.decisions
    ]


class TestProperties:
    @given(rankings(), policies())
    def test_kept_reach_the_ratio_or_min_keep(self, ranking: Ranking, policy: RatioPolicy) -> None:
        """The kept are those of the sorted that reach the ratio or are owed to `min_keep`."""
        decision = decide(ranking, policy)
        ranks = ranking.ranks or [0] * len(ranking)
        expected = sorted(
            zip([-score for score in ranking.scores], ranks, ranking.passage_ids, strict=True)  # type: ignore[operator]
        )
        assert list(decision.kept_ids) == [
            passage_id for _, _, passage_id in expected[: decision.n_kept]
        ]
        scores = [ranking.scores[position] for position in decision.order]
        relative = relative_scores(ranking.kind, scores, policy.temperature)  # type: ignore[arg-type]
        reaching = sum(r >= policy.min_ratio for r in relative)
        assert decision.n_kept == max(min(reaching, policy.k), min(policy.min_keep, len(ranking)))

    @given(rankings(), policies(), st.data())
    def test_invalid_scores_change_only_the_count(
        self, ranking: Ranking, policy: RatioPolicy, data: st.DataObject
    ) -> None:
        assume(len(ranking) > 0)  # nothing but garbage is served in its own order
        garbage = data.draw(st.lists(st.sampled_from(GARBAGE), min_size=1, max_size=5))
        columns = list(zip(ranking.passage_ids, ranking.scores, strict=True))
        for number, score in enumerate(garbage):
            place = data.draw(st.integers(0, len(columns)))
            columns.insert(place, (f"garbage{number}", score))  # type: ignore[arg-type]
        dirty = replace(
            ranking,
            passage_ids=[passage_id for passage_id, _ in columns],
            scores=[score for _, score in columns],
            ranks=None,
        )
        clean_decision = decide(replace(ranking, ranks=None), policy)
        decision = decide(dirty, policy)
        assert outcome(decision)[: len(ranking)] == outcome(clean_decision)
        assert decision.dropped_by_reason[DropReason.INVALID_SCORE] == len(garbage)
        assert Flag.INVALID_SCORES in decision.flags

    @given(rankings(), policies())
    def test_named_thresholds_keep_no_tighter_do(
        self, ranking: Ranking, policy: RatioPolicy
    ) -> None:
        """The thresholds of a decision keep the passage, and no tighter ones do."""
        for candidate in decide(ranking, policy).decisions:
            if candidate.kept:
                assert candidate.kept_if == ()
                continue
            needed = {threshold.setting: threshold.value for threshold in candidate.kept_if}
            assert needed
            if "k" in needed:
                needed["k"] = int(needed["k"])
            enough = replace(policy, **needed)  # type: ignore[arg-type]
            assert candidate.passage_id in decide(ranking, enough).kept_ids
            for setting, value in needed.items():
                tighter = value - 1 if setting == "k" else math.nextafter(value, 1.0)
                too_tight = replace(enough, **{setting: tighter})  # type: ignore[arg-type]
                assert candidate.passage_id not in decide(ranking, too_tight).kept_ids

    @given(rankings(), policies(), st.data())
    def test_each_candidate_has_one_reason(
        self, ranking: Ranking, policy: RatioPolicy, data: st.DataObject
    ) -> None:
        n = len(ranking)
        extra = data.draw(st.lists(st.sampled_from([None, math.nan, 0.0]), max_size=4))
        mixed = replace(
            ranking,
            passage_ids=[*ranking.passage_ids, *(["p00"] * len(extra))],
            scores=[*ranking.scores, *extra],
            ranks=None,
        )
        decision = decide(mixed, policy)
        candidates = decision.decisions
        assert decision.n_kept + sum(decision.dropped_by_reason.values()) == n + len(extra)
        assert len(candidates) == n + len(extra)
        assert decision.n_kept == sum(candidate.kept for candidate in candidates)
        reasons = Counter(each.reason for each in candidates if each.reason is not None)
        assert reasons == decision.dropped_by_reason


@pytest.mark.parametrize(
    ("ranking", "policy", "dropped"),
    [
        (
            ranked([10.0, 9.0, 1.0]),
            RatioPolicy(k=2, min_ratio=0.7),
            ("c", 3, 1.0, 0.1, "beyond_k", (("k", 3), ("min_ratio", 0.1))),
        ),
        (
            ranked([0.03, 0.02], ScoreKind.RANK),
            RatioPolicy(k=1),
            ("b", 2, 0.02, None, "beyond_k", (("k", 2),)),
        ),
        (ranked([1.0, None]), RatioPolicy(), ("b", None, None, None, "invalid_score", ())),
    ],
)
def test_drop_names_every_remedy(
    ranking: Ranking, policy: RatioPolicy, dropped: tuple[object, ...]
) -> None:
    *own, reason, kept_if = dropped
    assert decide(ranking, policy).decisions[-1] == (*own, None, reason, kept_if)


NOTHING_COMPARED = (Flag.INVALID_SCORES,)


@pytest.mark.parametrize(
    ("kind", "scores", "policy", "kept", "flags"),
    [
        (ScoreKind.RATIO, [], RatioPolicy(min_ratio=0.7), "", ()),
        (ScoreKind.RATIO, [10.0, 7.0, 6.99], RatioPolicy(min_ratio=0.7), "ab", ()),
        (ScoreKind.RATIO, [0.0, 0.0, 0.0], RatioPolicy(k=2, min_ratio=0.7), "ab", ()),
        (ScoreKind.LOGIT, [-8.0, -8.1, -12.0], RatioPolicy(min_ratio=0.7), "ab", ()),
        # Rank is cut by k alone, and needs no scores.
        (ScoreKind.RANK, [1 / (60 + n) for n in range(9)], RatioPolicy(k=4), "abcd", ()),
        (ScoreKind.RANK, [None, None, None], RatioPolicy(k=2), "ab", ()),
        (ScoreKind.RATIO, [None, math.nan, None], RatioPolicy(2, 0.7), "ab", NOTHING_COMPARED),
        (
            ScoreKind.DISTANCE,
            [math.nan, None, -3.4e38],
            RatioPolicy(2, 0.7),
            "ab",
            NOTHING_COMPARED,
        ),
    ],
)
def test_plain_and_unusual_scores_keep(
    kind: ScoreKind,
    scores: list[float | None],
    policy: RatioPolicy,
    kept: str,
    flags: tuple[Flag, ...],
) -> None:
    decision = decide(ranked(scores, kind), policy)
    assert (decision.kept_ids, decision.flags) == (tuple(kept), flags)
    assert len(decision.decisions) == len(scores)


class TestDomain:
    @pytest.mark.parametrize(
        ("kind", "scores"),
        [
            (ScoreKind.RATIO, [3.0, 1.0, -0.5]),
            (ScoreKind.RATIO, [-1.0, -2.0, -3.0]),
            (ScoreKind.RATIO, [0.0, -1.0, -2.0]),
            (ScoreKind.COSINE, [37.0, 12.0, 0.3]),
            (ScoreKind.PROBABILITY, [2.5, 0.1, -4.0]),
            (ScoreKind.DISTANCE, [0.1, 0.5, 0.9]),
        ],
    )
    @pytest.mark.parametrize("min_ratio", [0.0, 0.9])
    def test_scores_outside_their_kind_keep_top_k(
        self, kind: ScoreKind, scores: list[float], min_ratio: float
    ) -> None:
        decision = decide(ranked(scores, kind), RatioPolicy(k=2, min_ratio=min_ratio))
        assert (decision.kept_ids, decision.flags) == (("a", "b"), (Flag.DOMAIN_VIOLATION,))
        assert [candidate.relative_score for candidate in decision.decisions] == [None] * 3
        assert decision.dropped_by_reason == {DropReason.BEYOND_K: 1}

    @pytest.mark.parametrize("scores", [[0.1, 0.5, 0.9], [0.1, 0.1, 0.1], [-0.2, 0.3, 0.1]])
    @pytest.mark.parametrize("min_ratio", [0.0, 0.9])
    def test_positive_distances_keep_the_upstream_order(
        self, scores: list[float], min_ratio: float
    ) -> None:
        """They were not turned round: sorted by them the worst would come first."""
        hits = [Hit(name, score) for name, score in zip("cab", scores, strict=True)]
        ranking = Ranking.from_hits(hits, ScoreKind.DISTANCE)
        decision = decide(ranking, RatioPolicy(k=2, min_ratio=min_ratio))
        assert (decision.kept_ids, decision.flags) == (("c", "a"), (Flag.DOMAIN_VIOLATION,))
        assert decision.decisions[0].relative_score is None

    def test_positive_distances_sort_by_upstream_rank(self) -> None:
        """Distances above zero are put in the order of their upstream ranks."""
        hits = [
            Hit("b", 0.5, rank=2),
            Hit("b", 0.9, rank=4),
            Hit("c", math.nan, rank=1),
            Hit("d", 0.7, rank=3),
            Hit("a", 0.1, rank=1),
        ]
        decision = decide(Ranking.from_hits(hits, ScoreKind.DISTANCE), RatioPolicy())
        assert decision.kept_ids == ("a", "b", "d")
        assert set(decision.set_aside) == {
            (2, DropReason.INVALID_SCORE),
            (1, DropReason.DUPLICATE_ID),
        }

    def test_ratio_on_rank_only_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="carry only order"):
            decide(ranked([0.03, 0.02], ScoreKind.RANK), RatioPolicy(min_ratio=0.7))

    def test_temperature_separates_a_narrow_band(self) -> None:
        ranking = ranked([0.82, 0.81, 0.74], ScoreKind.COSINE)
        assert len(decide(ranking, RatioPolicy(min_ratio=0.7)).kept_ids) == 3
        assert len(decide(ranking, RatioPolicy(min_ratio=0.7, temperature=0.05)).kept_ids) == 2


class TestGarbage:
    @pytest.mark.parametrize("padding_id", ["-1", -1])
    @pytest.mark.parametrize("padding_score", [-3.4028235e38, 0.1])
    def test_faiss_padding_is_set_aside(self, padding_id: str | int, padding_score: float) -> None:
        ranking = replace(
            ranked([0.9, 0.8, padding_score], ScoreKind.COSINE),
            passage_ids=("a", "b", padding_id),  # type: ignore[arg-type]
        )
        decision = decide(ranking, RatioPolicy())
        assert decision.kept_ids == ("a", "b")
        assert decision.dropped_by_reason == {DropReason.INVALID_SCORE: 1}

    def test_nothing_but_padding_keeps_nothing(self) -> None:
        padding = replace(ranked([None, math.nan]), passage_ids=("-1", "-1"))
        decision = decide(padding, RatioPolicy())
        assert (decision.kept_ids, decision.flags) == ((), (Flag.INVALID_SCORES,))
        assert decision.dropped_by_reason == {DropReason.INVALID_SCORE: 2}

    def test_repeated_id_keeps_its_best_score(self) -> None:
        ranking = replace(ranked([1.0, 9.0, 8.0]), passage_ids=("a", "a", "b"))
        decision = decide(ranking, RatioPolicy())
        assert (decision.kept_ids, list(decision.kept)) == (("a", "b"), [1, 2])
        assert (decision.dropped_by_reason, decision.flags) == ({DropReason.DUPLICATE_ID: 1}, ())

    def test_unequal_lengths_are_refused(self) -> None:
        ranking = replace(ranked([2.0, 1.0]), scores=(2.0,))
        with pytest.raises(ConfigurationError, match="2 passage ids has 1 scores"):
            decide(ranking, RatioPolicy())


def test_rank_then_id_break_ties() -> None:
    hits = [Hit("d", 1.0), Hit("a", 1.0, rank=2), Hit("b", 1.0, rank=1), Hit("c", 1.0)]
    decision = decide(Ranking.from_hits(hits, ScoreKind.RATIO), RatioPolicy(k=3))
    assert decision.kept_ids == ("b", "a", "c")


@pytest.mark.parametrize("sort", [sorted, lambda scores: sorted(scores, reverse=True)])
def test_scores_may_be_a_numpy_array(sort: object) -> None:
    scores = sort([9.0, 8.0, 1.0])  # type: ignore[operator]
    as_list = decide(ranked(scores), RatioPolicy(min_ratio=0.7))
    for dtype in (np.float64, np.float32):
        as_array = replace(ranked(scores), scores=np.array(scores, dtype=dtype))  # type: ignore[arg-type]
        assert decide(as_array, RatioPolicy(min_ratio=0.7)).kept_ids == as_list.kept_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k 0 must be at least 1"),
        ({"min_ratio": 70.0}, "min_ratio 70.0 must lie in"),
        ({"min_ratio": math.nan}, "min_ratio nan"),
        ({"temperature": 0.0}, "temperature 0.0 must be > 0"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"min_keep": -1}, "min_keep -1 must lie in"),
        ({"k": 2, "min_keep": 3}, "min_keep 3 must lie in"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RatioPolicy(**settings)  # type: ignore[arg-type]

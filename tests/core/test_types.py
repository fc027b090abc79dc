"""Rankings built from hits, kinds and routes given by name, equality and representation."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Leg, Passage, Ranking, Route, ScoreKind
from ctxguard.errors import ConfigurationError


def test_ranking_from_hits_reads_passages_back() -> None:
    hits = [Hit("a", 2.0, "text", "title", metadata={"page": 3}), Hit("b", 1.0)]
    ranking = Ranking.from_hits(hits, ScoreKind.RATIO, Route.LEXICAL)
    assert len(ranking) == 2
    assert ranking.route is Route.LEXICAL
    assert ranking.passages[0] == Passage("a", "text", "title", {"page": 3})


def test_upstream_ranks_only_where_any() -> None:
    assert Ranking.from_hits((Hit("a", 1.0) for _ in "a"), ScoreKind.RATIO).ranks is None
    mixed = Ranking.from_hits([Hit("a", 1.0, rank=1), Hit("b", 1.0)], ScoreKind.RATIO)
    assert mixed.ranks == (1, None)


RANKING = Ranking.from_hits([Hit("a", 10.0), Hit("b", 7.0)], "ratio", "lexical")


class TestKindsAndRoutesGivenByName:
    """Adapters read them from configuration files, as text."""

    def test_become_members_at_construction(self) -> None:
        legs = {"lexical": Leg(np.array([10.0, 7.0]), cast(Any, "ratio"))}
        rebuilt = replace(RANKING, kind=cast(Any, "cosine"), route=cast(Any, "hybrid"))
        assert (RANKING.kind, RANKING.route) == (ScoreKind.RATIO, Route.LEXICAL)
        assert (rebuilt.kind, rebuilt.route) == (ScoreKind.COSINE, Route.HYBRID)
        assert replace(rebuilt, legs=legs).legs["lexical"].kind is ScoreKind.RATIO

    @pytest.mark.parametrize(
        ("make", "known"),
        [
            (lambda bad: Ranking.from_hits([], bad), "ratio, cos"),
            (lambda bad: replace(RANKING, legs={"dense": Leg(np.zeros(2), bad)}), "ratio, cos"),
            (lambda bad: Ranking.from_hits([], "ratio", bad), r"hybrid\+rerank"),
        ],
    )
    def test_unknown_name_lists_the_known(self, make: Any, known: str) -> None:
        with pytest.raises(ConfigurationError, match=f"'bm25' is unknown; use one of {known}"):
            make("bm25")


class TestEqualityAndRepresentation:
    RANKING = Ranking.from_hits(
        [Hit(f"p{n}", 12.0 - n, f"secret text {n}", "secret title") for n in range(12)], "ratio"
    )

    def test_arrays_equal_themselves_and_hash(self) -> None:
        legs = {"dense": Leg(np.arange(12.0), ScoreKind.COSINE)}
        ranking = replace(self.RANKING, scores=cast(Any, np.arange(12.0)), legs=legs)
        twin = replace(ranking, legs={"dense": Leg(np.arange(12.0), ScoreKind.COSINE)})
        for one, other in ((ranking, twin), (legs["dense"], twin.legs["dense"])):
            assert one == one  # noqa: PLR0124
            assert one != other
            assert len({one, other, one}) == 2

    def test_ranking_prints_ids_not_texts(self) -> None:
        printed = f"{self.RANKING} {self.RANKING.passages}"
        assert "secret" not in printed
        assert "'p0', 'p1'" in printed
        assert "2 more" in printed

    def test_decision_prints_kept_not_texts(self) -> None:
        decision = decide(self.RANKING, RatioPolicy(k=3, min_ratio=0.9))
        assert decision == decision  # noqa: PLR0124
        assert len({decision, decide(self.RANKING, RatioPolicy())}) == 2
        assert repr(decision) == (
            "Decision(kept=['p0', 'p1'], candidates=12, "
            "dropped={'below_ratio': 1, 'beyond_k': 9}, policy='ratio', flags=[])"
        )

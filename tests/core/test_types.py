"""The nouns: rankings built from hits."""

from ctxguard.types import Hit, Passage, Ranking, Route, ScoreKind, Verdict


def test_a_ranking_from_hits_reads_its_passages_back() -> None:
    hits = [Hit("a", 2.0, "text", "title", metadata={"page": 3}), Hit("b", 1.0)]
    ranking = Ranking.from_hits(hits, ScoreKind.RATIO, Route.LEXICAL)
    assert len(ranking) == 2
    assert ranking.route is Route.LEXICAL
    assert ranking.passages[0] == Passage("a", "text", "title", {"page": 3})


def test_a_ranking_keeps_upstream_ranks_only_where_there_are_any() -> None:
    assert Ranking.from_hits([Hit("a", 1.0)], ScoreKind.RATIO).ranks is None
    mixed = Ranking.from_hits([Hit("a", 1.0, rank=1), Hit("b", 1.0)], ScoreKind.RATIO)
    assert mixed.ranks == (1, None)


def test_a_ranking_may_be_empty_and_read_from_a_generator() -> None:
    assert len(Ranking.from_hits((hit for hit in ()), ScoreKind.RANK)) == 0


def test_a_verdict_without_a_reason_is_a_kept_passage() -> None:
    assert Verdict("a", 1, 1.0, 1.0, None, None).kept

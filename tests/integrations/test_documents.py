"""A framework's documents as a ranking, and the decisions on what is served."""

from ctxguard import Assembly, ContextGuard, Hit, Passage, RatioPolicy, ScoreKind
from ctxguard.integrations.documents import ranking_of_documents, served, text_digest


def read(passage_id: str, document: str) -> Passage:
    return Passage(passage_id, document)


def test_missing_id_is_digest_of_text() -> None:
    """Documents without an id get a digest of their text and stay apart."""
    texts = ["one", "two", "one", "three"]
    ranking = ranking_of_documents(texts, [None, "own", "", None], None, None, read)
    digest = text_digest("one")
    assert list(ranking.passage_ids) == [digest, "own", f"{digest}-2", text_digest("three")]
    context = ContextGuard().filter("q", ranking)
    assert context.dropped_by_reason == {"duplicate_text": 1}


def test_ties_keep_the_frameworks_order() -> None:
    ranking = ranking_of_documents(["x", "y"], ["b", "a"], [0.5, 0.5], ScoreKind.COSINE, read)
    assert ContextGuard().filter("q", ranking).kept_ids == ("b", "a")


def test_served_have_rank_score_and_flags() -> None:
    """What is served has rank, score and flags, in the order of presentation."""
    ids = ["a", "b", "c", "d"]
    ranking = ranking_of_documents(ids, ids, [0.9, 0.8, 0.7, 0.1], ScoreKind.COSINE, read)
    guard = ContextGuard(policy=RatioPolicy(k=3), assembly=Assembly(order="edges"))
    found = served(guard.filter("q", ranking, request_id="r1"))
    places = [(passage.passage_id, position) for passage, position, _ in found]
    assert places == [("a", 0), ("c", 2), ("b", 1)]
    assert found[1][2] == {
        "request_id": "r1",
        "score": 0.7,
        "probability": None,
        "rank": 3,
        "reason": None,
        "flags": ["uncalibrated"],
    }


def test_unenforced_contexts_stand_in_any_order() -> None:
    """With the best at both ends, a passage is not after the one that is served before it."""
    hits = [Hit(each, 0.9 - place / 10, each) for place, each in enumerate("abcd")]

    def search(query: str, *, depth: int) -> list[Hit]:
        return hits

    guard = ContextGuard(search, score_kind="cosine", k=3, assembly=Assembly(order="edges"))
    found = served(guard.retrieve("q"))
    assert [(position, own["rank"]) for _, position, own in found] == [(0, 1), (2, 3), (1, 2)]


def test_shadow_says_why_it_would_drop() -> None:
    ids = ["a", "b", "a", "c"]
    ranking = ranking_of_documents(
        ["w", "x", "y", "z"], ids, [0.9, -0.5, 0.8, 0.7], ScoreKind.COSINE, read
    )
    policy = RatioPolicy(k=4, min_ratio=0.7)
    guarded = ContextGuard(policy=policy, mode="shadow", k=4)
    found = served(guarded.filter("q", ranking))
    assert [(position, own["rank"], own["reason"]) for _, position, own in found] == [
        (0, 1, None),
        (1, 3, "below_ratio"),
        (2, None, "duplicate_id"),
        (3, 2, None),
    ]

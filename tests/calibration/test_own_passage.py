"""A question that is a passage itself is left out of its own candidates, as BEIR does."""

import pytest

from calibration.calibrate import calibrate
from calibration.data.dataset import Dataset, Query
from calibration.pools import notes_on_themselves
from calibration.replay import replay
from calibration.retrievers import wrapped
from ctxguard import Hit

ARGUMENT = "Being vegetarian helps the environment, as farming animals takes much land."
OTHERS = [Hit("b", 0.5, "Plants take land too."), Hit("c", 0.4, "Cows eat grass.")]


def found(own: Hit, *, query: str = ARGUMENT, relevant: str = "b") -> tuple[str, ...]:
    dataset = Dataset("d", (Query("a", query),), {"a": {relevant: 1}})
    source = wrapped(
        lambda query, *, depth: [Hit("x", 0.9, "First."), own, *OTHERS], score_kind="cosine"
    )
    pools = replay(source, dataset.queries, labels=dataset)
    assert bool(notes_on_themselves([pools, pools])) is bool(pools.themselves)
    return pools.passage_ids[0]


@pytest.mark.parametrize(
    "own",
    [
        Hit("a", 0.8, ARGUMENT),
        Hit("other", 0.8, ARGUMENT),
        Hit("other", 0.8, ARGUMENT.upper().replace(" ", "\n")),
        Hit("a", 0.8, ARGUMENT.partition(" ")[2], title=ARGUMENT.partition(" ")[0]),
        Hit("a", 0.8, f"{ARGUMENT} Hence it should be encouraged."),
        Hit("a", 0.8),
    ],
    ids=["both", "text", "another form", "title and text", "near text", "id without text"],
)
def test_is_left_out(own: Hit) -> None:
    assert found(own) == ("x", "b", "c")


@pytest.mark.parametrize(
    ("own", "relevant"),
    [
        (Hit("a", 0.8, "Quite another text under the same number."), "b"),
        (Hit("a", 0.8, ARGUMENT), "a"),
        (Hit("q", 0.8, ARGUMENT), "q"),
        (Hit("other", 0.8), "b"),
    ],
    ids=["an id by chance", "labelled relevant", "a labelled answer", "no text"],
)
def test_kept_where_another_or_answer(own: Hit, relevant: str) -> None:
    assert own.passage_id in found(own, relevant=relevant)


def test_is_said_once() -> None:
    """In the notes of a calibration, whatever the number of questions and routes."""
    texts = [f"argument number {n} about land" for n in range(30)]
    dataset = Dataset(
        "d",
        tuple(Query(f"a{n}", text) for n, text in enumerate(texts)),
        {f"a{n}": {f"a{(n + 1) % 30}": 1} for n in range(30)},
    )

    def search(query: str, *, depth: int) -> list[Hit]:
        first = texts.index(query)
        places = [(first + n) % 30 for n in range(10)]
        return [Hit(f"a{n}", 0.9 - at / 20, texts[n]) for at, n in enumerate(places)]

    made = calibrate(search, dataset, score_kind="cosine")
    said = [note for note in made.profile.provenance.notes if "passages themselves" in note]
    [note] = said
    assert note.endswith("left out of their own candidates as BEIR does: 30, first 'a0'")
    [evidence] = [outcome.profile.evidence for outcome in made.outcomes.values()]
    assert evidence is not None
    assert evidence.metrics["mrr"].value == 1.0

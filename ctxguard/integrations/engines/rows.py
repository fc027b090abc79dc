"""The candidates of a leg from the rows of an engine's answer, of which nothing is trusted."""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from ctxguard.core.scores import is_valid
from ctxguard.core.types import Hit, Passage, Ranking, ScoreKind
from ctxguard.errors import StageUnavailableError


class Row(NamedTuple):
    """One result of an engine.

    Attributes:
        passage: The passage; None if the row holds none that can be read.
        score: What the engine gave as score, higher is better.
    """

    passage: Passage | None
    score: object


def ranking_of_rows(engine: str, rows: Iterable[Row], kind: ScoreKind, depth: int) -> Ranking:
    """The ranking of an engine's results, best first.

    At most ``depth`` rows are read. A row without a passage is left out, and so is one that BM25
    gives 0. A score that is no number becomes None, which a decision sets aside.

    Raises:
        StageUnavailableError: none of the rows holds a passage.

    >>> rows = [Row(Passage("a", "text"), 2.5), Row(None, 2.0), Row(Passage("b", "text"), "1.5")]
    >>> ranking_of_rows("engine", rows, ScoreKind.RATIO, 10).scores
    (2.5, None)
    """
    read = list(islice(rows, depth))
    hits = [
        Hit(passage.passage_id, score, passage.text, passage.title, metadata=passage.metadata)
        for passage, score in ((row.passage, _number(row.score)) for row in read)
        if passage is not None and not (kind is ScoreKind.RATIO and score == 0.0)
    ]
    if read and not any(row.passage for row in read):
        raise StageUnavailableError(
            engine, f"none of its {len(read)} results holds a passage's id and text"
        )
    return Ranking.from_hits(hits, kind)


def _number(score: object) -> float | None:
    return float(score) if is_valid(score) else None  # type: ignore[arg-type]

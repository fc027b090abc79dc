"""Checks that labels belong to a corpus, using the ids and texts of the labelled passages.

Ids such as ``d0``, ``d1``, … are the same in many corpora, and labels of another corpus then give a
recall near 0 instead of an error. `check_texts` reads the labels' own corpus, and looks up the
passages to compare with it; `check_ids` is pure.
"""

from collections.abc import Callable, Container
from itertools import islice
from pathlib import Path

from calibration.data.dataset import Dataset, named_passages, unknown_passages
from calibration.data.readers import read_corpus
from ctxguard.core.types import Passage
from ctxguard.errors import DataError

_MOST = 0.5
_ROWS_READ = 10_000
_COMPARED = 100
_MEND = "search the corpus they were made for, or give labels made for this one"


def check_ids(
    dataset: Dataset, passage_ids: Container[str], corpus: str = "the index"
) -> tuple[str, ...]:
    """Return a note if a corpus with these ids lacks some of the labelled passages.

    Raises:
        DataError: the corpus lacks most of them.
    """
    named = named_passages(dataset)
    unknown = unknown_passages(dataset, passage_ids)
    if not unknown:
        return ()
    if len(unknown) > _MOST * len(named):
        raise DataError(
            f"{dataset.name}: {corpus} holds only {len(named) - len(unknown)} of the "
            f"{len(named):,} labelled passages ({unknown[0]!r} is missing, for example); these "
            f"labels belong to a different corpus: {_MEND}"
        )
    note = (
        f"{len(unknown):,} of {len(named):,} labelled passages are not in {corpus}, such as "
        f"{unknown[0]!r}: recall counts the relevant ones as missed; check these ids"
    )
    return (note,)


def check_texts(
    dataset: Dataset, corpus: Path, passage_ids: Container[str], passage: Callable[[str], Passage]
) -> tuple[str, ...]:
    """Return a note if labelled passages have different texts in the index and in their corpus.

    Compares up to 100 passages among the first 10,000 of the corpus: the labelled ones, or
    any if none of those is labelled. Ignores white space.

    Args:
        corpus: The file that the labels were made on; nothing is compared if it cannot be read.
        passage_ids: The ids of the index.
        passage: Returns the index's passage with an id.

    Raises:
        DataError: most of the texts differ.
    """
    try:
        own = _to_compare(dataset, corpus, passage_ids)
    except DataError:
        return ()
    differing = [one.passage_id for one in own if _words(one) != _words(passage(one.passage_id))]
    if not differing:
        return ()
    found = (
        f"{len(differing):,} of {len(own):,} passages that were compared have a different text in "
        f"the index than in {corpus}, such as {differing[0]!r}"
    )
    if len(differing) > _MOST * len(own):
        raise DataError(
            f"{dataset.name}: {found}; these labels belong to a different corpus with the same "
            f"ids: {_MEND}"
        )
    return (f"{found}; their labels may no longer hold",)


def _to_compare(dataset: Dataset, corpus: Path, passage_ids: Container[str]) -> list[Passage]:
    named = named_passages(dataset)
    labelled: list[Passage] = []
    others: list[Passage] = []
    for one in islice(read_corpus(corpus), _ROWS_READ):
        if one.passage_id in passage_ids:
            (labelled if one.passage_id in named else others).append(one)
        if len(labelled) == _COMPARED:
            break
    return labelled or others[:_COMPARED]


def _words(passage: Passage) -> list[str]:
    return f"{passage.title} {passage.text}".split()

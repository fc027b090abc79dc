"""The protocol of a judge, its grade on one passage, and grades as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import TypeAdapter

from ctxguard.core.types import Passage
from ctxguard.errors import DataError
from ctxguard.measure.worth import Negative


@dataclass(frozen=True, slots=True)
class Judgment:
    """One judge's grade on one passage for one query.

    Attributes:
        passage_id: The passage.
        grade: 0 for irrelevant, higher for more relevant.
        negative: How a passage of grade 0 is known to mislead; None if it is not known to.
        judged: False if grade 0 stands for a missing label, in a set that also labels irrelevant
            passages: the passage is then worth ``Utilities.unjudged``.
        score: The judge's own probability that the passage is relevant, in [0, 1]; None from a
            judge that gives grades alone. It need not be calibrated: estimates learn its worth from
            people's grades.
    """

    passage_id: str
    grade: int
    negative: Negative | None = None
    judged: bool = True
    score: float | None = None


class Judge(Protocol):
    """Grades passages for a query.

    ``name`` and ``version`` identify the judge: another version begins another series of
    estimates. A judge may have three more attributes: ``exact``, whether its grades are those of
    people, such as known labels (False without the attribute), ``reads_text``, whether it needs the
    passages' texts (True without the attribute; it then gets no passage without text), and
    ``ledger``, the ``Ledger`` of its calls and their cost.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def max_grade(self) -> int:
        """The highest grade that this judge gives."""
        ...

    def judge(self, query: str, passages: Sequence[Passage]) -> Sequence[Judgment | None]:
        """Grade passages.

        Returns:
            One grade per passage, in their order; None where the call failed or its reply was
            not a valid grade: it is asked about again later. One passage never costs another its
            grade. An exact judge that knows nothing of the query returns an empty list.

        Raises:
            Exception: the judge could not be called at all, for example in an outage. The sample
                then waits for another attempt.
        """
        ...


_GRADES = TypeAdapter(list[Judgment])


def grades_to_json(grades: Iterable[Judgment]) -> str:
    """Write the valid grades on a sample as the store keeps them."""
    return _GRADES.dump_json(list(grades), exclude_defaults=True).decode()


def grades_from_json(text: str) -> dict[str, Judgment]:
    """Read the output of ``grades_to_json``: the grades by passage id, none from an empty text.

    Raises:
        DataError: the text is not such JSON.

    >>> text = grades_to_json([Judgment("a", 2), Judgment("b", 0, score=0.25)])
    >>> text
    '[{"passage_id":"a","grade":2},{"passage_id":"b","grade":0,"score":0.25}]'
    >>> grades_from_json(text)["b"].score
    0.25
    """
    try:
        return {one.passage_id: one for one in _GRADES.validate_json(text or "[]")}
    except ValueError as error:
        raise DataError(f"grades cannot be read: {type(error).__name__}") from error

"""The protocol of a judge, its verdict on one passage, and verdicts as JSON.

The JSON is the form in which the store keeps the verdicts on one sample: for each passage a list of
its grade and of how one of grade 0 misleads; a third element, false, follows if the grade stands
for a missing label, and a fourth, the judge's score, if it gave one. A passage that the judge gave
no verdict on has null.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ctxguard.core.metrics import Negative
from ctxguard.core.types import Passage
from ctxguard.errors import DataError


@dataclass(frozen=True, slots=True)
class Judgment:
    """One judge's verdict on one passage for one query.

    Attributes:
        passage_id: The passage.
        grade: 0 for irrelevant, higher for more relevant.
        negative: How a passage of grade 0 is known to mislead; None if it is not known to.
        judged: False if grade 0 stands for a missing label, in a set that also labels irrelevant
            passages: the passage is then worth ``Utilities.unjudged``.
        score: The judge's own probability that the passage is relevant, in [0, 1]; None from a
            judge that gives grades alone. It need not be calibrated: estimates learn from people
            what it is worth.
    """

    passage_id: str
    grade: int
    negative: Negative | None = None
    judged: bool = True
    score: float | None = None


class Judge(Protocol):
    """Grades passages for a query.

    ``name`` and ``version`` identify the judge: another version begins another series of
    estimates. A judge may have four more attributes: ``exact``, whether its verdicts are those of
    people, such as known labels (False without the attribute), ``reads_text``, whether it needs the
    passages' texts (True without the attribute; it then gets no passage without text),
    ``judges_pools``, whether it is best given all passages of a sample at once (False without the
    attribute), and ``ledger``, the ``Ledger`` of its calls and their cost.
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
            One verdict per passage, in their order; None if there is no valid verdict. One
            passage never costs another its verdict.

        Raises:
            Exception: the judge could not be called at all, for example in an outage. The sample
                then waits for another attempt.
        """
        ...


def verdicts_to_json(verdicts: Mapping[str, Judgment], missing: Iterable[str] = ()) -> str:
    """Convert verdicts by passage id to JSON, for ``verdicts_from_json``.

    Args:
        verdicts: The valid ones.
        missing: Ids of passages that the judge gave no verdict on.

    >>> verdicts_to_json({"a": Judgment("a", 2)}, ["b"])
    '{"a":[2,null],"b":null}'
    """
    return json.dumps(
        {passage_id: _listed(verdict) for passage_id, verdict in verdicts.items()}
        | dict.fromkeys(missing),
        separators=(",", ":"),
    )


def _listed(verdict: Judgment) -> list[object]:
    score = None if verdict.score is None else round(verdict.score, 4)
    listed: list[object] = [verdict.grade, verdict.negative, verdict.judged, score]
    usual = [None, None, True, None]
    while len(listed) > 2 and listed[-1] == usual[len(listed) - 1]:
        listed.pop()
    return listed


def verdicts_from_json(text: str) -> dict[str, Judgment]:
    """Read the verdicts from a text of ``verdicts_to_json``, without missing ones.

    Raises:
        DataError: it is no such text.
    """
    try:
        return {
            passage_id: Judgment(
                passage_id, int(grade), None if negative is None else Negative(negative), *judged
            )
            for passage_id, verdict in json.loads(text or "{}").items()
            if verdict is not None
            for grade, negative, *judged in [verdict]
        }
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"verdicts cannot be read: {type(error).__name__}") from error

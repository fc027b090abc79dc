"""What a judge must do, and what it says of one passage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ctxguard.metrics import Negative
from ctxguard.types import Passage


@dataclass(frozen=True, slots=True)
class Judgment:
    """One judge's verdict on one passage for one query.

    Attributes:
        passage_id: The passage.
        grade: 0 for irrelevant, higher for more relevant.
        negative: How it is known to mislead, for a grade of 0; None where it is not.
    """

    passage_id: str
    grade: int
    negative: Negative | None = None


class Judge(Protocol):
    """Grades passages for a query.

    ``name`` and ``version`` pin the judge: another version is another series of estimates. A
    judge may say besides, as plain attributes, that it is ``exact`` (its word is what people
    would say: known labels; False unless said), and whether it ``reads_text`` (True unless said:
    without texts it is then not asked).
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
        """One verdict per passage, in their order; None where no valid verdict was reached.

        A passage costs at most its own verdict, whatever it holds. What raises is a judge that
        could not be asked at all.
        """
        ...

"""The protocol of a judge. Pure."""

from collections.abc import Sequence
from typing import Protocol

from ctxguard.core.types import Passage
from ctxguard.monitor.sampling.record import Judgment


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

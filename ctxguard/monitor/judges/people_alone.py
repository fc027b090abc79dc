"""Stands in for a judge where there is none: people alone grade the requests."""

from collections.abc import Sequence

from ctxguard.core.types import Passage
from ctxguard.monitor.judges.protocol import Judgment


class PeopleAlone:
    """Says nothing about any passage.

    Its verdicts are missing labels of grade 0, the same for every passage, so an estimate that
    people's labels correct is the estimate from these labels alone.
    """

    name = "people"
    version = "alone"
    max_grade = 1
    reads_text = False

    def judge(
        self,
        query: str,  # noqa: ARG002 - the protocol's
        passages: Sequence[Passage],
    ) -> list[Judgment | None]:
        """Return a missing label for each passage."""
        return [Judgment(passage.passage_id, 0, judged=False) for passage in passages]


PEOPLE_ALONE = f"{PeopleAlone.name} {PeopleAlone.version}"
"""The series of requests that people grade without a judge."""

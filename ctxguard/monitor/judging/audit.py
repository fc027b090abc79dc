"""The audit: what the retriever missed, estimated from a deeper search for a few requests."""

from collections.abc import Callable, Sequence

from ctxguard.errors import ConfigurationError
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.sampling.inclusion import HashSampler, check_probability
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.request.wrapped_retriever import takes_where


class Audit:
    """A search as deep as can be, for a few requests.

    Args:
        search: The ids that an exhaustive search, or a much deeper one, finds for a query, best
            first; ``depth`` of them. It is called with ``where`` for a request that had a filter;
            where it names no such parameter, such a request is not audited.
        probability: That a judged request is audited, in [0, 1]. Each costs a deep search.
        depth: How deep, > 0.
        judged: The probability with which each passage beyond the pool is judged, in (0, 1].
        seed: Of the random choices.

    Raises:
        ConfigurationError: a probability or a depth out of range.
    """

    def __init__(
        self,
        search: Callable[..., Sequence[str]],
        *,
        probability: float = 0.02,
        depth: int = 1000,
        judged: float = 0.05,
        seed: str = "",
    ) -> None:
        check_probability("audit rate", probability)
        if depth < 1:
            raise ConfigurationError(f"audit depth {depth!r} must be at least 1")
        if not 0.0 < judged <= 1.0:
            raise ConfigurationError(f"audit rate judged {judged!r} must lie in (0, 1]")
        self.probability = probability
        self.judged = judged
        self._search = search
        self._can_filter = takes_where(search)
        self._depth = depth
        self._requests = HashSampler("audit", seed)
        self._passages = HashSampler("audited passage", seed)

    def passage_ids(self, record: SampleRecord) -> list[str] | None:
        """The passages beyond the pool to judge; None for a request that is not audited.

        Nor is one whose filter is not known: it would be judged on what it could not see.
        """
        if record.query is None or record.where_withheld:
            return None
        if record.where is not None and not self._can_filter:
            return None
        if not self._requests.selects(record.request_id, self.probability):
            return None
        in_pool = set(record.passage_ids)
        options = {} if record.where is None else {"where": record.where}
        found = self._search(record.query, depth=self._depth, **options)
        return [
            passage_id
            for passage_id in dict.fromkeys(found)
            if passage_id not in in_pool
            and self._passages.selects(f"{record.request_id}\0{passage_id}", self.judged)
        ]

    def missed(self, submitted: int, verdicts: Sequence[Judgment]) -> float | None:
        """How many relevant passages lie beyond the pool.

        Args:
            submitted: Passages beyond the pool that the judge was given.
            verdicts: Its valid verdicts, which stand for those missing.

        Returns:
            The estimate; None where none of the passages got a verdict.
        """
        if not verdicts:
            return None if submitted else 0.0
        relevant = sum(verdict.grade > 0 for verdict in verdicts)
        return relevant * submitted / len(verdicts) / self.judged

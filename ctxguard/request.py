"""One request: what was asked, why that may be refused, and what is known before it is answered.

Tuples, which cost least to make: every request makes one of each.
"""

from typing import NamedTuple

from ctxguard.errors import ConfigurationError, CtxguardError, QueryError
from ctxguard.serving import Serving, describe
from ctxguard.where import Where


class Asked(NamedTuple):
    """A request as its caller put it; ``ContextGuard.retrieve`` says what each part means."""

    query: str
    request_id: str | None
    segment: str | None
    session_id: str | None
    sample: bool
    where: Where | None

    def refusal(self, max_query_chars: int) -> CtxguardError | None:
        """Why it must be neither searched nor sampled; None where it may be.

        Args:
            max_query_chars: The longest query that is searched.

        >>> str(Asked("who?", None, None, None, False, None).refusal(3))
        'the query has 4 characters, the limit is 3 (max_query_chars)'
        """
        # Widened, because callers do not all check their types.
        query: object = self.query
        where: object = self.where
        if not isinstance(query, str):
            return QueryError(f"a query must be a text, not {describe(query)}")
        if len(query) > max_query_chars:
            return QueryError(
                f"the query has {len(query):,} characters, the limit is "
                f"{max_query_chars:,} (max_query_chars)"
            )
        if where is not None and not isinstance(where, Where):
            return ConfigurationError(f"where must be a ctxguard.Where, not {describe(where)}")
        return None


class Request(NamedTuple):
    """A request that is under way.

    Attributes:
        asked: As it was put.
        request_id: The caller's, or one made up.
        serving: What it is served by, from its retrieval to its decision.
        probability: With which the sampler selected it; 0.0 where it did not.
    """

    asked: Asked
    request_id: str
    serving: Serving
    probability: float

"""One request: the caller's input, and the state that answers it.

Named tuples, because every request makes one of each and a tuple is the cheapest to make.
"""

from typing import NamedTuple

from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Mode
from ctxguard.request.bound_profile import BoundProfile
from ctxguard.request.observers import RequestSpan


class RequestInput(NamedTuple):
    """The arguments of one request, described in ``ContextGuard.retrieve``."""

    query: str
    request_id: str | None
    segment: str | None
    session_id: str | None
    sample: bool
    where: Where | None


class Request(NamedTuple):
    """A request in progress.

    Attributes:
        input: The caller's input.
        request_id: The caller's id, or a random one.
        bound: The profile and the retriever that answer it, from retrieval to decision.
        mode: The guard's mode when the request began.
        follows_verdict: Whether the profile's verdict on the answering route decides the mode,
            because the guard was given none.
        probability: The probability with which the sampler selected it; 0.0 if it did not.
        arm_probability: The probability with which it was assigned its mode; None where that was
            not drawn.
        span: The request's span; None without tracing.
    """

    input: RequestInput
    request_id: str
    bound: BoundProfile
    mode: Mode
    follows_verdict: bool
    probability: float
    arm_probability: float | None = None
    span: RequestSpan | None = None

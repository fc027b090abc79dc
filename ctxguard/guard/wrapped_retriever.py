"""Adapts wrapped retrievers: their calls, routes, fingerprints and sketches.

The guard, text signals and calibration all use this module, so they accept the same retrievers.
Calls the retriever, and touches nothing else.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.types import Route, ScoreKind, ScoreKindName, member_of
from ctxguard.errors import ConfigurationError
from ctxguard.profile.reranker_probe import RETRIEVER_KEY, probe_scores

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import Retrieval


class Calls(NamedTuple):
    """The methods through which a retriever is called.

    Attributes:
        call: Retrieves; await its result if the retriever has only an asynchronous call.
        acall: Retrieves asynchronously; None if the retriever has only a plain call.
        can_filter: Whether the calls accept a filter.
    """

    call: "Callable[..., Retrieval | Awaitable[Retrieval]]"
    acall: "Callable[..., Awaitable[Retrieval]] | None"
    can_filter: bool


class RetrieverAdapter:
    """Gives every retriever that a guard accepts the same interface.

    Args:
        retriever: An object with ``retrieve`` or ``aretrieve``, or a function; see
            ``ctxguard.retrieval.protocols``.
        score_kind: The kind of the scores of plain hits; None for a retriever that returns
            rankings, or hits without scores.
        fingerprint: Identifies a retriever without a ``fingerprint()`` of its own.

    Raises:
        ConfigurationError: it is not a retriever, or the kind of score is unknown.
    """

    def __init__(
        self,
        retriever: Any,
        *,
        score_kind: ScoreKind | ScoreKindName | None = None,
        fingerprint: Mapping[str, str] | None = None,
    ) -> None:
        self.retriever = retriever
        self.score_kind = (
            None if score_kind is None else member_of(ScoreKind, score_kind, "score_kind")
        )
        self._fingerprint = fingerprint
        self.calls = calls_of(retriever)

    @property
    def route(self) -> Route:
        """The stages that answer; ``external`` if the retriever has no route."""
        route: Route = getattr(self.retriever, "route", Route.EXTERNAL)
        return route

    def fingerprint(self) -> dict[str, str]:
        """Return the given fingerprint, or else the retriever's own, or else an empty one.

        It includes the retriever's similarities of the probe texts, if it gives any.
        """
        found = self._fingerprint
        if found is None:
            found = call_if(self.retriever, "fingerprint") or {}
        return {**found, **probed(self.retriever)}

    def corpus_sketch(self) -> CorpusSketch | None:
        """Return the retriever's sketch of its corpus; None without one."""
        sketch: CorpusSketch | None = call_if(self.retriever, "corpus_sketch")
        return sketch


def probed(retriever: object) -> dict[str, str]:
    """Return a retriever's similarities of the probe texts, as an entry of a fingerprint.

    Empty if it is not a `ProbedRetriever`; any error of the retriever is raised.
    """
    similarities = getattr(retriever, "similarities", None)
    return {RETRIEVER_KEY: probe_scores(similarities)} if callable(similarities) else {}


def call_if(thing: object, name: str) -> Any:
    """Call a method without arguments; None if the object has no such method."""
    method = getattr(thing, name, None)
    return method() if callable(method) else None


def calls_of(retriever: object) -> Calls:
    """Find the methods through which a guard calls the retriever it wraps.

    Raises:
        ConfigurationError: it is not a retriever, or cannot be called with (query, depth=…).
    """
    if isinstance(retriever, type):
        raise ConfigurationError(
            f"{retriever.__name__} is a class, not a retriever: give an instance of it"
        )
    call, acall = getattr(retriever, "retrieve", None), getattr(retriever, "aretrieve", None)
    if not callable(acall):
        acall = None
    if not callable(call):
        call = retriever if acall is None else acall
    if not callable(call):
        raise ConfigurationError(
            f"{describe(retriever)} is not a retriever: it must have retrieve(query, *, depth) or "
            "be callable with (query, depth=…)"
        )
    signature = _signature_of(call)
    try:
        if signature is not None:
            signature.bind("query", depth=1)
    except TypeError as error:
        name = getattr(call, "__qualname__", type(retriever).__name__)
        raise ConfigurationError(
            f"{name}{signature} cannot be called with (query, depth=…) ({error}): wrap it, as in "
            "lambda query, *, depth: search(query, limit=depth)"
        ) from None
    if acall is None and (
        inspect.iscoroutinefunction(call)
        or inspect.iscoroutinefunction(
            getattr(call, "__call__", None)  # noqa: B004 - an object whose call is a coroutine
        )
    ):
        acall = call
    signatures = [signature, signature if acall is None else _signature_of(acall)]
    return Calls(call, acall, all(map(_names_where, signatures)))


def describe(value: object) -> str:
    """Describe a value's type, for an error message about it."""
    return f"a {type(value).__name__}"


def _signature_of(call: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None  # the case for some extension types


def _names_where(signature: inspect.Signature | None) -> bool:
    """Return whether a call names ``where``; a call that accepts any keyword may ignore it."""
    parameter = None if signature is None else signature.parameters.get("where")
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )

"""Writes spans of requests with OpenTelemetry.

Names are those of its conventions for generative AI where they have one (``retrieval`` spans, in
development in November 2026), through ``opentelemetry-util-genai``. Other names begin with
``ctxguard.``.

Writes to the process's configured providers, which export, and calls the redactor. The libraries
(extra ``opentelemetry``) are imported when tracing begins.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ctxguard import __version__
from ctxguard._support.extras import require
from ctxguard.core.context import Context
from ctxguard.errors import RedactionError
from ctxguard.monitor.redaction import Redactor, redact, redacted

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider
    from opentelemetry.util.genai.handler import TelemetryHandler
    from opentelemetry.util.genai.invocation import RetrievalInvocation

__all__ = ["OpenTelemetryTracing"]

_EXTRA = "opentelemetry"
_SCOPE = "ctxguard"
_NANOSECONDS = 10**9


class OpenTelemetryTracing:
    """A ``retrieval`` span for each request of a guard, with child spans of stages and decision.

    A request whose caller gives no id is called ``<trace id>-<span id>``, so that its sample leads
    back to its trace. Failures here are counted in ``ctxguard_observer_failures_total`` and fail no
    request.

    Args:
        data_source: Name of the searched source, such as an index; part of the span's name.
        redactor: Applied to the query before it enters a span, which it does only where
            ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` is set to ``SPAN_ONLY`` or
            ``SPAN_AND_EVENT``. None for no redaction.
        tracer_provider: None for the process's own.

    Raises:
        MissingExtraError: the libraries are not installed.
    """

    def __init__(
        self,
        data_source: str | None = None,
        *,
        redactor: Redactor | None = redact,
        tracer_provider: "TracerProvider | None" = None,
    ) -> None:
        genai = require("opentelemetry.util.genai.handler", _EXTRA)
        self._handler: TelemetryHandler = genai.TelemetryHandler(
            tracer_provider=tracer_provider,
            instrumentation_scope_name=_SCOPE,
            instrumentation_scope_version=__version__,
        )
        trace = require("opentelemetry.trace", _EXTRA)
        self.tracer: Tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider)
        self._data_source = data_source
        self.redactor = redactor

    def begin(self, query: str, depth: int, request_id: str | None) -> "_RequestSpan":
        """Begin the span of one request, as the current span of its thread or task."""
        invocation = self._handler.retrieval(data_source_id=self._data_source)
        invocation.top_k = depth
        return _RequestSpan(self, invocation, query, request_id)


class _RequestSpan:
    """The span of one request, with child spans for its stages and its decision."""

    def __init__(
        self,
        tracing: OpenTelemetryTracing,
        invocation: "RetrievalInvocation",
        query: str,
        given_id: str | None,
    ) -> None:
        self._tracing = tracing
        self._invocation = invocation
        self._query = query
        self._given_id = given_id
        self._decision: Span | None = None

    @property
    def request_id(self) -> str | None:
        """The ids of the trace and the span, if there are any."""
        found = self._invocation.span.get_span_context()
        return f"{found.trace_id:032x}-{found.span_id:016x}" if found.is_valid else None

    def retrieved(self) -> None:
        """Begin the decision's span."""
        self._decision = self._tracing.tracer.start_span("decide", context=self._invocation.context)

    def answered(self, context: Context, probability: float) -> None:
        """End the spans of the request and its decision, and add those of the request's stages."""
        try:
            if self._decision is not None:
                self._decision.set_attributes(_decision_attributes(context, probability))
            for failure in context.failures:
                self._invocation.span.add_event(
                    "ctxguard.stage_failed",
                    {"ctxguard.stage": failure.stage, "error.type": failure.kind.value},
                )
            self._describe(context)
            self._add_stages(context)
        finally:
            self._end(None)

    def failed(self, error: BaseException) -> None:
        """End both spans as failed; an error's message may quote a passage, and is not written."""
        try:
            if self._given_id is not None:
                self._invocation.attributes["ctxguard.request_id"] = self._given_id
        finally:
            self._end(error)

    def _add_stages(self, context: Context) -> None:
        """Write spans for the stages that ran. They have ended, and may predate this span."""
        ranking = context.decision.ranking
        if not ranking.timings or not self._invocation.span.is_recording():
            return
        trace = require("opentelemetry.trace", _EXTRA)
        kinds = {failure.stage: failure.kind.value for failure in ranking.failures}
        for stage, start_seconds, seconds in ranking.timings:
            start = int(start_seconds * _NANOSECONDS)
            span = self._tracing.tracer.start_span(
                stage,
                context=self._invocation.context,
                attributes={"ctxguard.stage": stage},
                start_time=start,
            )
            if stage in kinds:
                span.set_attribute("error.type", kinds[stage])
                span.set_status(trace.StatusCode.ERROR)
            span.end(start + int(seconds * _NANOSECONDS))

    def _end(self, error: BaseException | None) -> None:
        try:
            if self._decision is not None:
                self._decision.end()
        finally:
            if error is None:
                self._invocation.stop()
            else:
                types = require("opentelemetry.util.genai.types", _EXTRA)
                self._invocation.fail(types.Error(message=None, type=type(error).__qualname__))

    def _describe(self, context: Context) -> None:
        invocation = self._invocation
        invocation.attributes["ctxguard.request_id"] = context.request_id
        if not (invocation.span.is_recording() and invocation.should_capture_content):
            return
        types = require("opentelemetry.util.genai.types", _EXTRA)
        with suppress(RedactionError):  # which leaves the query out
            invocation.query_text = redacted(self._query, self._tracing.redactor)
        ranking = context.decision.ranking
        scores = dict(zip(ranking.passage_ids, ranking.scores, strict=True))
        invocation.documents = [
            types.RetrievalDocument(one.passage_id, None if score is None else float(score))
            for one in context.passages
            for score in [scores.get(one.passage_id)]
        ]


def _decision_attributes(context: Context, probability: float) -> dict[str, Any]:
    given = {
        "ctxguard.route": context.route.value,
        "ctxguard.mode": context.mode.value,
        "ctxguard.profile_id": context.profile_id,
        "ctxguard.policy": context.decision.policy.kind,
        "ctxguard.candidates": context.candidates,
        "ctxguard.kept": len(context.would_keep_ids),
        "ctxguard.p_sufficient": context.p_sufficient,
        "ctxguard.sufficient": context.sufficient,
        "ctxguard.flags": [flag.value for flag in context.flags],
        "ctxguard.sampling_probability": probability,
    }
    dropped = {
        f"ctxguard.dropped.{reason.value}": count
        for reason, count in context.dropped_by_reason.items()
    }
    return {name: value for name, value in given.items() if value is not None} | dropped

"""``ctxguard serve``: the rerank protocol, decisions and the console over HTTP."""

from enum import StrEnum
from typing import Annotated

import typer

from ctxguard._support.extras import require
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._retriever import pairs
from ctxguard.core.types import DEFAULT_K, Mode, ScoreKind


class RerankProtocol(StrEnum):
    """The forms of the rerank protocol."""

    COHERE = "cohere"
    TEI = "tei"


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("serve")(serve)


def serve(
    *,
    rerank_upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Reranker that scores, such as http://localhost:8080 or https://api.jina.ai/v1; "
            "its key is read from CTXGUARD_UPSTREAM_KEY.",
            show_default=False,
        ),
    ] = None,
    rerank_protocol: Annotated[
        RerankProtocol,
        typer.Option(
            metavar="PROTOCOL",
            help="What --rerank-upstream speaks: cohere (also Jina and vLLM) or tei.",
        ),
    ] = RerankProtocol.COHERE,
    rerank_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model that --rerank-upstream is asked for.",
            show_default="the one that a request names",
        ),
    ] = None,
    reranker: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Cross-encoder that scores in this process, or that reranks the candidates of "
            "--index: a model name, or a folder.",
            show_default=False,
        ),
    ] = None,
    index: _options.SourceIndex = None,
    engine: _options.SourceEngine = None,
    score_kind: Annotated[
        ScoreKind | None,
        typer.Option(
            metavar="KIND",
            help="What the scores of the reranker mean, or those of candidates to filter: ratio, "
            "cosine, inner_product, logit, distance, probability or rank.",
            show_default="logit of --reranker and tei, else probability",
        ),
    ] = None,
    fingerprint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="What identifies your own system, where only its candidates are filtered; a "
            "profile holds for equal fingerprints. Repeatable.",
            show_default=False,
        ),
    ] = None,
    profile: _options.ProfileFile = None,
    k: Annotated[
        int,
        typer.Option(
            "--k",
            "-k",
            metavar="N",
            min=1,
            help="Passages of --index that make a context where no calibrated policy applies.",
        ),
    ] = DEFAULT_K,
    mode: Annotated[
        Mode,
        typer.Option(
            metavar="MODE",
            help="Answer with the decision (enforce), or without it, only recorded (shadow) or "
            "not made (off).",
        ),
    ] = Mode.ENFORCE,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Store of sampled requests: sqlite:///samples.db, or "
            "postgresql://user@host/database.",
            envvar="CTXGUARD_STORE",
            show_default=False,
        ),
    ] = None,
    sample_rate: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0.0, max=1.0, help="Share of requests that is sampled to --store."
        ),
    ] = 0.01,
    opentelemetry: Annotated[
        bool,
        typer.Option(
            "--opentelemetry",
            help="Trace requests as OpenTelemetry spans, through the providers that "
            "`opentelemetry-instrument ctxguard serve` configures.",
        ),
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; one that other machines reach needs CTXGUARD_TOKEN.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on; 0 for any.")
    ] = 8765,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Processes that serve.")] = 1,
    deadline: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Longest wait for the reranker, after which the documents are answered in their "
            "order, or for the index.",
        ),
    ] = 5.0,
    max_in_flight: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Most requests that a process answers at once."),
    ] = 1_000,
    max_body_bytes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Longest body of a request.")
    ] = 16 * 2**20,
    max_documents: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most documents of a request.")
    ] = 10_000,
) -> None:
    """Serve the rerank protocol with calibrated decisions, or decisions alone, over HTTP.

    Whoever asks a reranker at POST /rerank, as Cohere, Jina, vLLM and TEI serve
    it, asks this service instead: it has the documents scored by
    --rerank-upstream or --reranker and applies the profile. With --index or
    --engine it searches, at POST /v1/context. POST /v1/filter decides on candidates that
    the caller has. What is served is described at /openapi.json.

    Tokens are read from the environment: CTXGUARD_TOKEN for requests,
    CTXGUARD_METRICS_TOKEN for /metrics, CTXGUARD_CONSOLE_TOKEN for /console.
    """
    require("uvicorn", "serve")
    from ctxguard.server.run import serve as run
    from ctxguard.server.settings import Secrets, Settings

    settings = Settings(
        host=host,
        port=port,
        workers=workers,
        rerank_upstream=rerank_upstream,
        rerank_protocol=rerank_protocol.value,
        rerank_model=rerank_model,
        reranker=reranker,
        index=index,
        engine=engine,
        score_kind=score_kind,
        fingerprint=pairs(fingerprint or ()),
        profile=profile,
        mode=mode,
        k=k,
        store=store,
        sample_rate=sample_rate,
        opentelemetry=opentelemetry,
        deadline_seconds=deadline,
        max_in_flight=max_in_flight,
        max_body_bytes=max_body_bytes,
        max_documents=max_documents,
        secrets=Secrets.from_environment(),
    )
    run(settings, lambda url: Output().out.print(f"serving on {url}"))

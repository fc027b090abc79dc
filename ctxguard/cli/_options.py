"""Options that several commands share, each defined once."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.models import OptionInfo

from ctxguard.core.types import Route, ScoreKind

SourceIndex = Annotated[
    Path | None,
    typer.Option(
        "--index",
        metavar="FOLDER",
        help="Index folder that `ctxguard index` wrote.",
        show_default=False,
    ),
]
SourceEngine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="URL",
        help="Index in an engine that `ctxguard index --engine` wrote: postgresql://…, qdrant://… "
        "or milvus://…, with the index's name after #. A key for its API is taken from the "
        "environment variable CTXGUARD_ENGINE_KEY.",
        show_default=False,
    ),
]
SourceRetriever = Annotated[
    str | None,
    typer.Option(
        "--retriever",
        metavar="MODULE:OBJECT",
        help="Retriever of your own instead of an index: a Python object with retrieve(query, *, "
        "depth), or a function, plain or asynchronous.",
        show_default=False,
    ),
]
SourceRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="FILE",
        help="TREC run file with the candidates of the queries, instead of an index.",
        show_default=False,
    ),
]
RerankUpstream = Annotated[
    str | None,
    typer.Option(
        "--rerank-upstream",
        metavar="URL",
        help="Server with a reranker that scores --candidates, instead of an index. A key for it "
        "is taken from the environment variable CTXGUARD_UPSTREAM_KEY.",
        show_default=False,
    ),
]
RerankProtocol = Annotated[
    Literal["cohere", "tei"],
    typer.Option(
        "--rerank-protocol",
        metavar="FORM",
        help="What --rerank-upstream speaks: cohere (Cohere, Jina, vLLM and others), or tei (Text "
        "Embeddings Inference).",
    ),
]
RerankModel = Annotated[
    str | None,
    typer.Option(
        "--rerank-model",
        metavar="NAME",
        help="Model that --rerank-upstream is asked for.",
        show_default="the server's own choice",
    ),
]
Candidates = Annotated[
    Path | None,
    typer.Option(
        "--candidates",
        metavar="FILE",
        help="JSONL file of queries and documents for --rerank-upstream to score: query, and "
        "documents, each a text or an object with id and text.",
        show_default=False,
    ),
]
ScoresMean = Annotated[
    ScoreKind | None,
    typer.Option(
        "--score-kind",
        metavar="KIND",
        help="What the scores of --retriever, --run or --rerank-upstream mean: ratio, cosine, "
        "inner_product, logit, distance, probability or rank.",
        show_default="rank, or what the retriever says; probability of cohere, logit of tei",
    ),
]
Fingerprint = Annotated[
    list[str] | None,
    typer.Option(
        "--fingerprint",
        metavar="KEY=VALUE",
        help="What identifies the system of --retriever or --run, if it has no fingerprint() of "
        "its own; a profile holds for equal fingerprints. Repeatable.",
        show_default=False,
    ),
]
IndexFolder = Annotated[
    Path,
    typer.Option("--index", metavar="FOLDER", help="Index folder that `ctxguard index` wrote."),
]
LabelledQueries = Annotated[
    Path,
    typer.Option(
        "--data", metavar="PATH", help="Labelled queries: a BEIR folder, or a JSONL file."
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Profile that `ctxguard calibrate` wrote."),
]
OneRoute = Annotated[
    Route | None,
    typer.Option(
        "--route",
        metavar="ROUTE",
        help="Stages that answer: lexical, dense or hybrid, each with or without +rerank.",
        show_default="every stage of the index",
    ),
]
Reranker = Annotated[
    str | None,
    typer.Option(
        "--reranker",
        metavar="MODEL",
        help="Cross-encoder that reranks the candidates: a model name, or a folder.",
        show_default="no reranking",
    ),
]
RankerFile = Annotated[
    Path | None,
    typer.Option(
        "--ranker",
        metavar="FILE",
        help="Ranker that `ctxguard fit-ranker` wrote, for an index with signals.",
        show_default="the ranker that comes with ctxguard",
    ),
]
Utility = Annotated[
    list[str] | None,
    typer.Option(
        "--utility",
        metavar="NAME=VALUE",
        help="Utility of a kind of passage, where a relevant one is worth 1: unjudged, irrelevant, "
        "hard_negative, distractor or partial, such as unjudged=-0.2. Repeatable.",
        show_default="the profile's, or the preset",
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", min=0, help="Random seed; equal seeds give equal results."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


def split(default: str) -> OptionInfo:
    """``--split``, whose default differs between commands."""
    option: OptionInfo = typer.Option(
        "--split",
        metavar="NAME",
        help="Split of the BEIR folder: the name of a file in its qrels folder, without .tsv.",
        show_default=default,
    )
    return option

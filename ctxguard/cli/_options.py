"""Options that several commands share, each defined once."""

from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from ctxguard.core.types import Route

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

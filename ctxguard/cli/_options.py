"""Settings that several commands share, each described once."""

from pathlib import Path
from typing import Annotated

from ctxguard._support.settings import setting
from ctxguard.core.types import DEFAULT_DEPTH, Route

_LABELLED = setting(
    "Labelled queries: a BEIR folder, the file of one of its splits (FOLDER/qrels/test.tsv), or a "
    "JSONL file.",
    "PATH",
)
LabelledQueries = Annotated[Path, _LABELLED]
LabelledQueriesIfAny = Annotated[Path | None, _LABELLED]
ShowAll = Annotated[
    bool, setting("Show every dropped candidate instead of the first few.", None, "--all")
]
ShowRest = Annotated[
    bool, setting("Print all that was measured, not the table alone.", None, "--all")
]
ProfileFile = Annotated[Path | None, setting("Profile that `ctxguard calibrate` wrote.", "FILE")]
OneRoute = Annotated[
    Route | None,
    setting(
        "Stages that answer: lexical, dense or hybrid, each with or without +rerank.",
        "ROUTE",
        default="every stage of the index",
    ),
]
Depth = Annotated[
    int | None,
    setting(
        "Candidates to retrieve for each query.",
        "N",
        default=f"the profile's, or {DEFAULT_DEPTH}",
        key=True,
        ge=1,
    ),
]
Seed = Annotated[int, setting("Random seed; equal seeds give equal results.", "N", key=True, ge=0)]
StoreUrl = Annotated[
    str,
    setting(
        "Sample store: sqlite:///samples.db, or postgresql://user@host/database.",
        "URL",
        env="CTXGUARD_STORE",
    ),
]
NamedJudge = Annotated[
    str | None,
    setting(
        "Judge whose verdicts are used, as the store names it.", "NAME", default="the only one"
    ),
]
AsJson = Annotated[bool, setting("Print the result as one JSON document.", None, "--json")]

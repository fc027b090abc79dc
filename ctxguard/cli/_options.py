"""Describes once the settings that several commands share. Pure."""

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
RelevantFrom = Annotated[
    int,
    setting(
        "Least grade of a relevant passage, such as 2 for labels of TREC, or 4 of five stars; "
        "lower ones count as not relevant.",
        "GRADE",
        key=True,
        ge=1,
    ),
]
ShowAll = Annotated[bool, setting("Print everything, not the first few lines.", None, "--all")]
ProfileFile = Annotated[Path | None, setting("Profile that `ctxguard calibrate` wrote.", "FILE")]
OneRoute = Annotated[
    Route | None,
    setting(
        "Stages that answer: lexical, dense or hybrid, each with or without +rerank.",
        default="every stage of the index",
        key=True,
    ),
]
Depth = Annotated[
    int | None,
    setting(
        "Candidates to retrieve for each query.",
        default=f"the profile's, or {DEFAULT_DEPTH}",
        key=True,
        ge=1,
    ),
]
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
    setting("Judge whose grades are used, as the store names it.", "NAME", default="the only one"),
]

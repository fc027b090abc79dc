"""Settings that several commands share, each described once."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ctxguard._support.settings import SettingsModel, key, optional_key, setting
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError
from ctxguard.measure.worth import PRESETS, Gain, Utilities

_Utility = Literal[
    "unjudged", "irrelevant", "hard_negative", "distractor", "partial", "score_ratio", "rank_limit"
]

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


class PassageWorth(SettingsModel):
    """How much passages are worth, which are relevant, and how grades gain in nDCG."""

    relevant_from: RelevantFrom = 1
    preset: Literal["readers", "blog", "strict"] | None = optional_key(
        "Utilities of passages: readers as answers of language models show, strict where a wrong "
        "one does real damage, blog as the article that udcg comes from has them.",
        default="the profile's, or readers",
    )
    utility: dict[_Utility, float] = key(
        "Table: utilities in place of the preset's, where a relevant passage is worth 1: unjudged, "
        "irrelevant, hard_negative, distractor or partial, such as unjudged = -0.2; and where "
        "passages are suspected to mislead, as by the preset blog, the relative score above which "
        "they are (score_ratio) and the rank up to which they are (rank_limit).",
        default="those of the preset",
        value={},
    )
    gain: Gain | None = optional_key(
        "Gain of a grade in nDCG: the grade (linear), or 2^grade - 1 (exponential).",
        default="the profile's, or linear",
    )

    def worth(self, base: Utilities) -> Utilities:
        """Replace utilities by those that were set by hand.

        Raises:
            ConfigurationError: a value that the name cannot have.
        """
        limit = self.utility.get("rank_limit", 0.0)
        if not limit.is_integer():
            raise ConfigurationError(f"rank_limit {limit:g} must be a whole number")
        values: dict[str, Any] = {
            str(name): int(value) if name == "rank_limit" else value
            for name, value in self.utility.items()
        }
        base = base if self.preset is None else replace(PRESETS[self.preset], gain=base.gain)
        return replace(base, **values, gain=self.gain or base.gain)

    @property
    def by_hand(self) -> str:
        """What was set, in words; empty for nothing."""
        parts = [f"the preset {self.preset}"] if self.preset else []
        values = ", ".join(f"{name}={value:g}" for name, value in self.utility.items())
        parts += [f"set by hand: {values}"] if values else []
        parts += [f"{self.gain} gain in nDCG"] if self.gain else []
        return "; ".join(parts)

"""Opens the system that supplies a command's candidates, and describes its settings.

An index in a folder or in an engine, a retriever of the user's own, a TREC run, or lists of
candidates that a server reranks. Reads these and the environment, calls the engine, and imports the
user's module, with the working folder on ``sys.path``.
"""

import atexit
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ctxguard._support.settings import about, key, key_of, optional, optional_key
from ctxguard.cli._options import Depth, RelevantFrom
from ctxguard.core.types import ScoreKind
from ctxguard.endpoints.forms import FORMS
from ctxguard.errors import ConfigurationError, DataError
from ctxguard.measure.worth import PRESETS, Gain, Utilities
from ctxguard.server.system import AssessorSettings, RankedSystem

if TYPE_CHECKING:
    from calibration.data.dataset import Query
    from calibration.reranked_candidates import RerankedCandidates
    from calibration.retrievers import RankingSource
    from ctxguard import HybridRetriever
    from ctxguard.guard.assess import AssessorStage
    from ctxguard.integrations.engines.retriever import EngineRetriever

Source: TypeAlias = "HybridRetriever | EngineRetriever | RankingSource"
"""Where a command's candidates come from."""

SOURCES = {
    "index": "--index FOLDER",
    "engine": "--engine URL",
    "retriever": "--retriever MODULE:OBJECT",
    "run": "--run FILE",
    "rerank_upstream": "rerank-upstream in the --system file",
}
"""The settings that name a source of candidates."""

_HAVE_NO_EFFECT = {
    "index": ("score_kind", "fingerprint", "candidates"),
    "engine": ("score_kind", "fingerprint", "candidates", "reranker"),
    "retriever": ("candidates", "reranker"),
    "run": ("candidates", "reranker"),
    "rerank_upstream": ("fingerprint", "reranker"),
}

_Utility = Literal[
    "unjudged", "irrelevant", "hard_negative", "distractor", "partial", "score_ratio", "rank_limit"
]
_UPSTREAM_KEY = "CTXGUARD_UPSTREAM_KEY"
_UPSTREAM_SECONDS = 60.0
"""Seconds for one list: nobody is waiting for the answer."""


class System(RankedSystem):
    """Settings for the source of candidates, and the entries that identify it."""

    retriever: str | None = optional(
        "Retriever of your own: a Python object with retrieve(query, *, depth), or a function, "
        "plain or asynchronous.",
        "MODULE:OBJECT",
    )
    candidates: Path | None = optional_key(
        "JSONL file of queries and documents for rerank-upstream to score: query, and "
        "documents, each a string or an object with id and text."
    )
    depth: Depth = None

    @property
    def sources(self) -> list[str]:
        """The given settings that name a source of candidates."""
        return [name for name in SOURCES if getattr(self, name, None) is not None]

    def check_source(self) -> None:
        """Refuse settings that name no source, or several, or that conflict with the source."""
        given = self.sources
        if len(given) != 1:
            raise ConfigurationError(
                f"{' and '.join(map(_shown, given)) or 'nothing'} says where candidates come from: "
                f"give exactly one of {', '.join(SOURCES.values())}"
            )
        for name in _HAVE_NO_EFFECT[given[0]]:
            if getattr(self, name):
                raise ConfigurationError(
                    f"{_shown(name)} has no effect with {_shown(given[0])}: leave it out"
                )

    def open(self, queries: "Sequence[Query]" = ()) -> Source:
        """Open the retriever that the settings name; runs and lists hold only these queries."""
        self.check_source()
        if self.index is not None:
            return self.open_index()
        if self.engine is not None:
            from ctxguard.integrations.engines.retriever import EngineRetriever

            engine = EngineRetriever.open(self.engine)
            atexit.register(engine.close)
            return engine
        from calibration.data.readers import read_trec_run
        from calibration.retrievers import RankingSource, RecordedRankings

        if self.rerank_upstream is not None:
            return RankingSource(
                self._reranked_candidates(self.rerank_upstream, queries), keep_passages=True
            )
        run: Path | None = getattr(self, "run", None)
        if run is not None:
            kind = self.score_kind or ScoreKind.RANK
            recorded = RecordedRankings.of_run(read_trec_run(run), queries, kind)
            return RankingSource(recorded, fingerprint=self.fingerprint or None)
        loaded: Any = _imported(str(self.retriever))
        try:
            return RankingSource(
                loaded,
                score_kind=self.score_kind,
                fingerprint=self.fingerprint or None,
                keep_passages=True,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"--retriever {self.retriever}: {error}") from None

    def _reranked_candidates(self, url: str, queries: "Sequence[Query]") -> "RerankedCandidates":
        from calibration.reranked_candidates import RerankedCandidates, read_candidates

        if self.candidates is None:
            raise ConfigurationError(
                "rerank-upstream scores the documents of a file: name it as candidates"
            )
        key_of_server = os.environ.get(_UPSTREAM_KEY) or None
        client = self.upstream(url, key_of_server, _UPSTREAM_SECONDS, self.rerank_model)
        candidates = read_candidates(self.candidates)
        if queries and not any(query.text in candidates for query in queries):
            raise DataError(
                f"has none of the {len(queries):,} labelled queries, such as {queries[0].text!r}: "
                "a query must have the same text in both files",
                path=self.candidates,
            )
        kind = self.score_kind or FORMS[self.rerank_protocol].kind
        return RerankedCandidates(candidates, client, kind)


class LabelledSystem(System):
    """A system that answers labelled queries, or a saved run of one, and the worth of passages."""

    run: Path | None = optional("TREC run file with the candidates of the queries.", "FILE")
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
        """Override utilities with those that were set by hand."""
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
        """The values that were set, in words; empty for none."""
        parts = [f"the preset {self.preset}"] if self.preset else []
        values = ", ".join(f"{name}={value:g}" for name, value in self.utility.items())
        parts += [f"set by hand: {values}"] if values else []
        parts += [f"{self.gain} gain in nDCG"] if self.gain else []
        return "; ".join(parts)


def by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """Name files by their stem, or by their path if two share it."""
    stems = Counter(path.stem for path in paths)
    return {path.stem if stems[path.stem] == 1 else str(path): path for path in paths}


def open_assessor(
    system: AssessorSettings, *, patient: bool = False
) -> "AbstractContextManager[AssessorStage | None]":
    """Open the stage that asks the system's assessor, and close it at the end."""
    stage = system.assessor_stage(patient=patient)
    return nullcontext() if stage is None else closing(stage)


def _shown(name: str) -> str:
    """Write a setting the way its user does."""
    field = LabelledSystem.model_fields[name]
    return key_of(name, field) if about(field)["key"] else f"--{key_of(name, field)}"


def _imported(name: str) -> Any:
    if not all(name.partition(":")):
        raise ConfigurationError(
            f"--retriever {name!r} is not MODULE:OBJECT, such as app.search:retriever"
        )
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        # Standard output holds the result alone.
        with redirect_stdout(sys.stderr):
            return resolve_name(name)
    except AttributeError as error:
        raise ConfigurationError(f"--retriever {name}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"--retriever {name}: the module {name.partition(':')[0]!r} cannot be imported "
            f"({type(error).__name__}: {error}); run the command in the folder that holds it, or "
            "install it"
        ) from error

"""``ctxguard compare``: ways to rank and to cut side by side, and against a saved comparison."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.settings import key, optional, optional_key, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, as_json, picked
from ctxguard.cli._inputs import fitted, read_labelled, seen_in_calibration
from ctxguard.cli._results import print_checks, print_comparison
from ctxguard.cli._settings import read_shared
from ctxguard.cli._system import SOURCES, System
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K, Route
from ctxguard.errors import ConfigurationError
from ctxguard.server.settings import IndexFolder

if TYPE_CHECKING:
    from calibration.compare.candidates import Candidate
    from calibration.compare.comparison import Comparison
    from calibration.compare.saved_comparison import RegressionCheck
    from calibration.data.dataset import Query
    from ctxguard.cli._inputs import Labelled
    from ctxguard.cli._system import Source
    from ctxguard.core.metrics import Utilities
    from ctxguard.profile.schema import Profile
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_LEXICAL = (Route.LEXICAL, Route.LEXICAL_RERANK)


class CompareCommand(_options.PassageWorth):
    index: IndexFolder = None
    system: list[Path] = setting(
        "TOML file that describes a system to compare as well, under the name of the file, or "
        "the index with its reranker, as other commands read it. It may hold the keys that "
        "`ctxguard keys compare` prints; relative paths start from its folder. Repeatable.",
        "FILE",
        factory=list,
    )
    data: _options.LabelledQueries
    candidate: list[str] = setting(
        "Candidate to compare, as comma-separated settings: a route (lexical, dense, hybrid, "
        "or one of them with +rerank), reciprocal_rank[:CONSTANT] or convex[:DENSE_SHARE], "
        "k=N, min_ratio=R, rerank=MODEL; without an index k and min_ratio. Repeatable.",
        "NAME=SPEC",
        default="each leg alone, and both fused in both ways",
        factory=list,
    )
    profile: list[Path] = setting(
        "Calibrated profile to compare as well. Repeatable.", "FILE", factory=list
    )
    k: list[Annotated[int, Field(ge=1)]] = setting(
        "Passages to keep, for candidates without k=N. Repeatable.",
        *("N", "--k", "-k"),
        default=str(DEFAULT_K),
        factory=list,
    )
    out: Path | None = optional(
        "JSON file to save the comparison to, for a later --against.", "FILE", writes=True
    )
    against: Path | None = optional(
        "Saved comparison to check against; exit code 1 if a candidate is worse than the saved "
        "one of its name, beyond noise.",
        "FILE",
    )
    show_all: _options.ShowAll = False
    depth: _options.Depth = None
    baseline: str | None = optional_key(
        "Candidate that differences are taken from.", "NAME", default="the first"
    )
    regression_metrics: list[str] = key(
        "List of metrics that --against checks.",
        "LIST",
        default="udcg_strict and recall",
        factory=list,
    )
    tolerance: float = key(
        "Loss that --against accepts, in the metric's unit.", "LOSS", ge=0, value=0.0
    )

    def __call__(self, output: Output) -> None:
        """Candidates rank an index, or are systems that files describe (--system): retrievers of
        your own, TREC runs, engines.

        Save a comparison with --out (or --json > FILE), and check a later one against it with
        --against FILE.
        """
        from calibration.compare.comparison import check_candidates, compare
        from calibration.compare.saved_comparison import (
            SavedComparison,
            check_metrics,
            check_regressions,
        )
        from calibration.replay import encode_queries
        from ctxguard.profile.schema import Profile

        metrics = check_metrics(self.regression_metrics)
        saved = None if self.against is None else SavedComparison.load(self.against)
        if self.out and self.against and self.out.resolve() == self.against.resolve():
            raise typer.BadParameter("name another file than --against", param_hint="--out")
        profiles = {name: Profile.load(path) for name, path in _by_name(self.profile).items()}
        index, sources = self._systems()
        candidates = self._candidates(profiles, tuple(sources), index)
        depth = self.depth or DEFAULT_DEPTH
        check_candidates(candidates, self.baseline, depth)
        utilities = self.worth(_utilities(profiles))
        labelled = read_labelled(self.data, "test", self.relevant_from)
        with output.doing("opening the retrievers"):
            view, opened, external = _viewer(index, sources, labelled.dataset.queries)
            if not self.candidate and opened is not None and not opened.has_signals:
                candidates = [each for each in candidates if each.fusion.method != "ranker"]
            for candidate in candidates:
                source = view(candidate)
                if candidate.name in profiles:
                    fitted(profiles[candidate.name], source)
        systems = [each for each in (opened, *external.values()) if each is not None]
        labelled, counts = labelled.against(*systems)
        dataset, vectors = labelled.dataset, None
        with output.passes() as begin:
            if opened and any(each.route not in _LEXICAL for each in candidates):
                progress = begin("encoding queries", len(dataset))
                vectors = encode_queries(opened, dataset.queries, progress)
            made = compare(
                candidates,
                view,
                dataset,
                baseline=self.baseline,
                utilities=utilities,
                depth=depth,
                vectors=vectors,
                passes=begin,
                columns=[each for loaded in profiles.values() for each in loaded.signal_columns],
            )
        checks: Sequence[RegressionCheck] = ()
        if saved is not None:
            checks = check_regressions(
                made,
                saved,
                dataset.digest(),
                metrics=metrics,
                tolerance=self.tolerance,
            )
        about = {**labelled.document, **counts, "depth": depth}
        notes = _notes(made, labelled, profiles)
        document = {**about, **_document(made, checks), "notes": notes}
        if self.out is not None:
            with atomic_write(self.out) as stream:
                stream.write((as_json(document) + "\n").encode())
        facts = [
            ("queries", labelled.described(counts)),
            ("measured on", f"{len(made.query_ids):,} queries that every candidate answered"),
            ("unlabelled", made.unlabelled),
            ("saved to", None if self.out is None else str(self.out)),
        ]

        def show() -> None:
            print_comparison(made, facts, output, show_all=self.show_all)
            print_checks(checks, output)

        output.result(document, show, notes)
        worse = ", ".join(check.candidate for check in checks if check.regressed)
        output.findings(
            [f"worse than the saved comparison, beyond noise: {worse}"] if worse else []
        )

    def _systems(self) -> tuple[System | None, dict[str, System]]:
        """Return the index, and the others by the names of their candidates.

        Raises:
            ConfigurationError: there are none, or two indexes.
        """
        named: dict[str, System] = {}
        of_index: dict[str, Any] = {"index": self.index}
        for name, file in _by_name(self.system).items():
            values = {k: v for k, v in read_shared(file).items() if k in System.model_fields}
            if values.keys() & SOURCES:
                named[name] = System(**values)
            else:  # a file without a source is about the index that an option names
                of_index = values | of_index
        indexes = [each for each in named.values() if each.index is not None]
        indexes += [System(**of_index)] if self.index is not None else []
        others = {name: each for name, each in named.items() if each.index is None}
        if not indexes and not others:
            raise typer.BadParameter("give --index FOLDER or --system FILE", param_hint="--index")
        if len(indexes) > 1:
            raise ConfigurationError("two indexes are given: compare them in two comparisons")
        return next(iter(indexes), None), others

    def _candidates(
        self,
        profiles: "dict[str, Profile]",
        sources: tuple[str, ...],
        index: System | None,
    ) -> "list[Candidate]":
        """Find the ways to cut rankings of an index, else of the first source; and all sources."""
        from calibration.compare.candidates import (
            at_each_k,
            default_candidates,
            from_profile,
            of_source,
            parse_candidates,
        )

        ks = tuple(dict.fromkeys(self.k)) or (DEFAULT_K,)
        own = None if index is not None else sources[0]
        candidates = [each for spec in self.candidate for each in parse_candidates(spec, ks, own)]
        if not self.candidate and index is not None:
            reranked = index.reranker is not None
            candidates = list(at_each_k(default_candidates(reranked=reranked), ks))
        candidates += at_each_k([of_source(name) for name in sources], ks)
        return candidates + [from_profile(name, loaded, own) for name, loaded in profiles.items()]


def _document(comparison: "Comparison", checks: "Sequence[RegressionCheck]") -> dict[str, object]:
    """Write a comparison as JSON; ``SavedComparison`` reads a part of it back."""
    from calibration.compare.comparison import RULE
    from calibration.compare.saved_comparison import values_as_json

    return {
        "measured_queries": len(comparison.query_ids),
        "utilities": comparison.utilities,
        "unlabelled": comparison.unlabelled,
        "rule": RULE,
        "results": comparison.results,
        "candidates": [
            {
                "name": each.candidate.name,
                **each.candidate.describe(),
                "score_kind": each.kind,
                **picked(each, "harm_share", "verdict", "latency_ms", "curve"),
                "per_query": values_as_json(each.per_query),
            }
            for each in comparison.candidates
        ],
        "against": {
            check.candidate: picked(check, "saved", "regressed", "differences") for check in checks
        },
        "query_ids": comparison.query_ids,
    }


def _by_name(paths: Sequence[Path]) -> dict[str, Path]:
    """Name profiles by the stem of their file, or by their path if two share it."""
    stems = Counter(path.stem for path in paths)
    return {path.stem if stems[path.stem] == 1 else str(path): path for path in paths}


def _utilities(profiles: "dict[str, Profile]") -> "Utilities":
    """Return the utilities of the profiles, which must be the same: one table has one unit."""
    from ctxguard.core.metrics import DEFAULT_UTILITIES

    utilities = [loaded.utilities for loaded in profiles.values()]
    if any(other != utilities[0] for other in utilities):
        raise ConfigurationError(
            f"the profiles {', '.join(profiles)} were made with different utilities, so their "
            "figures have no common unit; compare those made with the same ones"
        )
    return utilities[0] if utilities else DEFAULT_UTILITIES


def _viewer(
    index: System | None, sources: "Mapping[str, System]", queries: "Sequence[Query]"
) -> "tuple[Callable[[Candidate], Source], HybridRetriever | None, dict[str, Source]]":
    """Open the systems; return a function from a candidate to its retriever, and all of them.

    The function raises ConfigurationError where the candidate reranks, and no reranker was given,
    or where there is no index.
    """
    from ctxguard.retrieval.models.reranker import CrossEncoderReranker

    external = {name: source.open(queries) for name, source in sources.items()}
    opened = None
    if index is not None:
        opened = index.model_copy(update={"reranker": None}).open_index()
    reranking: dict[str, HybridRetriever] = {}

    def view(candidate: "Candidate") -> "Source":
        route, fusion, model, source = candidate.stages
        if source is not None:
            return external[source]
        base = opened
        if base is None:
            raise ConfigurationError(
                "a retriever of your own and a run have no stages to choose: compare them by k and "
                "min_ratio, or give --index"
            )
        if route.value.endswith("+rerank"):
            model = model or (None if index is None else index.reranker)
            if model is None:
                raise ConfigurationError(
                    f"{candidate.name} reranks, and no reranker was given; name one as reranker in "
                    "--system, or with rerank=MODEL in the candidate"
                )
            if model not in reranking:
                reranking[model] = base.with_reranker(CrossEncoderReranker(model))
            base = reranking[model]
        return base.with_fusion(fusion).on_route(route)

    return view, opened, external


def _notes(
    comparison: "Comparison", labelled: "Labelled", profiles: "dict[str, Profile]"
) -> list[str]:
    """Note what a reader of the figures should know."""
    from calibration.compare.comparison import FEWEST
    from ctxguard.core.scores import is_relative

    notes = [
        *labelled.notes,
        *comparison.notes,
        *(f"left out: {line}" for line in comparison.skipped),
    ]
    for name, loaded in profiles.items():
        notes += [f"{name}: {line}" for line in seen_in_calibration(labelled, loaded)]
    if len({is_relative(each.kind) for each in comparison.candidates}) > 1:
        notes.append(
            "udcg, distractor_rate and harm_undiscounted find suspected distractors by score, or "
            "by rank where scores carry rank only: between such candidates compare precision, "
            "udcg_strict and harm"
        )
    if len(comparison.query_ids) < FEWEST:
        notes.append(f"with fewer than {FEWEST} queries, bootstrap intervals are too narrow")
    return notes

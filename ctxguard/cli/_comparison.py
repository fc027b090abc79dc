"""Compares ways of ranking and cutting for `evaluate`, and checks them against a saved comparison.

Opens and calls the retrievers, reads labels, profiles and the saved comparison, and writes the new
one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from calibration.compare.candidates import (
    Candidate,
    at_each_k,
    default_candidates,
    from_profile,
    parse_candidates,
)
from calibration.compare.comparison import FEWEST, RULE, Comparison, check_candidates, compare
from calibration.compare.saved_comparison import (
    RegressionCheck,
    SavedComparison,
    check_metrics,
    check_regressions,
    values_as_json,
)
from calibration.replay import encode_queries
from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.words import count
from ctxguard.cli._console import Output, as_json, picked
from ctxguard.cli._inputs import Labelled, fitted, read_labelled
from ctxguard.cli._results import checks_shown, comparison_shown
from ctxguard.cli._system import LabelledSystem, Source, by_name
from ctxguard.cli._tables import facts
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K, Route, ScoreKind
from ctxguard.errors import ConfigurationError
from ctxguard.measure.worth import READERS, Utilities
from ctxguard.profile.schema import Profile
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from ctxguard.retrieval.models.reranker import CrossEncoderReranker

if TYPE_CHECKING:
    from ctxguard.cli.evaluate import EvaluateCommand

_LEXICAL = (Route.LEXICAL, Route.LEXICAL_RERANK)
ALL = "all"
"""Names several candidates at once: each leg of the index alone, and both fused in each way."""


def compare_systems(
    asked: "EvaluateCommand", systems: Mapping[str, LabelledSystem], output: Output
) -> None:
    """Compare candidates, print and save the comparison, and check it against a saved one.

    A system without an index stands under the name of its candidate.
    """
    metrics = check_metrics(asked.regression_metrics)
    saved = None if asked.against is None else SavedComparison.load(asked.against)
    if asked.out and asked.against and asked.out.resolve() == asked.against.resolve():
        raise ConfigurationError("--out: name a different file from --against")
    profiles = {name: Profile.load(path) for name, path in by_name(asked.profile).items()}
    indexes = [each for each in systems.values() if each.index is not None]
    if len(indexes) > 1:
        raise ConfigurationError("two indexes were given: run one comparison for each")
    index = next(iter(indexes), None)
    sources = {name: each for name, each in systems.items() if each is not index}
    by_default = not asked.candidate or ALL in asked.candidate
    candidates = _candidates(asked, profiles, tuple(sources), index)
    depth = asked.depth or DEFAULT_DEPTH
    check_candidates(candidates, asked.baseline, depth)
    utilities = asked.worth(_utilities(profiles))
    labelled = read_labelled(asked.data, "test", asked.relevant_from)
    with output.doing("opening the retrievers"):
        queries = labelled.dataset.queries
        external = {name: source.open(queries) for name, source in sources.items()}
        opened = reranker = None
        if index is not None:
            opened = index.model_copy(update={"reranker": None}).open_index()
            reranker = index.reranker
        view = _viewer(opened, reranker, external)
        if by_default and opened is not None and not opened.has_signals:
            candidates = [each for each in candidates if each.fusion.method != "ranker"]
        for candidate in candidates:
            source = view(candidate)
            if candidate.name in profiles:
                fitted(profiles[candidate.name], source)
    labelled = labelled.against(*([] if opened is None else [opened]), *external.values())
    dataset, vectors = labelled.dataset, None
    with output.passes() as begin:
        if opened and any(each.route not in _LEXICAL for each in candidates):
            progress = begin("encoding queries", len(dataset))
            vectors = encode_queries(opened, dataset.queries, progress)
        made = compare(
            candidates,
            view,
            dataset,
            baseline=asked.baseline,
            utilities=utilities,
            depth=depth,
            vectors=vectors,
            passes=begin,
            columns=[each for loaded in profiles.values() for each in loaded.signal_columns],
        )
    checks: Sequence[RegressionCheck] = ()
    if saved is not None:
        checks = check_regressions(
            made, saved, dataset.digest(), metrics=metrics, tolerance=asked.tolerance
        )
    notes = _notes(made, labelled, profiles)
    document = {**labelled.document, "depth": depth, **_document(made, checks), "notes": notes}
    if asked.out is not None:
        with atomic_write(asked.out) as stream:
            stream.write((as_json(document) + "\n").encode())
    about = facts(
        ("queries", labelled.in_words),
        ("measured on", f"{count(len(made.query_ids), 'query')} that every candidate answered"),
        ("unlabelled", made.unlabelled),
        ("saved to", None if asked.out is None else str(asked.out)),
    )
    shown = comparison_shown(made, show_all=asked.show_all)
    output.result(document, [about, *shown, *checks_shown(checks)], notes)
    worse = ", ".join(check.candidate for check in checks if check.regressed)
    output.findings([f"worse than the saved comparison, beyond noise: {worse}"] if worse else [])


def _candidates(
    asked: "EvaluateCommand",
    profiles: dict[str, Profile],
    sources: tuple[str, ...],
    index: LabelledSystem | None,
) -> list[Candidate]:
    """List the candidates: those asked for, every source at each k, and every profile."""
    ks = tuple(dict.fromkeys(asked.k)) or (DEFAULT_K,)
    own = None if index is not None else sources[0]
    specs = [spec for spec in asked.candidate if spec != ALL]
    candidates = [each for spec in specs for each in parse_candidates(spec, ks, own)]
    if index is not None and (not specs or ALL in asked.candidate):
        reranked = index.reranker is not None
        candidates += at_each_k(default_candidates(reranked=reranked), ks)
    fixed = RatioPolicy()
    external = [Candidate(name, fixed, Route.EXTERNAL, source=name) for name in sources]
    candidates += at_each_k(external, ks)
    return candidates + [from_profile(name, loaded, own) for name, loaded in profiles.items()]


def _document(comparison: Comparison, checks: Sequence[RegressionCheck]) -> dict[str, object]:
    """Convert a comparison to JSON; ``SavedComparison`` reads a part of it back."""
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
                **picked(each, "harm_share", "risk", "latency_ms"),
                "curve": {
                    "udcg": each.udcg_by_k,
                    **picked(each, "optimal_k", "within_noise"),
                },
                "per_query": values_as_json(each.per_query),
            }
            for each in comparison.candidates
        ],
        "against": {
            check.candidate: picked(check, "saved", "regressed", "differences") for check in checks
        },
        "query_ids": comparison.query_ids,
    }


def _utilities(profiles: dict[str, Profile]) -> Utilities:
    """Return the profiles' utilities, which must be equal because a table has a single unit."""
    utilities = [loaded.utilities for loaded in profiles.values()]
    if any(other != utilities[0] for other in utilities):
        raise ConfigurationError(
            f"the profiles {', '.join(profiles)} were made with different utilities, so their "
            "figures have no common unit; compare profiles made with the same utilities"
        )
    return utilities[0] if utilities else READERS


def _viewer(
    index: HybridRetriever | None, reranker: str | None, external: Mapping[str, Source]
) -> Callable[[Candidate], Source]:
    """Return a function that gives each candidate its retriever."""

    @cache
    def reranking(base: HybridRetriever, model: str) -> HybridRetriever:
        return base.with_reranker(CrossEncoderReranker(model))

    def view(candidate: Candidate) -> Source:
        route, fusion, model, source = candidate.stages
        if source is not None:
            return external[source]
        if index is None:
            raise ConfigurationError(
                "a retriever of your own and a run have no stages to choose: compare them by k and "
                "min_ratio, or give --index"
            )
        if not route.value.endswith("+rerank"):
            return index.with_fusion(fusion).on_route(route)
        if (model := model or reranker) is None:
            raise ConfigurationError(
                f"{candidate.name} reranks, and no reranker was given; name one as reranker in "
                "--system, or with rerank=MODEL in the candidate"
            )
        return reranking(index, model).with_fusion(fusion).on_route(route)

    return view


def _notes(comparison: Comparison, labelled: Labelled, profiles: dict[str, Profile]) -> list[str]:
    """Add the notes that are needed to read the figures correctly."""
    notes = [
        *labelled.notes,
        *comparison.notes,
        *(f"left out: {line}" for line in comparison.skipped),
    ]
    for name, loaded in profiles.items():
        notes += [f"{name}: {line}" for line in labelled.seen_by(loaded)]
    suspects = comparison.utilities.score_ratio is not None
    if suspects and len({each.kind is ScoreKind.RANK for each in comparison.candidates}) > 1:
        notes.append(
            "the preset blog suspects passages by score, or by rank where scores carry rank only: "
            "udcg, harm and distractor_rate of such candidates cannot be compared, precision can"
        )
    if len(comparison.query_ids) < FEWEST:
        notes.append(f"with fewer than {FEWEST} queries, bootstrap intervals are too narrow")
    return notes

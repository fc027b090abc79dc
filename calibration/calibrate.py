"""Calibrates every route of a retriever: replay, fit, choose, certify, measure.

Calls the retriever and the assessor, and reads the versions of installed libraries. Needs the
extra `calibrate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, cast

from calibration.asking import Asking, calibrate_asking
from calibration.calibrate_route import RouteOutcome, calibrate_route, ordering_and_test_parts
from calibration.data.dataset import Dataset, split_by_query
from calibration.fit import fit_fusion
from calibration.pools import (
    Pools,
    check_labels_are_found,
    label,
    notes_on_themselves,
    unlabelled_note,
)
from calibration.replay import Passes, Readings, encode_queries, replay, silent
from calibration.retrievers import MultiRoute, RankingSource, wrapped
from calibration.settings import Settings
from calibration.signal_columns import needed, read_columns, without_leaks
from ctxguard.core.columns import SignalColumn
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Route, ScoreKind, ScoreKindName
from ctxguard.errors import CalibrationError
from ctxguard.guard.wrapped_retriever import call_if
from ctxguard.profile.schema import Profile, Provenance

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import AnyRetriever

VERSIONED = ("ctxguard-rag", "numpy", "bm25s", "faiss-cpu", "scikit-learn", "sentence-transformers")
"""Distributions whose versions a profile records."""

_UNVERIFIED = (
    "unverified: the retriever has no fingerprint, so the profile cannot be told from one of "
    "another system; give the retriever fingerprint(), or calibrate with fingerprint=…"
)


@dataclass(frozen=True)
class Calibration:
    """A profile, with the labels and settings from which it was made.

    Attributes:
        profile: The file that the guard loads.
        outcomes: Each route's choice and the alternatives.
        dataset: All labelled queries.
        chosen_on: The queries that chose, and with a promise certified.
        held_out: The other queries; None if no share is held out.
    """

    profile: Profile
    outcomes: Mapping[Route, RouteOutcome]
    dataset: Dataset
    chosen_on: Dataset
    held_out: Dataset | None
    settings: Settings


def calibrate(
    retriever: "AnyRetriever | MultiRoute | RankingSource",
    dataset: Dataset,
    settings: Settings | None = None,
    *,
    fusion: Fusion | Literal["fit"] = "fit",
    score_kind: ScoreKind | ScoreKindName | None = None,
    fingerprint: Mapping[str, str] | None = None,
    corpus_sketch: CorpusSketch | None = None,
    passes: Passes = silent,
    asking: Asking | None = None,
) -> Calibration:
    """Choose a policy for every route of a retriever, certify it, measure it on held-out queries.

    Args:
        retriever: The retriever that answers in production: one with several routes, such as
            ``HybridRetriever``, or anything that ``ContextGuard`` takes.
        dataset: Labelled queries. Every passage kept for a query without a relevant one is harm.
        settings: How to choose and certify.
        fusion: How the legs are fused. ``fit`` takes the pooled ranker where the index has signals,
            and fits the weight of convex fusion where it has none.
        score_kind: The meaning of the scores of plain hits; see ``ContextGuard``.
        fingerprint: Identity of a retriever that has no ``fingerprint()``. Without either the
            profile is unverified: it cannot be told from a profile of another system.
        corpus_sketch: The corpus sketch, if the retriever has no method for it.
        asking: An assessor to ask where it pays; None to ask nobody.

    Raises:
        CalibrationError: the labels do not support a choice, or the assessor does not answer.
        ConfigurationError: this is not a retriever, or it returns neither a ranking nor hits.
    """
    settings = Settings() if settings is None else settings
    chosen_on, held_out = dealt(dataset, settings)
    vectors: Mapping[str, Any] | None = None
    source: RankingSource | MultiRoute
    views: Mapping[str, AnyRetriever | RankingSource]
    if hasattr(retriever, "on_route"):
        stages = cast(MultiRoute, retriever)
        vectors = encode_queries(stages, dataset.queries, passes("encoding queries", len(dataset)))
        if fusion == "fit":
            fusion = _fit_fusion(
                stages, dataset, chosen_on, settings, vectors=vectors, passes=passes
            )
        source = stages.with_fusion(fusion)
        views = {route.value: source.on_route(route) for route in source.routes}
    else:
        fusion = Fusion() if fusion == "fit" else fusion
        source = wrapped(retriever, score_kind=score_kind, fingerprint=fingerprint)
        views = {"retriever": source}
    columns: tuple[SignalColumn, ...] = ()
    if settings.signal_columns:
        main, names = wrapped(next(iter(views.values()))), settings.signal_columns
        columns = read_columns(main, dataset.queries, names, settings.depth, vectors)
    readings = Readings()
    several = [
        replay(
            view,
            dataset.queries,
            depth=settings.depth,
            vectors=vectors,
            progress=passes(f"replaying {name}", len(dataset)),
            columns=columns,
            labels=dataset,
            readings=readings,
        )
        for name, view in views.items()
    ]
    if vectors is None:
        check_labels_are_found(several[0], dataset)
    k = settings.serving_k
    labelled = [label(each, dataset, settings.utilities, baseline_k=k) for each in several]
    notes: list[str] = []
    if columns:
        labelled, columns, notes = without_leaks(labelled, columns)
    pools = {each.route: each for each in labelled}
    outcomes = {
        route: calibrate_route(own, chosen_on, held_out, settings) for route, own in pools.items()
    }
    if asking is not None:
        texts = {query.query_id: query.text for query in dataset.queries}
        outcomes = {
            route: calibrate_asking(
                outcome,
                texts=texts,
                asking=asking,
                progress=passes(f"asking the assessor, {route.value}", len(dataset)),
            )
            for route, outcome in outcomes.items()
        }
    by_route = {route: outcome.profile for route, outcome in outcomes.items()}
    # Asked last: a reranker that has changed meanwhile refuses.
    identity = source.fingerprint()
    profile = Profile(
        routes=by_route,
        fusion=fusion,
        utilities=settings.utilities,
        fingerprint=dict(identity),
        corpus=call_if(retriever, "corpus_sketch") if corpus_sketch is None else corpus_sketch,
        signal_columns=needed(columns, by_route) if columns else (),
        provenance=provenance(dataset, settings, pools, identity, notes),
    )
    return Calibration(profile, outcomes, dataset, chosen_on, held_out, settings)


def default_fusion(retriever: MultiRoute) -> Fusion:
    """Return the fusion that needs no labels: the pooled ranker if the index has signals."""
    has_signals = Route.HYBRID in retriever.routes and getattr(retriever, "has_signals", False)
    return Fusion("ranker") if has_signals else Fusion()


def dealt(dataset: Dataset, settings: Settings) -> tuple[Dataset, Dataset | None]:
    """Split off the held-out queries: the share that is set, or half if a promise is to be made."""
    share = settings.held_out
    if share is None:
        share = 0.0 if settings.alpha is None else 0.5
    chosen_on, held_out = dataset, None
    if share > 0.0:
        chosen_on, held_out = split_by_query(dataset, (1.0 - share, share), seed=settings.seed)
    if not chosen_on.answerable:
        raise CalibrationError(
            f"{dataset.name}: none of the {len(chosen_on)} queries to choose on has a relevant "
            "passage; check that the labels belong to these queries"
        )
    return chosen_on, held_out


def _fit_fusion(
    retriever: MultiRoute,
    dataset: Dataset,
    chosen_on: Dataset,
    settings: Settings,
    *,
    vectors: Mapping[str, Any],
    passes: Passes,
) -> Fusion:
    """Fit the fusion: convex if both legs answer and no ranker combines their signals.

    It is fitted to all choosing queries, or with a promise to the part of them that orders the
    candidates: the other part certifies, so nothing may be fitted to it.
    """
    default = default_fusion(retriever)
    if Route.HYBRID not in retriever.routes or default != Fusion():
        return default
    fit_on = chosen_on
    if settings.alpha is not None:
        fit_on, _ = ordering_and_test_parts(chosen_on, settings.seed)
    pools = replay(
        retriever.with_fusion(default).on_route(Route.HYBRID),
        fit_on.queries,
        depth=2 * settings.depth,  # deep enough for the whole pools of both legs
        vectors=vectors,
        progress=passes("replaying hybrid, to fit the fusion", len(fit_on)),
        labels=fit_on,
    )
    return fit_fusion(label(pools, dataset, settings.utilities))


def provenance(
    dataset: Dataset,
    settings: Settings,
    pools: Mapping[Route, Pools],
    identity: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Provenance:
    """Record how a profile was made, with notes on the data and on each route."""
    versions = {}
    for name in VERSIONED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    skipped = [
        f"{route.value}: {line}" for route, p in pools.items() for line in (*p.notes, *p.skipped)
    ]
    return Provenance(
        ctxguard_version=versions.get("ctxguard-rag", "unknown"),
        seed=settings.seed,
        dataset=dataset.name,
        dataset_digest=dataset.digest(),
        depth=settings.depth,
        versions=versions,
        utilities_source=settings.utilities_source,
        notes=(
            *dataset.notes,
            unlabelled_note(dataset, settings.utilities),
            *notes_on_themselves(pools.values()),
            *skipped,
            *notes,
            *(() if identity else (_UNVERIFIED,)),
        ),
    )

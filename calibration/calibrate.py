"""Calibration from end to end: replay, fit, choose, certify, measure on queries held out."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from calibration.certify import RouteOutcome, Settings, calibrate_route
from calibration.fit import fit_fusion
from calibration.labelling.datasets import Dataset, split_by_query
from calibration.losses import label
from calibration.replay import Pools, Progress, Replayable, replay
from ctxguard._extras import require
from ctxguard.errors import CalibrationError, QueryError
from ctxguard.fusion import Fusion
from ctxguard.profile import Profile, Provenance
from ctxguard.types import Route

VERSIONED = ("ctxguard", "numpy", "bm25s", "faiss-cpu", "scikit-learn", "sentence-transformers")
"""Distributions whose versions a profile records: what its numbers came from."""

Passes = Callable[[str, int], Progress]
"""Told the name and the size of each pass over the queries; returns that pass's progress."""


class MultiRoute(Protocol):
    """A retriever whose stages can be switched, so that every route can be calibrated."""

    @property
    def routes(self) -> Sequence[Route]: ...

    def on_route(self, route: Route) -> Replayable: ...

    def with_fusion(self, fusion: Fusion) -> "MultiRoute": ...

    def fingerprint(self) -> Mapping[str, str]: ...

    def encode_query(self, query: str) -> Any: ...


@dataclass(frozen=True)
class Calibration:
    """A profile, and what it was made from.

    Attributes:
        profile: What the guard loads.
        pools: The replay of each route, over all queries.
        outcomes: Each route's choice with everything that was weighed.
        dataset: All the labelled queries.
        chosen_on: The part that chose and certified.
        held_out: The part that did neither; None where no share was held out.
    """

    profile: Profile
    pools: Mapping[Route, Pools]
    outcomes: Mapping[Route, RouteOutcome]
    dataset: Dataset
    chosen_on: Dataset
    held_out: Dataset | None


def calibrate(
    retriever: object,
    dataset: Dataset,
    settings: Settings | None = None,
    *,
    fusion: Fusion | Literal["fit"] = "fit",
    fingerprint: Mapping[str, str] | None = None,
    passes: Passes | None = None,
    cache: Path | None = None,
) -> Calibration:
    """Choose a policy for every route of a retriever, certify it, measure it on queries held out.

    Args:
        retriever: What answers in production: one with routes of its own, such as
            ``HybridRetriever``, or anything with ``retrieve(query, *, depth) -> Ranking``.
        dataset: Labelled queries; those without a relevant passage count too, since what is
            kept for them is harm.
        settings: What is asked of the choice.
        fusion: How the legs are fused; fitted on the choosing queries unless given.
        fingerprint: Of a retriever that has no ``fingerprint()``.
        passes: Shown what is under way.
        cache: Folder for replayed pools; None keeps nothing.

    Raises:
        CalibrationError: the labels cannot support the choice, or nothing could be certified
            and ``settings.allow_uncertified`` is not set.
    """
    settings = Settings() if settings is None else settings
    chosen_on, held_out = _parts(dataset, settings)
    passes = _silent if passes is None else passes
    single = not hasattr(retriever, "on_route")
    views: dict[str, Replayable]
    vectors = None
    if single:
        views = {"retriever": cast(Replayable, retriever)}
        used = Fusion() if fusion == "fit" else fusion
        own = getattr(retriever, "fingerprint", None)
        identity = fingerprint or (own() if callable(own) else {})
    else:
        several = cast(MultiRoute, retriever)
        vectors = _vectors(several, dataset, passes)
        used = (
            _fit_fusion(
                several,
                dataset,
                chosen_on,
                settings,
                vectors=vectors,
                passes=passes,
                cache=cache,
            )
            if fusion == "fit"
            else fusion
        )
        fused = several.with_fusion(used)
        views = {route.value: fused.on_route(route) for route in fused.routes}
        identity = fused.fingerprint()
    pools: dict[Route, Pools] = {}
    outcomes: dict[Route, RouteOutcome] = {}
    for name, view in views.items():
        replayed = replay(
            view,
            dataset.queries,
            depth=settings.depth,
            vectors=vectors,
            progress=passes(f"replaying {name}", len(dataset)),
            cache=cache,
        )
        pools[replayed.route] = replayed
        outcomes[replayed.route] = calibrate_route(replayed, dataset, chosen_on, held_out, settings)
    profile = Profile(
        routes={route: outcome.profile for route, outcome in outcomes.items()},
        fusion=used,
        utilities=settings.utilities,
        fingerprint=dict(identity),
        segment_by=settings.segment_by,
        provenance=_provenance(dataset, settings, pools),
    )
    return Calibration(profile, pools, outcomes, dataset, chosen_on, held_out)


def _parts(dataset: Dataset, settings: Settings) -> tuple[Dataset, Dataset | None]:
    if settings.held_out == 0.0:
        chosen_on, held_out = dataset, None
    else:
        chosen_on, held_out = split_by_query(
            dataset, (1.0 - settings.held_out, settings.held_out), seed=settings.seed
        )
    if not chosen_on.answerable:
        raise CalibrationError(
            f"{dataset.name}: none of the {len(chosen_on)} queries to choose on has a relevant "
            "passage; check that the qrels belong to these queries"
        )
    return chosen_on, held_out


def _vectors(retriever: MultiRoute, dataset: Dataset, passes: Passes) -> dict[str, Any]:
    """Each query's vector, encoded once, on one thread.

    The last bits of a vector depend on how many threads made it; a profile must not.
    """
    advance = passes("encoding queries", len(dataset))
    vectors = {}
    if dataset.queries:
        with suppress(QueryError):
            retriever.encode_query(dataset.queries[0].text)  # loads the libraries to be limited
    with require("threadpoolctl", "calibrate").threadpool_limits(1):
        for query in dataset.queries:
            # A query that is refused here is met again by the replay, which records why.
            with suppress(QueryError):
                vectors[query.query_id] = retriever.encode_query(query.text)
            advance(1)
    return vectors


def _fit_fusion(
    retriever: MultiRoute,
    dataset: Dataset,
    chosen_on: Dataset,
    settings: Settings,
    *,
    vectors: Mapping[str, Any],
    passes: Passes,
    cache: Path | None,
) -> Fusion:
    """Convex fusion fitted on the choosing queries, from a replay in which both legs are whole."""
    if Route.HYBRID not in retriever.routes:
        return Fusion()
    pools = replay(
        retriever.with_fusion(Fusion()).on_route(Route.HYBRID),
        chosen_on.queries,
        depth=2 * settings.depth,
        vectors=vectors,
        progress=passes("replaying hybrid, to fit the fusion", len(chosen_on)),
        cache=cache,
    )
    return fit_fusion(pools, label(pools, dataset, settings.utilities))


def _provenance(dataset: Dataset, settings: Settings, pools: Mapping[Route, Pools]) -> Provenance:
    versions = {}
    for name in VERSIONED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    skipped = [f"{route.value}: {line}" for route, p in pools.items() for line in p.skipped]
    return Provenance(
        ctxguard_version=versions.get("ctxguard", "unknown"),
        seed=settings.seed,
        dataset=dataset.name,
        dataset_digest=dataset.digest(),
        depth=settings.depth,
        versions=versions,
        notes=(*dataset.notes, *skipped),
    )


def _silent(_name: str, _total: int) -> Progress:
    return lambda _done: None

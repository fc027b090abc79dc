"""The candidates that a system retrieved: their stages, notes about them, and runs of them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard.cli._console import Output
from ctxguard.cli._inputs import Labelled
from ctxguard.cli._system import Source
from ctxguard.core.columns import SignalColumn
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError, ProfileMismatchError

if TYPE_CHECKING:
    from calibration.data.dataset import Dataset
    from calibration.replay import Pools
    from ctxguard import Profile


def on_route(retriever: "Source", route: Route) -> "Source":
    """An index with these stages; a wrapped retriever as it is, since it has none to choose."""
    view: Source = retriever.on_route(route) if hasattr(retriever, "on_route") else retriever
    return view


def served_route(retriever: "Source", profile: "Profile | None") -> Route:
    """The stages that answer; of a wrapped retriever, those that the profile was made for."""
    if profile is None or retriever.route is not Route.EXTERNAL or len(profile.routes) != 1:
        return retriever.route
    return next(iter(profile.routes))


def replayed(
    source: "Source",
    dataset: "Dataset",
    output: Output,
    *,
    depth: int,
    name: str = "hybrid",
    columns: Sequence[SignalColumn] = (),
) -> "Pools":
    """Send every query through a retriever once, with a bar of progress."""
    from calibration.replay import replay

    with output.passes() as begin:
        progress = begin(f"replaying {name}", len(dataset))
        return replay(source, dataset.queries, depth=depth, progress=progress, columns=columns)


def served_depth(depth: int | None, k: int, profile: "Profile | None") -> int:
    """Candidates to retrieve: as many as were asked for, else as many as a guard retrieves.

    The candidates are scored relative to one another, so another depth is another order: to look at
    the first k that are served, retrieve as many as are served from.

    Raises:
        ConfigurationError: the depth asked for is less than k.
    """
    if depth is None:
        return max(k, DEFAULT_DEPTH if profile is None else profile.provenance.depth)
    if depth < k:
        raise ConfigurationError(f"depth {depth} is less than k = {k}")
    return depth


def fusion_of(retriever: "Source") -> dict[str, object] | None:
    """How an index fuses its legs, as JSON; None for a wrapped retriever."""
    fusion = getattr(retriever, "fusion", None)
    return None if fusion is None else asdict(fusion)


def beyond_index(retriever: "Source", k: int) -> list[str]:
    """A note if k is more than the passages of an index; a wrapped retriever's are not known."""
    n = len(retriever) if hasattr(retriever, "__len__") else k
    return [f"k = {k} is more than the index's {n} passages"] if k > n else []


def terms_of(retriever: "Source") -> Callable[[str], Sequence[str]]:
    """Splits a text into the terms that an index matches; a wrapped retriever's are not known."""
    analyser = getattr(retriever, "analyser", None)
    from ctxguard.retrieval.analysers.words import words

    return words if analyser is None else analyser.analyse


def for_run(labelled: Labelled, run: Path | None) -> Labelled:
    """The labels; for a run without keywords, which are looked for in texts, and it has none."""
    dataset = labelled.dataset
    if run is None or not dataset.keywords:
        return labelled
    return replace(
        labelled,
        dataset=replace(dataset, keywords={}),
        notes=(*labelled.notes, "keywords are left out: a run has no texts to look for them in"),
    )


def check_score_kind(pools: "Pools", route: Route, profile: "Profile | None") -> None:
    """Refuse scores of another kind than the profile's policy of the route was calibrated on.

    Raises:
        ProfileMismatchError: they are.
    """
    calibrated = None if profile is None else profile.routes.get(route)
    if calibrated is not None and calibrated.score_kind is not pools.kind:
        was = calibrated.score_kind.value
        raise ProfileMismatchError((f"score_kind is {pools.kind.value!r}, was {was!r}",))


def notes_on_pools(pools: "Pools", route: Route, run: Path | None) -> list[str]:
    """Notes on queries that were left out or not in the run, and on stages that answered instead.

    Args:
        pools: The retrieved candidates.
        route: The stages whose policy applies.
        run: The run that it comes from; None for another retriever.
    """
    notes = [f"left out: {line}" for line in pools.skipped]
    if pools.route is not route:
        notes.append(
            f"the retriever answered by {pools.route.value}, and what is measured is the policy of "
            f"{route.value}; name the route with --route"
        )
    missing = [name for name, n in zip(pools.query_ids, pools.lengths, strict=True) if not n]
    if missing and run is not None:
        notes.append(
            f"the run has no candidate of {len(missing):,} queries, first {missing[0]!r}: they "
            "count as answered with nothing"
        )
    return notes


def write_pools(pools: "Pools", file: Path | None) -> list[str]:
    """Write what was retrieved as a TREC run, if a file is named, with a note that it is there."""
    from calibration.data.readers import write_trec_run

    if file is None:
        return []
    write_trec_run(file, pools.run())
    return [f"the candidates are in {file}, as a TREC run"]

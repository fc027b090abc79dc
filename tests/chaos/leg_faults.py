"""A leg fails under load: the other leg answers, by the policy of its route."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from serving import (
    Report,
    ServingProcess,
    Size,
    causes_of,
    corpus,
    embedder_for,
    fault,
    in_words,
    routes_of,
    seen,
)

from ctxguard.core.types import FailureKind, Flag, Route
from ctxguard.errors import IndexFolderError
from ctxguard.guard.reload import IndexWatcher
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.doubles import Fault

DEADLINES = Deadlines(total_seconds=8.0, lexical_seconds=2.0, dense_seconds=2.0)
"""Only a leg that hangs takes as long, also on a busy machine and with the model."""

_NEVER_SECONDS = 3600.0

Instead = Callable[[Callable[[], Any]], Any]


def raises(_: Callable[[], Any]) -> Any:
    """As a service that is down."""
    raise ConnectionError("the service is down")


def hangs(_: Callable[[], Any]) -> Any:
    """As a service that accepts a call and never answers."""
    threading.Event().wait(_NEVER_SECONDS)


def _lost(
    folder: Path, size: Size, *, leg: str, instead: Instead, kind: FailureKind, left: Route
) -> Report:
    """One leg fails."""
    serving = ServingProcess(folder, size, deadlines=DEADLINES)
    part: Fault = getattr(serving, leg)
    n = serving.by_size(40, 400)
    before = serving.serve(n)
    with part.injected(instead):
        during = serving.serve(n)
    found = causes_of(during)
    recovered = serving.comes_to_answer_by(Route.HYBRID)
    after = serving.serve(n)
    # A call that hangs holds one of the few threads that search.
    allowed = {kind, FailureKind.CIRCUIT_OPEN}
    if kind is FailureKind.TIMEOUT:
        allowed.add(FailureKind.SATURATED)
    return serving.finish(
        f"{seen(during)}; slowest {1e3 * serving.callers.slowest_seconds:.0f} ms",
        {
            "by the route that is left": routes_of(during) == {left},
            "which the answer says": all(Flag.DEGRADED in each.flags for each in during),
            "with the cause": set(found) <= {one.value for one in allowed} and bool(found[kind]),
            "the circuit opens": bool(found[FailureKind.CIRCUIT_OPEN]),
            "by the policy made for the route": serving.decided_by_route(before, during, after),
            "hybrid before and after": recovered and routes_of(before, after) == {Route.HYBRID},
        },
    )


for _name, _leg, _instead, _kind, _left in (
    ("dense leg raises", "dense", raises, FailureKind.ERROR, Route.LEXICAL),
    ("dense leg hangs", "dense", hangs, FailureKind.TIMEOUT, Route.LEXICAL),
    ("lexical leg hangs", "lexical", hangs, FailureKind.TIMEOUT, Route.DENSE),
):
    fault(
        _name,
        f"the {_left.value} route by its own policy, flagged; hybrid again when it is back"
        + ("; by the deadline" if _kind is FailureKind.TIMEOUT else ""),
    )(partial(_lost, leg=_leg, instead=_instead, kind=_kind, left=_left))


@fault(
    "lexical index missing",
    "loading refuses it, reloading keeps the last good one; without it the dense route answers",
)
def _lexical_index_is_missing(folder: Path, size: Size) -> Report:
    """A generation without its lexical files, and a lexical leg whose files are gone."""
    index, embedder = folder / "index", embedder_for(size)
    built = HybridRetriever.build(corpus(), embedder=embedder)
    built.save(index)
    loaded = HybridRetriever.load(index, embedder=embedder)
    serving = ServingProcess(folder, size, retriever=loaded)
    telemetry = serving.counted.telemetry
    watcher = IndexWatcher(serving.retriever, interval_seconds=0.01, telemetry=telemetry)
    watcher.check()
    n = serving.by_size(40, 400)
    before = serving.serve(n)
    built.save(index)
    for file in index.glob("generation-*/lexical*"):
        file.unlink()
    refused = watcher.check()
    with_last_good = serving.serve(n)
    message = ""
    try:
        HybridRetriever.load(index, embedder=serving.embedder)
    except IndexFolderError as error:
        message = str(error)

    def is_gone(_: Callable[[], Any]) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    with serving.lexical.injected(is_gone):
        during = serving.serve(n)
    recovered = serving.comes_to_answer_by(Route.HYBRID)
    return serving.finish(
        f"reload {refused}, last good serves; load refused; then {seen(during)}",
        {
            "the watcher refuses the generation": refused == "malformed",
            "loading it names the file": "lexical" in message,
            "the last good one serves on": routes_of(before, with_last_good) == {Route.HYBRID},
            "a leg that raises leaves the dense one": routes_of(during) == {Route.DENSE},
            "by the policy made for the route": serving.decided_by_route(
                before, with_last_good, during
            ),
            "hybrid again": recovered,
        },
    )


@fault("all legs dead", "a typed outage each time, never an empty answer")
def _all_legs_are_dead(folder: Path, size: Size) -> Report:
    serving = ServingProcess(folder, size, deadlines=DEADLINES)
    n = serving.by_size(40, 400)
    serving.serve(n)
    with serving.dense.injected(raises), serving.lexical.injected(raises):
        during = serving.serve(n)
    recovered = serving.comes_to_answer_by(Route.HYBRID)
    return serving.finish(
        in_words(serving.callers.errors),
        {
            "no answer looks like an empty one": not during
            and serving.callers.counts["failed"] == 2 * n,
            "but a typed outage": set(serving.callers.errors) == {"StageUnavailableError"},
            "hybrid again": recovered,
        },
        may_fail=True,
    )

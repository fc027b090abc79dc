"""A leg is lost while requests come: the route that is left answers by its own policy."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scene import SLACK_SECONDS, Scene, Seen, Size, Switch, all_of, most, until

from ctxguard.context import Context
from ctxguard.errors import IndexFolderError
from ctxguard.reload import IndexWatcher
from ctxguard.retrieval import HybridRetriever
from ctxguard.stages import Deadlines
from ctxguard.telemetry import ReloadOutcome
from ctxguard.types import FailureKind, Flag, Route

DEADLINES = {
    Size.SMALL: Deadlines(total_seconds=1.0, lexical_seconds=0.4, dense_seconds=0.2),
    # With room for the model on a busy machine: what is slow is not what is lost here.
    Size.FULL: Deadlines(total_seconds=3.0, lexical_seconds=1.0, dense_seconds=1.5),
}
_NEVER_SECONDS = 3600.0

Fault = Callable[[Callable[[], Any]], Any]


def raises(_: Callable[[], Any]) -> Any:
    """Down."""
    raise ConnectionError("the service is down")


def hangs(_: Callable[[], Any]) -> Any:
    """Never returns."""
    threading.Event().wait(_NEVER_SECONDS)


def is_nan(work: Callable[[], Any]) -> Any:
    """A vector of NaN."""
    return np.full_like(work(), np.nan)


def is_of_another_dimension(work: Callable[[], Any]) -> Any:
    """A vector of another model."""
    return np.append(work(), np.float32(1.0))


def dense_raises(folder: Path, size: Size) -> Seen:
    """The dense leg raises."""
    return _lost(folder, size, raises, FailureKind.ERROR)


def dense_hangs(folder: Path, size: Size) -> Seen:
    """The dense leg never returns."""
    return _lost(folder, size, hangs, FailureKind.TIMEOUT)


def dense_is_nan(folder: Path, size: Size) -> Seen:
    """The dense leg's vector is NaN."""
    return _lost(folder, size, is_nan, FailureKind.GARBAGE)


def dense_is_of_another_dimension(folder: Path, size: Size) -> Seen:
    """The dense leg's vector has another dimension."""
    return _lost(folder, size, is_of_another_dimension, FailureKind.GARBAGE)


def lexical_hangs(folder: Path, size: Size) -> Seen:
    """The lexical leg never returns."""
    return _lost(folder, size, hangs, FailureKind.TIMEOUT, leg="lexical", left=Route.DENSE)


def _lost(
    folder: Path,
    size: Size,
    fault: Fault,
    kind: FailureKind,
    *,
    leg: str = "dense",
    left: Route = Route.LEXICAL,
) -> Seen:
    scene = Scene(folder, size, deadlines=DEADLINES[size])
    switch: Switch = getattr(scene, leg)
    n = scene.n(40, 400)
    before = all_of(scene.serve(n))
    with switch.thrown(fault):
        during = scene.serve(n)
    found = Counter([f"{one.kind}" for each in all_of(during) for one in each.failures])
    recovered = until(lambda: _route(scene.ask(0)) is Route.HYBRID)
    after = all_of(scene.serve(n))
    allowed = {kind, FailureKind.CIRCUIT_OPEN}
    return scene.finish(
        f"route {most(Counter([each.route.value for each in all_of(during)]))}; {most(found)}; "
        f"slowest {1e3 * scene.tally.slowest_seconds:.0f} ms; "
        + ("hybrid again" if recovered else "NOT RECOVERED"),
        {
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "by the route that is left": {each.route for each in all_of(during)} == {left},
            "which the answer says": all(Flag.DEGRADED in each.flags for each in all_of(during)),
            "with the cause": set(found) <= {one.value for one in allowed} and bool(found[kind]),
            "the circuit opens": bool(found[FailureKind.CIRCUIT_OPEN]),
            "by the policy made for the route": all(
                map(scene.decided_by_its_route, [*before, *all_of(during), *after])
            ),
            "in time": scene.tally.slowest_seconds
            < (scene.deadlines.total_seconds or 0.0) + SLACK_SECONDS,
            "hybrid before and after": recovered
            and {each.route for each in [*before, *after]} == {Route.HYBRID},
        },
    )


def lexical_index_is_missing(folder: Path, size: Size) -> Seen:
    """A generation without its lexical files, and a lexical leg whose files are gone."""
    built = Scene(folder, size)
    index = folder / "index"
    assert built.retriever is not None
    built.retriever.save(index)
    loaded = HybridRetriever.load(index, embedder=built.embedder)
    built.writer.stop()
    built.store.close()
    (folder / "serving").mkdir()
    scene = Scene(folder / "serving", size, retriever=loaded)
    assert scene.retriever is not None
    watcher = IndexWatcher(scene.retriever, interval_seconds=0.01, telemetry=scene.telemetry)
    watcher.check()
    n = scene.n(40, 400)
    before = all_of(scene.serve(n))
    built.retriever.save(index)
    for file in index.glob("generation-*/lexical*"):
        file.unlink()
    refused = watcher.check()
    with_last_good = all_of(scene.serve(n))
    message = ""
    try:
        HybridRetriever.load(index, embedder=scene.embedder)
    except IndexFolderError as error:
        message = str(error)

    def is_gone(_: Callable[[], Any]) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    with scene.lexical.thrown(is_gone):
        during = all_of(scene.serve(n))
    recovered = until(lambda: _route(scene.ask(0)) is Route.HYBRID)
    return scene.finish(
        f"reload {refused}, last good serves; load refused; then route "
        f"{most(Counter([each.route.value for each in during]))}",
        {
            "the watcher refuses the generation": refused is ReloadOutcome.MALFORMED,
            "loading it names the file": "lexical" in message,
            "the last good one serves on": {each.route for each in [*before, *with_last_good]}
            == {Route.HYBRID},
            "a leg that raises leaves the dense one": {each.route for each in during}
            == {Route.DENSE},
            "by the policy made for the route": all(
                map(scene.decided_by_its_route, [*before, *with_last_good, *during])
            ),
            "every request is answered": scene.tally.failed == scene.tally.shed == 0,
            "hybrid again": recovered,
        },
    )


def all_legs_are_dead(folder: Path, size: Size) -> Seen:
    """Both legs raise."""
    scene = Scene(folder, size, deadlines=DEADLINES[size])
    n = scene.n(40, 400)
    scene.serve(n)
    with scene.dense.thrown(raises), scene.lexical.thrown(raises):
        during = scene.serve(n)
    recovered = until(lambda: _route(scene.ask(0)) is Route.HYBRID)
    return scene.finish(
        f"{most(scene.tally.errors)}; " + ("hybrid again" if recovered else "NOT RECOVERED"),
        {
            "no answer looks like an empty one": during == [None] * (2 * n),
            "but a typed outage": set(scene.tally.errors) == {"StageUnavailableError"},
            "hybrid again": recovered,
        },
    )


def _route(answer: Context | None) -> Route | None:
    return None if answer is None else answer.route

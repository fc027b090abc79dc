"""``ctxguard doctor``: a line for each part of a deployment, with a fix for each fault.

Opens the index, the profile and the store, calls the engine, and fetches metrics over HTTP; writes
nothing.
"""

import platform
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

import ctxguard
from ctxguard._support.extras import foreign_distribution, install_line
from ctxguard._support.settings import SettingsModel, setting
from ctxguard._support.words import count
from ctxguard.cli._console import Output
from ctxguard.cli._settings import read_file
from ctxguard.cli._store import open_store
from ctxguard.cli._system import LabelledSystem
from ctxguard.core.render import one_line
from ctxguard.errors import ConfigurationError, CtxguardError

if TYPE_CHECKING:
    from ctxguard.cli._system import Source

_EXTRAS = {
    "embedded": "faiss",
    "fast": "onnxruntime",
    "chunk": "semantic_text_splitter",
    "documents": "mammoth",
    "calibrate": "sklearn",
    "report": "jinja2",
    "monitor": "sqlalchemy",
    "postgres": "psycopg",
    "milvus": "pymilvus",
    "qdrant": "qdrant_client",
    "judge": "httptools",
    "rerank": "truststore",
    "serve": "starlette",
    "mcp": "mcp",
    "opentelemetry": "opentelemetry",
}
"""One of the modules that each extra installs."""

_ENGINES = ("qdrant://", "milvus://")
_STORES = ("sqlite:", "postgresql:", "postgres:")
_IDLE_SECONDS = 86_400.0
_MAX_METRICS_BYTES = 2**25
_SCRAPE_SECONDS = 5.0

_STYLES = {"ok": "green", "note": "yellow", "wrong": "red"}
Finding = tuple[str, Literal["ok", "note", "wrong"], str]
"""A part, its status (``note`` requires no action now), and what was found, with the fix."""


class DoctorCommand(SettingsModel):
    places: list[str] = setting(
        "Parts to look at: an index folder or an engine's URL, a profile (.json), a sample "
        "store's URL, the URL of metrics, or the file of a system (.toml), which names them.",
        "[PLACE]...",
        argument=True,
        value=[],
    )

    def __call__(self, output: Output) -> None:
        """The installation is always checked. For example:

        ctxguard doctor index/ profile.json sqlite:///samples.db http://localhost:8000/metrics
        """
        with output.doing("looking"):
            findings = [*_installation(), *_deployment(_parts(self.places))]
        ok = all(status != "wrong" for _, status, _ in findings)

        document = {
            "ok": ok,
            "findings": [
                dict(zip(("part", "status", "text"), each, strict=True)) for each in findings
            ],
        }
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for part, status, text in findings:
            grid.add_row(Text(status, style=_STYLES[status]), part, one_line(text))
        output.result(document, [grid], found=not ok)


def _installation() -> Iterator[Finding]:
    clash = foreign_distribution()
    running = f"ctxguard-rag {ctxguard.__version__}, Python {platform.python_version()}"
    yield "installation", "wrong" if clash else "ok", clash or running
    present = [name for name, module in _EXTRAS.items() if find_spec(module) is not None]
    absent = [name for name in _EXTRAS if name not in present]
    texts = [f"{', '.join(present) or 'none'} installed"]
    if absent:
        texts.append(f"not {', '.join(absent)} ({install_line('NAME')})")
    yield "extras", "ok", "; ".join(texts)


def _parts(places: Sequence[str]) -> dict[str, Any]:
    """Sort locations into ``profile``, ``store``, ``metrics``, and settings of the system."""
    parts: dict[str, Any] = {}
    for place in places:
        if place.endswith(".toml"):
            parts |= read_file(Path(place))[0]
        elif place.startswith(_ENGINES) or (place.startswith("postgres") and "#" in place):
            parts["engine"] = place
        elif place.startswith(_STORES):
            parts["store"] = place
        elif place.startswith(("http://", "https://")):
            parts["metrics"] = place
        elif place.endswith(".json"):
            parts["profile"] = Path(place)
        elif Path(place).is_dir():
            parts["index"] = Path(place)
        else:
            raise ConfigurationError(
                f"{place!r} is not an index folder, engine URL, profile (.json), store URL, URL of "
                "metrics or system file (.toml); check the name"
            )
    return parts


def _deployment(parts: dict[str, Any]) -> Iterator[Finding]:
    opened: list[Source] = []
    looks: dict[str, Callable[[Any], Iterator[Finding]]] = {
        "index": partial(_index, opened),
        "profile": partial(_profile, opened),
        "store": _store,
        "metrics": _metrics,
    }
    system = {name: value for name, value in parts.items() if name in LabelledSystem.model_fields}
    for part, look in looks.items():
        place = system if part == "index" else parts.get(part)
        try:
            yield from look(place) if place else ()
        except CtxguardError as error:  # its message says how to mend it
            yield part, "wrong", str(error)


def _index(opened: "list[Source]", system: dict[str, Any]) -> Iterator[Finding]:
    source = LabelledSystem(**system).open()
    opened.append(source)
    size = count(len(source), "passage") if hasattr(source, "__len__") else "opened"
    signals = getattr(source, "has_signals", None)
    level = "" if signals is None else (", with signals" if signals else ", without signals")
    yield "index", "ok", size + level


def _profile(opened: "list[Source]", file: Path) -> Iterator[Finding]:
    from ctxguard.guard.context_guard import ContextGuard
    from ctxguard.profile.schema import Profile

    profile = Profile.load(file)
    verdict = profile.verdict
    text = "no verdict: the passages it keeps are served" if verdict is None else verdict.statement
    yield "profile", "ok", text
    for source in opened:
        comparison = ContextGuard(source, profile=profile).comparison
        for line in comparison.mismatches:
            yield "profile", "wrong", f"not made on this system: {line}; calibrate on this one"
        for line in comparison.reservations:
            yield "profile", "note", line
        if not comparison.differences:
            yield "profile", "ok", "made on this system"


def _store(url: str) -> Iterator[Finding]:
    from ctxguard.monitor.store import State

    with open_store(url) as store:
        states = store.states()
        figures = f"{states[State.JUDGED]:,} judged, {states[State.PENDING]:,} waiting"
        yield (
            "store",
            "ok",
            f"reachable: {figures}, {count(len(store.labels()), 'label')} from people",
        )
        waited = store.clock() - (store.oldest_waiting() or store.clock())
        if waited > _IDLE_SECONDS:
            text = f"a sample has waited {waited / 3600:.0f} hours: run `ctxguard monitor`"
            yield "monitor", "wrong", text
        if not sum(states.values()):
            yield "store", "note", "no samples yet: pass a sampler to the guard"


def _metrics(url: str) -> Iterator[Finding]:
    """Check whether a URL serves metrics of a guard or a monitor."""
    try:
        with urllib.request.urlopen(url, timeout=_SCRAPE_SECONDS) as answer:  # noqa: S310  http(s)
            lines = answer.read(_MAX_METRICS_BYTES).decode(errors="replace").splitlines()
    except (OSError, ValueError) as error:
        yield "metrics", "wrong", f"{url}: {error}; is the service running there?"
        return
    if n := sum(line.startswith("ctxguard_") for line in lines):
        yield "metrics", "ok", f"{n:,} series of ctxguard"
    else:
        text = f"{url} serves no metric of ctxguard: give the guard's registry to its exporter"
        yield "metrics", "wrong", text

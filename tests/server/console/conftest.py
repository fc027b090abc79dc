"""A store of judged requests, and the console on it, behind a server on this machine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

import uvicorn
from live_traffic import EVERYTHING, profile_of, serve
from starlette.applications import Starlette
from starlette.routing import Mount

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Passage
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import SampleStore
from ctxguard.server.console.routes import console_routes

PROFILE = profile_of(RatioPolicy(k=4, min_ratio=0.85))
HOSTILE = (
    '<script>document.title = "owned"</script> <img src=x onerror="document.title = \'owned\'"> '
    "{{ 7 * 7 }} \u202egnp.exe\u202c a\u200bb \U000e0068\U000e0069"
)


class WordJudge:
    """Calls a passage relevant that says so; not exact, so that labels correct it."""

    name = "words"
    version = "1"
    max_grade = 3

    def judge(self, query: str, passages: list[Passage]) -> list[Judgment]:
        return [Judgment(one.passage_id, 3 if query in one.text else 0, None) for one in passages]


def filled(folder: Path, n: int, **settings: object) -> str:
    """The URL of a store with ``n`` judged requests; of each the second passage is relevant."""
    traffic = serve(
        folder,
        n,
        profile=PROFILE,
        relevant_ranks=[1],
        rates=EVERYTHING,
        **settings,  # type: ignore[arg-type]
    )
    with SampleStore.open(traffic.url) as store:
        monitor = Monitor(store, WordJudge())
        while monitor.step():
            pass
    return traffic.url


@contextmanager
def served(store: SampleStore, **settings: object) -> Iterator[str]:
    """The console's address, while a server answers there."""
    app = Starlette(routes=[Mount("/console", routes=console_routes(store, PROFILE, **settings))])  # type: ignore[arg-type]
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/console"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()

"""A store of judged requests that a guard served, and the console on it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from http_service import listening
from live_traffic import EVERYTHING, profile_of, serve
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from ctxguard.core.metadata_filter import Where
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Mode, Passage
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Profile
from ctxguard.server.console.routes import console_routes

PROFILE = profile_of(RatioPolicy(k=5, min_ratio=0.85))
REQUEST = "which-shelf-holds-tool-{}".format
SAME_SITE = {"sec-fetch-site": "same-origin"}

HOSTILE = (
    '<script>document.title = "owned"</script> <img src=x onerror="document.title = \'owned\'"> '
    "{{ 7 * 7 }} \u202egnp.exe\u202c a\u200bb \U000e0068\U000e0069"
)
SHOWN = "⟨U+202E⟩gnp.exe⟨U+202C⟩ a⟨U+200B⟩b ⟨2 hidden characters⟩"
"""Its end as a person sees it."""


def hostile(number: int, rank: int) -> str:
    """An id, and so a part of the passage's text, that is hostile."""
    return f"d{number}-{rank} {HOSTILE}"


class WordJudge:
    """Calls a passage relevant that repeats the query; not exact, so that labels correct it."""

    name = "words"
    version = "1"
    max_grade = 3

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment]:
        return [Judgment(one.passage_id, 3 if query in one.text else 0) for one in passages]


def filled(
    folder: Path,
    n: int,
    *,
    judge: bool = True,
    relevant: int = 1,
    misleading: float = 0.0,
    ids: Callable[[int, int], str] = "d{}-{}".format,
    filters: Sequence[Where | None] = (None,),
    mode: Mode | None = None,
) -> str:
    """The URL of a store with ``n`` requests, of each of which one passage is relevant."""
    traffic = serve(
        folder,
        n,
        profile=PROFILE,
        relevant_ranks=[relevant],
        rates=EVERYTHING,
        misleading=misleading,
        ids=ids,
        filters=filters,
        mode=mode,
    )
    if judge:
        with SampleStore.open(traffic.url) as store:
            monitor = Monitor(store, WordJudge())
            while monitor.step():
                pass
    return traffic.url


def application(
    store: SampleStore,
    *,
    token: str | None = None,
    clock: Callable[[], float] = time.time,
    profile: Profile = PROFILE,
) -> Starlette:
    """One with nothing but the console."""
    routes = console_routes(store, profile, token=token, clock=clock)
    return Starlette(routes=[Mount("/console", routes=routes)])


def visitor(store: SampleStore, **options: Any) -> TestClient:
    """A client of the console that says, as browsers do, that it is on the site."""
    return TestClient(application(store, **options), headers=SAME_SITE)


@contextmanager
def console_at(store: SampleStore, token: str | None = None) -> Iterator[str]:
    """The console's address, while a server answers there."""
    app = application(store, token=token)
    with listening(app, log_level="warning", lifespan="off") as address:
        yield f"{address}/console"

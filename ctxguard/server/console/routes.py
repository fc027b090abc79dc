"""Makes the console's routes, for an application to mount.

Reads the templates and static files; ``label_routes`` also opens a store in memory.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Profile
from ctxguard.server.console import decisions
from ctxguard.server.console.grading import Grading
from ctxguard.server.console.label import Label
from ctxguard.server.console.pages import FOLDER, Handler, Pages


def console_routes(
    store: SampleStore,
    profile: Profile | None,
    *,
    token: str | None = None,
    clock: Callable[[], float] = time.time,
) -> Sequence[BaseRoute]:
    """Make the routes of the console, to be mounted at one path, such as ``/console``.

    Args:
        store: Holds samples and labels; the caller closes it.
        profile: Gives each drop its reason and threshold.
        token: The token for signing in; None admits everybody who can reach the server, which must
            then listen only on this machine, and refuse foreign names in `Host`.
        clock: Seconds since the epoch.
    """
    named = {"decisions": "Decisions", "mistakes": "Wrong drops", "label": "Label"}
    pages = Pages(store, profile, named, token=token, clock=clock)
    label = Label(pages)
    handlers: dict[str, Handler] = {
        "GET /decisions": partial(decisions.newest, pages),
        "GET /request": partial(decisions.one_request, pages),
        "GET /mistakes": partial(decisions.wrong_drops, pages),
        "POST /label/pick": label.pick,
    }
    return _routes(pages, label, handlers)


def label_routes(
    grading: Callable[[Pages], Grading], *, token: str | None = None
) -> Sequence[BaseRoute]:
    """Make the routes of a console that only grades; see `console_routes`."""
    # In memory: it remembers who signed out.
    store = SampleStore.open("sqlite://")
    pages = Pages(store, None, {"label": "Label"}, token=token)
    return _routes(pages, grading(pages), {})


def _routes(pages: Pages, grading: Grading, own: Mapping[str, Handler]) -> Sequence[BaseRoute]:
    handlers: dict[str, Handler] = {
        "GET /": pages.home,
        **own,
        "GET /label": grading.grade_page,
        "POST /label/grade": grading.grade,
        "GET /label/guide": grading.guide_page,
        "POST /sign-in": pages.sign_in,
        "POST /sign-out": pages.sign_out,
        "GET /{path:path}": pages.absent,
        "POST /{path:path}": pages.absent,
    }
    routes: list[BaseRoute] = [
        Mount("/static", StaticFiles(directory=FOLDER / "static"), name="console static")
    ]
    for place, handler in handlers.items():
        method, _, path = place.partition(" ")
        endpoint = pages.endpoint(handler, is_open=path == "/sign-in" and method == "POST")
        routes.append(Route(path, endpoint, methods=[method]))
    return routes

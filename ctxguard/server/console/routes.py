"""The console's routes, for an application to mount."""

import time
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Profile
from ctxguard.server.console.decisions import Decisions
from ctxguard.server.console.label import Label
from ctxguard.server.console.mistakes import WrongDrops
from ctxguard.server.console.pages import FOLDER, Form, Pages, RefusedPage, base, go_to
from ctxguard.server.console.sessions import Sessions


def console_routes(
    store: SampleStore,
    profile: Profile | None,
    *,
    token: str | None = None,
    max_grade: int = 3,
    clock: Callable[[], float] = time.time,
) -> Sequence[BaseRoute]:
    """The routes of the console, to be mounted at one path, such as ``/console``.

    Handlers run on threads, and read the store on each request. Nothing is kept between requests
    but which of the picked requests are graded.

    Args:
        store: Where samples and labels are; stays the caller's to close.
        profile: Gives each drop its reason and threshold; None for none.
        token: What people sign in with; None lets in everybody who reaches the server, which then
            has to listen on this machine only, and to refuse other names than its own in `Host`.
        max_grade: The highest grade of the scale.
        clock: Seconds since the epoch.
    """
    sessions = Sessions(token, store, clock)
    pages = Pages(sessions)
    decisions = Decisions(pages, store, profile)
    label = Label(pages, store, max_grade, clock)
    wrong_drops = WrongDrops(pages, store, profile, clock)

    def sign_in(request: Request, form: Form) -> Response:
        home = f"{base(request)}/"
        wanted = form.get("next", "")
        is_own = wanted.startswith(home) and not wanted.startswith("//") and "\\" not in wanted
        if not sessions.may_try(request):
            raise RefusedPage(429, "Too many attempts", "Wait a minute, then sign in again.")
        answer = go_to(wanted if is_own else home)
        if sessions.begin(form.get("token", ""), request, answer):
            return answer
        return pages.sign_in_form(
            request, next_page=wanted if is_own else "", problem="That is not the token."
        )

    def sign_out(request: Request, _form: Form) -> Response:
        answer = go_to(f"{base(request)}/")
        sessions.end(request, answer)
        return answer

    def absent(_request: Request, _form: Form) -> Response:
        raise RefusedPage(
            404, "No such page", "The console has three: Decisions, Wrong drops and Label."
        )

    def route(path: str, handler: Callable[[Request, Form], Response], method: str) -> Route:
        return Route(path, pages.endpoint(handler), methods=[method])

    return [
        Mount("/static", StaticFiles(directory=FOLDER / "static"), name="console static"),
        Route("/sign-in", pages.endpoint(sign_in, is_open=True), methods=["POST"]),
        route("/sign-out", sign_out, "POST"),
        route("/", decisions.home, "GET"),
        route("/decisions", decisions.newest, "GET"),
        route("/request", decisions.one, "GET"),
        route("/mistakes", wrong_drops.of_day, "GET"),
        route("/label", label.grade_page, "GET"),
        route("/label/pick", label.pick, "POST"),
        route("/label/grade", label.grade, "POST"),
        route("/label/gains", label.gains, "GET"),
        route("/label/guide", label.guide_page, "GET"),
        Route("/{path:path}", pages.endpoint(absent), methods=["GET", "POST"]),
    ]

"""Builds the console's pages: templates, forms, errors, and the headers of every answer.

Reads the templates, the clock and, through ``sessions``, the store; runs handlers on threads, and
logs.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import jinja2
from markupsafe import Markup, escape
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from ctxguard._support.error_text import describe_error
from ctxguard._support.words import count
from ctxguard.core.render import reveal
from ctxguard.errors import CtxguardError, StoreError
from ctxguard.monitor.explanation import (
    grade_in_words,
    labels_in_words,
    state_in_words,
    time_in_words,
)
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Profile
from ctxguard.server.console.sessions import Sessions, is_same_site
from ctxguard.server.limits import MOST_FORM_BYTES

_log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
_MOST_FIELDS = 20

_HEADERS = {
    # No style or script but the console's own files, nothing from elsewhere, in no frame.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Not no-referrer, with which a form's Origin would be null.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

Form = Mapping[str, str]
Handler = Callable[[Request, Form], Response]


class RefusedPage(Exception):  # noqa: N818 - it is an answer, and never leaves the console
    """An answer other than the one asked for: a page that names the fault and how to fix it."""

    def __init__(self, status: int, title: str, text: str) -> None:
        super().__init__(title)
        self.status, self.title, self.text = status, title, text


class Pages:
    """Renders templates, and turns functions of a request into endpoints.

    ``named`` are the pages in the navigation, by path; the first is the console's home. For the
    others see `console_routes`.
    """

    def __init__(
        self,
        store: SampleStore,
        profile: Profile | None,
        named: Mapping[str, str],
        *,
        token: str | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self.profile, self.clock = store, profile, clock
        self.sessions, self._named = Sessions(token, store, clock), named
        _templates()  # compiled now, not while the first visitor waits

    def page(
        self, request: Request, template: str, *, status: int = 200, **values: Any
    ) -> HTMLResponse:
        """Answer with a template."""
        html = _templates()[template].render(
            base=base(request), named=self._named, needs_token=self.sessions.needs_token, **values
        )
        # What UTF-8 cannot hold (half a surrogate pair) is replaced.
        return HTMLResponse(html.encode("utf-8", "replace"), status)

    def endpoint(self, handler: Handler, *, is_open: bool = False) -> Callable[..., Any]:
        """Make an endpoint from a handler, which runs on a thread.

        An open one can be used without signing in.
        """

        async def answer(request: Request) -> Response:
            try:
                response = await self._answer(request, handler, is_open=is_open)
            except Exception as error:
                response = self._refusal(request, error)
            response.headers.update(_HEADERS)
            return response

        return answer

    async def _answer(self, request: Request, handler: Handler, *, is_open: bool) -> Response:
        if request.method == "POST" and not is_same_site(request):
            raise RefusedPage(
                403, "Not sent by this page", "Open the console itself, and submit the form there."
            )
        if not is_open and not await run_in_threadpool(self.sessions.allows, request):
            query = f"?{request.url.query}" if request.url.query else ""
            page = f"{request.scope['path']}{query}" if request.method == "GET" else ""
            return self.sign_in_form(request, next_page=page)
        form = await _form(request) if request.method == "POST" else {}
        return await run_in_threadpool(handler, request, form)

    def sign_in_form(
        self, request: Request, *, next_page: str, problem: str | None = None
    ) -> Response:
        """Show the form that asks for the token."""
        return self.page(request, "sign_in.html", status=401, next_page=next_page, problem=problem)

    def sign_in(self, request: Request, form: Form) -> Response:
        """Begin a session, and redirect to the requested page if it is the console's."""
        home, wanted = f"{base(request)}/", form.get("next", "")
        is_own = wanted.startswith(home) and not wanted.startswith("//") and "\\" not in wanted
        if not self.sessions.may_try(request):
            raise RefusedPage(429, "Too many attempts", "Wait a minute, then sign in again.")
        answer = go_to(wanted if is_own else home)
        if self.sessions.begin(form.get("token", ""), request, answer):
            return answer
        return self.sign_in_form(
            request, next_page=wanted if is_own else "", problem="This is not the right token."
        )

    def sign_out(self, request: Request, _form: Form) -> Response:
        """End the session everywhere."""
        answer = go_to(f"{base(request)}/")
        self.sessions.end(request, answer)
        return answer

    def absent(self, _request: Request, _form: Form) -> Response:
        """Refuse an unknown address."""
        raise RefusedPage(
            404, "No such page", f"The console has these: {', '.join(self._named.values())}."
        )

    def home(self, request: Request, _form: Form) -> Response:
        """Answer the console's own address."""
        return go_to(f"{base(request)}/{next(iter(self._named))}")

    def _refusal(self, request: Request, error: Exception) -> Response:
        """Show the page of an error."""
        status, title, text = 400, "This cannot be shown", str(error)
        if isinstance(error, RefusedPage):
            status, title, text = error.status, error.title, error.text
        elif isinstance(error, StoreError):
            _log.warning("the console: %s", describe_error(error))
            status, title = 503, "The store cannot be used"
        elif not isinstance(error, CtxguardError):
            _log.error("the console: %s", describe_error(error))
            status, title = 500, "Something went wrong here"
            text = "The server's log says where. Please report it."
        return self.page(request, "message.html", status=status, title=title, text=text)


@cache
def _templates() -> dict[str, jinja2.Template]:
    """Compile the templates, by file name."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "reveal": _revealed,
        "counted": count,
        "time": time_in_words,
        "grade": grade_in_words,
        "labels": labels_in_words,
        "sentence": lambda text: text[:1].upper() + text[1:],
    }
    environment.globals["state_in_words"] = state_in_words
    environment.globals["version_of"] = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in (FOLDER / "static").iterdir()
    }
    return {name: environment.get_template(name) for name in environment.list_templates()}


def base(request: Request) -> str:
    """Return the path under which the console is mounted, without a trailing slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def go_to(address: str) -> Response:
    """Redirect the browser to another page."""
    return RedirectResponse(address, 303)


def whole_number(request: Request, name: str) -> int | None:
    """Read a whole number from the address; None if it is missing."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise RefusedPage(400, "Not a page of the console", f"{name} is not a whole number.")
    return int(text)


async def _form(request: Request) -> Form:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_FORM_BYTES:
            raise RefusedPage(413, "Too much was sent", "Forms of the console are smaller.")
    try:
        return dict(
            parse_qsl(
                body.decode("utf-8"),
                keep_blank_values=True,
                max_num_fields=_MOST_FIELDS,
                errors="strict",
            )
        )
    except ValueError as error:
        raise RefusedPage(400, "Not a form of the console", "Open the page again.") from error


def _revealed(text: str) -> Markup:
    return Markup(escape(reveal(text)))  # noqa: S704 - escaped

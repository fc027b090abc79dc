"""Wrong drops: the requests of a day whose relevant passages the guard dropped."""

import time
from collections.abc import Callable
from datetime import date, timedelta

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.monitor.mistakes import day_named, mistakes_of
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Profile
from ctxguard.server.console.pages import Form, Pages, RefusedPage

MOST_SHOWN = 50


class WrongDrops:
    """Answers the requests for this page.

    Args:
        pages: Renders it.
        store: Holds samples, judgments and labels.
        profile: Gives each drop its reason, and decides on requests in shadow; None for neither.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        pages: Pages,
        store: SampleStore,
        profile: Profile | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._pages = pages
        self._store = store
        self._profile = profile
        self._clock = clock

    def of_day(self, request: Request, _form: Form) -> Response:
        """Show a day, yesterday unless another is named, of one tenant or all."""
        day = day_named(request.query_params.get("day") or "yesterday", self._clock())
        if day is None:
            raise RefusedPage(400, "Which day?", "Enter a date such as 2026-11-05.")
        tenant = request.query_params.get("tenant", "").strip()
        found = mistakes_of(self._store, day, self._profile, tenant=tenant or None)
        return self._pages.page(
            request,
            "mistakes.html",
            found=found,
            shown=found.mistakes[:MOST_SHOWN],
            tenant=tenant,
            before=day - timedelta(days=1) if day > date.min else None,
            after=day + timedelta(days=1) if day < date.max else None,
            has_profile=self._profile is not None,
        )

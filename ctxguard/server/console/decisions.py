"""Shows decisions: the sampled requests, the details of one request, and a day's wrong drops.

Reads the store and the clock.
"""

from datetime import UTC, date, datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.monitor.explanation import explain_sample
from ctxguard.monitor.mistakes import latest_mistakes, mistakes_of
from ctxguard.server.console.pages import Form, Pages, RefusedPage, whole_number

PAGE_ROWS = 25
MISTAKES_SHOWN = 20


def newest(pages: Pages, request: Request, _form: Form) -> Response:
    """Show one page of samples, newest first."""
    before = whole_number(request, "before")
    found = pages.store.newest_samples(PAGE_ROWS + 1, before=before)
    shown = found[:PAGE_ROWS]
    records = pages.store.records([one.sample_id for one in shown])
    return pages.page(
        request,
        "decisions.html",
        # Without a record where the text was deleted, or cannot be read.
        rows=[{"stored": one, "record": records.get(one.sample_id)} for one in shown],
        older=shown[-1].sample_id if len(found) > PAGE_ROWS else None,
        is_first=before is None,
    )


def one_request(pages: Pages, request: Request, _form: Form) -> Response:
    """Show every sample of one request."""
    request_id = request.query_params.get("id", "").strip()
    samples = pages.store.samples_of(request_id) if request_id else []
    if not samples:
        raise RefusedPage(
            404,
            "No sample of this request",
            f"The store has no sample of request “{request_id}”: it was not sampled, it is not "
            "written yet, or it has expired."
            if request_id
            else "Enter the id of a request, as the guard recorded it.",
        )
    return pages.page(
        request,
        "request.html",
        request_id=request_id,
        explanations=[explain_sample(pages.store, one, pages.profile) for one in samples],
        has_profile=pages.profile is not None,
    )


def wrong_drops(pages: Pages, request: Request, _form: Form) -> Response:
    """Show a day's requests whose relevant passages were dropped, largest loss first.

    By default the day is the latest that has any.
    """
    named = request.query_params.get("day")
    try:
        asked = date.fromisoformat(named) if named else None
    except ValueError as error:
        raise RefusedPage(400, "Which day?", "Enter a date such as 2026-11-05.") from error
    tenant = request.query_params.get("tenant", "").strip()
    first = whole_number(request, "first") or 0
    if asked is None:
        today = datetime.fromtimestamp(pages.clock(), UTC).date()
        found = latest_mistakes(pages.store, today, pages.profile, tenant=tenant or None)
    else:
        found = mistakes_of(pages.store, asked, pages.profile, tenant=tenant or None)
    return pages.page(
        request,
        "mistakes.html",
        found=found,
        shown=found.mistakes[first : first + MISTAKES_SHOWN],
        first=first,
        page_size=MISTAKES_SHOWN,
        tenant=tenant,
        before=found.day - timedelta(days=1) if found.day > date.min else None,
        after=found.day + timedelta(days=1) if found.day < date.max else None,
        has_profile=pages.profile is not None,
    )

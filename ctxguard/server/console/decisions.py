"""Decisions: the sampled requests, newest first, and all that is known of one of them."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from ctxguard.monitor.explanation import explain_sample, readable
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import SampleStore, StoredSample
from ctxguard.profile.schema import Profile
from ctxguard.server.console.pages import Form, Pages, RefusedPage, base, go_to, whole_number

PAGE_ROWS = 25


@dataclass(frozen=True, slots=True)
class _ListedSample:
    """A sample in the list; record None where its text was deleted, or cannot be read."""

    stored: StoredSample
    record: SampleRecord | None


class Decisions:
    """The handlers of these pages.

    Args:
        pages: Renders them.
        store: Where the samples are.
        profile: Gives each drop its reason; None for no reasons.
    """

    def __init__(self, pages: Pages, store: SampleStore, profile: Profile | None) -> None:
        self._pages = pages
        self._store = store
        self._profile = profile

    def home(self, request: Request, _form: Form) -> Response:
        """The console's own address."""
        return go_to(f"{base(request)}/decisions")

    def newest(self, request: Request, _form: Form) -> Response:
        """One page of samples, newest first."""
        before = whole_number(request, "before")
        found = self._store.newest_samples(PAGE_ROWS + 1, before=before)
        shown = found[:PAGE_ROWS]
        payloads = self._store.payloads([one.sample_id for one in shown])
        return self._pages.page(
            request,
            "decisions.html",
            rows=[_ListedSample(one, readable(payloads.get(one.sample_id))) for one in shown],
            older=shown[-1].sample_id if len(found) > PAGE_ROWS else None,
            is_first=before is None,
        )

    def one(self, request: Request, _form: Form) -> Response:
        """One request: every sample of it."""
        request_id = request.query_params.get("id", "").strip()
        samples = self._store.samples_of(request_id) if request_id else []
        if not samples:
            raise RefusedPage(
                404,
                "No sample of this request",
                f"The store has no sample of request “{request_id}”: it was not sampled, it is "
                "not written yet, or it has expired."
                if request_id
                else "Enter the id of a request, as the guard knew it.",
            )
        explanations = [explain_sample(self._store, one, self._profile) for one in samples]
        return self._pages.page(
            request,
            "request.html",
            request_id=request_id,
            explanations=explanations,
            has_profile=self._profile is not None,
        )

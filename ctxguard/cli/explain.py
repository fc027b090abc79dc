"""``ctxguard explain``: show one sampled request.

Reads the store, and the profile if one is given; writes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

import ctxguard
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard._support.words import count
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._store import open_store
from ctxguard.cli._tables import TextTable, facts, number, remark
from ctxguard.errors import DataError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from ctxguard import Profile
    from ctxguard.monitor.explanation import ExplainedCandidate, Explanation

_CANDIDATES_SHOWN = 6
_REPLY_CHARS = 240


class ExplainCommand(SettingsModel):
    request_id: str = setting("The request, as the guard knew it.", "REQUEST_ID", argument=True)
    store: _options.StoreUrl
    profile: Path | None = optional(
        "Profile that decided then: decide again by it, and show the reason of each drop.", "FILE"
    )
    show_all: _options.ShowAll = False

    def __call__(self, output: Output) -> None:
        """A request is shown as it was stored: the query, the candidates with their scores, the
        judge's grades, people's labels, and the probability that it was picked for labelling.
        The console shows a day's requests that lost relevant passages.
        """
        from ctxguard.monitor.explanation import explain_sample

        loaded = None if self.profile is None else ctxguard.Profile.load(self.profile)
        with open_store(self.store) as opened:
            explanations = [
                explain_sample(opened, one, loaded) for one in opened.samples_of(self.request_id)
            ]
        if not explanations:
            raise DataError(
                f"the store has no sample of request {self.request_id!r}: it was not sampled, it "
                "is not written yet, or it has expired (after 30 days, unless keep-days of "
                "`ctxguard monitor` says otherwise)"
            )
        documents = [{**_document(one), "notes": _notes(one, loaded)} for one in explanations]
        shown = explanations if self.show_all else explanations[-1:]
        parts = [part for one in shown for part in _shown(one, loaded, show_all=self.show_all)]
        if len(shown) < len(explanations):
            earlier = count(len(explanations) - len(shown), "earlier sample")
            parts.append(remark(f"{earlier} of this request; --all shows it"))
        output.result({"request_id": self.request_id, "samples": documents}, parts)


def _notes(explanation: "Explanation", profile: "Profile | None") -> list[str]:
    record = explanation.record
    if record is None or profile is not None:
        return list(explanation.notes)
    by = f" {record.profile_id}" if record.profile_id else " that decided"
    return [f"with --profile, the profile{by}, each drop is shown with its reason"]


def _document(explanation: "Explanation") -> dict[str, Any]:
    record, decision = explanation.record, explanation.decision
    of_record = ("query", "route", "mode", "profile_id", "session_id", "kept")
    return {
        **asdict(explanation.stored),
        "state_in_words": explanation.state,
        **{name: getattr(record, name, None) for name in of_record},
        "score_kind": None if record is None else record.kind,
        "flags": () if record is None else record.flags,
        "policy": None if decision is None else describe_policy(decision.policy),
        "candidates": explanation.candidates,
        "rejected": [
            {"passage_id": name, "reason": reason, "reply": reply}
            for name, reason, reply in explanation.rejected
        ],
        "picked": explanation.picked,
    }


def _shown(
    explanation: "Explanation", profile: "Profile | None", *, show_all: bool
) -> Iterator[RenderableType]:
    yield facts(*explanation.facts())
    served = [one for one in explanation.candidates if one.outcome == "served"]
    dropped = [one for one in explanation.candidates if one.outcome != "served"]
    rejected = explanation.rejected
    if not show_all:
        rejected = tuple([(name, why, reply[:_REPLY_CHARS]) for name, why, reply in rejected[:2]])
    if rejected:
        yield TextTable(("passage", "why", "reply"), rejected, "Why there is no grade")
    yield from _more(rejected, explanation.rejected, "without a grade")
    in_shadow = explanation.is_in_shadow
    if in_shadow:
        would = count(explanation.would_drop, "served passage")
        yield remark(f"in shadow: {would} would be dropped under enforce")
    # In shadow, those that would be dropped matter most.
    worst = sorted(served, key=lambda one: one.enforced != "dropped") if in_shadow else served
    # Judged or graded ones are the most informative.
    known = sorted(dropped, key=lambda one: not (one.judge or one.labels))
    for what, all_of_them, first in (("served", served, worst), ("dropped", dropped, known)):
        shown = [one for one in all_of_them if show_all or one in first[:_CANDIDATES_SHOWN]]
        yield from _candidates(f"{what.capitalize()}, best first", shown)
        yield from _more(shown, all_of_them, what)
    yield from map(remark, _notes(explanation, profile))


def _more(shown: Sequence[object], of: Sequence[object], what: str) -> Iterator[RenderableType]:
    if len(shown) < len(of):
        yield remark(f"{len(of) - len(shown):,} more {what}; --all shows them")


def _candidates(title: str, candidates: "Sequence[ExplainedCandidate]") -> Iterator[RenderableType]:
    from ctxguard.monitor.explanation import grade_in_words, labels_in_words

    rows = [
        {
            "passage": one.passage_id,
            "rank>": str(one.rank),
            "score>": number(one.score),
            "P>": "" if one.probability is None else f"{one.probability:.3g}",
            "enforced": one.enforced or "",
            "stages": ", ".join(
                f"{leg} {score:.3g}" for leg, score in one.legs.items() if score is not None
            ),
            "why": _why(one),
            "judge": grade_in_words(one.judge),
            "people": labels_in_words(one.labels),
        }
        for one in candidates
    ]
    if rows:
        # Only columns with any content.
        columns = [name for name in rows[0] if any(row[name] for row in rows)]
        yield TextTable(columns, ([row[name] for name in columns] for row in rows), title)


def _why(candidate: "ExplainedCandidate") -> str:
    kept_if = " and ".join(candidate.kept_if)
    return "; kept if ".join(text for text in (candidate.reason, kept_if) if text)

"""``ctxguard explain``: shows one sampled request, or the requests of a day that lost passages."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ctxguard
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard._support.words import count
from ctxguard.cli import _options
from ctxguard.cli._console import Output, number, print_json
from ctxguard.cli._store import open_store
from ctxguard.cli._tables import TextTable
from ctxguard.core.types import Mode
from ctxguard.errors import DataError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from ctxguard import Profile
    from ctxguard.monitor.explanation import ExplainedCandidate, Explanation
    from ctxguard.monitor.mistakes import DayOfMistakes, DroppedPassage

_DROPPED_SHOWN = 10
_MISTAKES_SHOWN = 5


class Explain(SettingsModel):
    """Settings of ``ctxguard explain``."""

    request_id: str = setting(
        "The request, as the guard knew it; or a day in UTC, today, yesterday or such as "
        "2026-11-05, for its judged requests of which relevant passages were dropped.",
        "REQUEST_ID",
        argument=True,
    )
    store: _options.StoreUrl
    profile: Path | None = optional(
        "Profile that decided then: decide again by it, and show the reason of each drop.", "FILE"
    )
    show_all: _options.ShowAll = False
    as_json: _options.AsJson = False


def explain(settings: Explain) -> None:
    """Show what was served and dropped for one sampled request, and how it was judged.

    From the store: the query, the candidates with their scores, the judge's
    verdicts, people's labels, and the probability of its pick for labelling.

    Of a day: the requests that lost most, with the passages, why each was
    dropped, and the loss in UDCG and recall.
    """
    from ctxguard.monitor.explanation import explain_sample
    from ctxguard.monitor.mistakes import day_named, mistakes_of

    output, request_id = Output(as_json=settings.as_json), settings.request_id
    loaded = None if settings.profile is None else ctxguard.Profile.load(settings.profile)
    day = day_named(request_id, time.time())
    if day is not None:
        with open_store(settings.store) as opened:
            _print_day(mistakes_of(opened, day, loaded), settings, output)
        return
    with open_store(settings.store) as opened:
        explanations = [
            explain_sample(opened, one, loaded) for one in opened.samples_of(request_id)
        ]
    if not explanations:
        raise DataError(
            f"the store has no sample of request {request_id!r}: it was not sampled, it is not "
            "written yet, or it has expired (after 30 days, unless keep-days of `ctxguard monitor` "
            "says otherwise)"
        )
    if settings.as_json:
        samples = [{**_document(one), "notes": _notes(one, loaded)} for one in explanations]
        print_json({"request_id": request_id, "samples": samples})
        return
    for explanation in explanations:
        _print(explanation, output, show_all=settings.show_all)
        output.notes(_notes(explanation, loaded))


def _print_day(found: "DayOfMistakes", settings: Explain, output: Output) -> None:
    notes = []
    if settings.profile is None:
        notes.append("with --profile drops have their reasons, and requests in shadow count too")
    if found.unread:
        notes.append(
            f"{count(found.unread, 'more request')} may have lost a passage, and had less of one: "
            "they were not read"
        )
    if settings.as_json:
        print_json({**asdict(found), "notes": notes})
        return
    shown = found.mistakes if settings.show_all else found.mistakes[:_MISTAKES_SHOWN]
    output.facts(
        [
            ("day", f"{found.day} UTC"),
            ("judged", count(found.judged, "request")),
            ("wrong drops", f"{count(len(found.mistakes), 'request')} lost a relevant passage"),
        ]
    )
    for one in shown:
        output.heading(one.query or one.request_id)
        lost = f"{one.udcg_loss:.2f} UDCG, {one.recall_loss:.2f} recall"
        in_shadow = "; in shadow: it would have been" * (one.mode is Mode.SHADOW)
        output.facts([("request", one.request_id), ("lost", lost + in_shadow)])
        columns = {
            "passage": [each.passage_id for each in one.dropped],
            "rank>": [str(each.rank) for each in one.dropped],
            "P>": [_figure(each.probability) for each in one.dropped],
            "r>": [_figure(each.relative_score) for each in one.dropped],
            "grade": [f"{each.grade} by {each.graded_by}" for each in one.dropped],
            "why": ["; kept if ".join(_why(each)) for each in one.dropped],
        }
        _print_table(None, columns, output)
        output.notes([one.note] if one.note else [])
    if len(shown) < len(found.mistakes):
        output.note(f"{len(found.mistakes) - len(shown):,} more lost less; --all shows them")
    output.notes(notes)


def _notes(explanation: "Explanation", profile: "Profile | None") -> list[str]:
    record = explanation.record
    if record is None or profile is not None:
        return list(explanation.notes)
    by = f" {record.profile_id}" if record.profile_id else " that decided"
    return [f"with --profile, the profile{by}, each drop is shown with its reason"]


def _document(explanation: "Explanation") -> dict[str, Any]:
    record, decision = explanation.record, explanation.decision
    of_record = ("query", "segment", "route", "mode", "profile_id", "kept")
    return {
        **asdict(explanation.stored),
        "state_in_words": explanation.state,
        **{name: getattr(record, name, None) for name in of_record},
        "score_kind": None if record is None else record.kind,
        "flags": () if record is None else record.flags,
        "policy": None if decision is None else describe_policy(decision.policy),
        "candidates": explanation.candidates,
        "conflicts": explanation.conflicts,
        "rejected": [
            {"passage_id": name, "reason": reason, "reply": reply}
            for name, reason, reply in explanation.rejected
        ],
        "picked": explanation.picked,
        "alarm": explanation.alarm,
        "feedback": explanation.reactions,
    }


def _print(explanation: "Explanation", output: Output, *, show_all: bool) -> None:
    output.facts(explanation.facts())
    served = [one for one in explanation.candidates if one.outcome == "served"]
    dropped = [one for one in explanation.candidates if one.outcome != "served"]
    # Those that somebody has judged or graded say most.
    shown = [
        one
        for place, one in enumerate(dropped)
        if show_all or place < _DROPPED_SHOWN or one.judge or one.labels
    ]
    _print_candidates("Served, best first", served, output)
    _print_candidates("Dropped, best first", shown, output)
    if len(shown) < len(dropped):
        output.note(f"{len(dropped) - len(shown):,} more dropped; --all shows them")
    if explanation.rejected:
        rows = TextTable("passage", "why", "reply", title="Why there is no verdict")
        for name, reason, reply in explanation.rejected:
            rows.add_row(name, reason, reply)
        output.out.print(rows)


def _print_candidates(
    title: str, candidates: "Sequence[ExplainedCandidate]", output: Output
) -> None:
    from ctxguard.monitor.explanation import labels_in_words, verdict_in_words

    if not candidates:
        return
    columns = {
        "passage": [one.passage_id for one in candidates],
        "rank>": [str(one.rank) for one in candidates],
        "score>": [number(one.score) for one in candidates],
        "stages": [
            ", ".join(f"{leg} {score:.4g}" for leg, score in one.legs.items() if score is not None)
            for one in candidates
        ],
        "why": ["; kept if ".join(_why(one)) for one in candidates],
        "judge": [verdict_in_words(one.judge) for one in candidates],
        "people": [labels_in_words(one.labels) for one in candidates],
    }
    _print_table(title, columns, output)


def _print_table(title: str | None, columns: Mapping[str, Sequence[str]], output: Output) -> None:
    """Print the columns in which anything stands."""
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = TextTable(*shown, title=title)
    for cells in zip(*shown.values(), strict=True):
        rows.add_row(*cells)
    output.out.print(rows)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _why(candidate: "ExplainedCandidate | DroppedPassage") -> list[str]:
    kept_if = " and ".join(candidate.kept_if)
    return [text for text in (candidate.reason, kept_if) if text]

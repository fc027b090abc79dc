"""``ctxguard explain``: what the store knows of one request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxguard.cli import _options
from ctxguard.cli._console import Output, number, print_json, table
from ctxguard.cli._descriptions import FLAGS, REASONS, threshold_in_words
from ctxguard.cli._store import StoreUrl, open_store
from ctxguard.core.types import Flag
from ctxguard.errors import DataError
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from ctxguard.core.decision import Decision
    from ctxguard.core.policies import Policy
    from ctxguard.core.types import Verdict
    from ctxguard.monitor.judges import Judgment
    from ctxguard.monitor.sampling.record import SampleRecord
    from ctxguard.monitor.store import LabelRow, SampleStore, StoredSample
    from ctxguard.profile.schema import Profile

_DROPPED_SHOWN = 10

_STATES = {
    "pending": "waits to be judged",
    "claimed": "is being judged",
    "judged": "judged by {series}",
    "incomplete": "left out: a served passage got no valid verdict",
    "failed": "left out",
    "skipped": "left out at random to keep the judging budget: others stand for it",
    "forced": "added by hand: never judged, in no estimate",
}


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("explain")(explain)


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The request, as the guard knew it.")
    ],
    *,
    store: StoreUrl,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Profile that decided then: decide again by it, and show the reason of each drop.",
        ),
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every dropped candidate instead of the first ten.")
    ] = False,
    as_json: _options.AsJson = False,
) -> None:
    """Show what was served and dropped for one sampled request, and how it was judged.

    From the store: the query, the candidates with their scores, the judge's
    verdicts, people's labels, and with what probability it was picked for them.
    """
    from ctxguard.profile.schema import Profile

    output = Output(as_json=as_json)
    loaded = None if profile is None else Profile.load(profile)
    with open_store(store) as opened:
        explanations = [_explained(opened, one, loaded) for one in opened.samples_of(request_id)]
    if not explanations:
        raise DataError(
            f"the store has no sample of request {request_id!r}: it was not sampled, it is not "
            "written yet, or it has expired (after 30 days, unless `ctxguard monitor --keep-days` "
            "says otherwise)"
        )
    if as_json:
        samples = [_document(one) for one in explanations]
        print_json({"request_id": request_id, "samples": samples})
        return
    for explanation in explanations:
        _print(explanation, output, show_all=show_all)


@dataclass(frozen=True)
class _Candidate:
    """A candidate and all that is known of it.

    Attributes:
        rank: In the retriever's own order, from 1.
        outcome: ``served``, ``dropped``, or ``unusable`` without a score that can be compared.
        reason: Why it was dropped; None where it was not, or that is not known.
        kept_if: The settings at which it would have been kept.
    """

    passage_id: str
    title: str
    rank: int
    score: float | None
    legs: Mapping[str, float | None]
    outcome: str
    reason: str | None
    kept_if: tuple[str, ...]
    judge: "Judgment | None"
    labels: "tuple[LabelRow, ...]"


@dataclass(frozen=True)
class _Explanation:
    """One sample.

    Attributes:
        record: None where its text was deleted, or cannot be read.
        candidates: Served ones first, each best first.
        picked: The probability with which it was picked for labels, by depth.
        alarm: The alarm that requested its labels; None for none.
        decision: What the profile decides; None without one, or where it has no policy for it.
    """

    stored: "StoredSample"
    record: "SampleRecord | None"
    candidates: tuple[_Candidate, ...]
    rejected: tuple[tuple[str, str, str], ...]
    picked: Mapping[str, float]
    alarm: str | None
    reactions: tuple[str, ...]
    decision: "Decision | None"
    notes: tuple[str, ...]

    @property
    def state(self) -> str:
        """How far it came, in words."""
        stored = self.stored
        words = _STATES[stored.state.value].format(series=stored.series)
        if stored.state.value == "failed" and not stored.has_text:
            return f"{words}: its text was deleted before it was judged"
        if stored.state.value == "failed" and self.record is None:
            return f"{words}: it cannot be read"
        return words + (f"; judging it failed {stored.attempts} times" if stored.attempts else "")


def _explained(
    store: "SampleStore", stored: "StoredSample", profile: "Profile | None"
) -> _Explanation:
    from ctxguard.monitor.judges.verdict_text import verdicts_from_json
    from ctxguard.monitor.store import LabelDepth

    sample_id = stored.sample_id
    record = _record(store, sample_id)
    judge: dict[str, Judgment] = {}
    picked: dict[str, float] = {}
    for series in store.series():
        judge |= verdicts_from_json(store.verdicts(series, [sample_id]).get(sample_id, ""))
        for depth in LabelDepth:
            probability = store.picked(series, depth).get(sample_id)
            picked |= {} if probability is None else {depth.value: probability}
    labels = [label for _, label in store.labels([sample_id])]
    decision, notes = (None, []) if record is None else _decided(record, profile)
    return _Explanation(
        stored,
        record,
        () if record is None else tuple(_candidates(record, decision, judge, labels)),
        store.rejected([sample_id]).get(sample_id, ()),
        picked,
        dict(store.label_queue()).get(sample_id),
        tuple([reaction.kind for _, reaction in store.feedback([sample_id])]),
        decision,
        tuple(notes),
    )


def _record(store: "SampleStore", sample_id: int) -> "SampleRecord | None":
    from ctxguard.monitor.sampling.record import SampleRecord

    payload = store.payloads([sample_id]).get(sample_id)
    try:
        return None if payload is None else SampleRecord.from_bytes(payload)
    except DataError:
        return None


def _decided(
    record: "SampleRecord", profile: "Profile | None"
) -> "tuple[Decision | None, list[str]]":
    """What the profile decides on the candidates, and what to know of that."""
    from ctxguard.core.decision import decide

    if profile is None:
        by = f" {record.profile_id}" if record.profile_id else " that decided"
        return None, [f"with --profile, the profile{by}, each drop is shown with its reason"]
    policy = _policy(record, profile)
    if policy is None:
        return None, [f"the profile has no policy for the route {record.route.value}"]
    decision = decide(record.ranking(), policy)
    notes = []
    if profile.profile_id != record.profile_id:
        then = record.profile_id or "none"
        notes.append(f"the reasons are those of profile {profile.profile_id}; then it was {then}")
    if decision.n_kept != record.kept:
        notes.append(f"this profile keeps {decision.n_kept}; then {record.kept} were kept")
    return decision, notes


def _policy(record: "SampleRecord", profile: "Profile") -> "Policy | None":
    route = profile.routes.get(record.route)
    if route is None:
        return None
    own = route.segments.get(record.segment) if record.segment is not None else None
    return route.policy if own is None else own.policy


def _candidates(
    record: "SampleRecord",
    decision: "Decision | None",
    judge: "Mapping[str, Judgment]",
    labels: "Sequence[LabelRow]",
) -> list[_Candidate]:
    verdicts = {} if decision is None else _by_position(decision)
    served, pool = set(record.served), {*record.served, *record.dropped}
    unusable = [place for place in range(len(record.passage_ids)) if place not in pool]
    found = []
    for place in (*record.served, *record.dropped, *unusable):
        name = record.passage_ids[place]
        is_served = place in served
        reason, kept_if = (None, ()) if is_served else _reason(verdicts.get(place))
        outcome = "served" if is_served else "dropped" if place in pool else "unusable"
        found.append(
            _Candidate(
                passage_id=name,
                title=record.passage(place).title,
                rank=place + 1,
                score=_finite(record.scores[place]),
                legs={leg: _finite(own.scores[place]) for leg, own in record.legs.items()},
                outcome=outcome,
                reason=reason,
                kept_if=kept_if,
                judge=judge.get(name),
                labels=tuple([label for label in labels if label.passage_id == name]),
            )
        )
    return found


def _by_position(decision: "Decision") -> "dict[int, Verdict]":
    places = [*decision.order, *(place for place, _ in decision.set_aside)]
    return dict(zip(places, decision.verdicts, strict=True))


def _reason(verdict: "Verdict | None") -> tuple[str | None, tuple[str, ...]]:
    if verdict is None:
        return None, ()
    if verdict.reason is None:
        return "kept by the policy; then a duplicate, over the budget, or unreadable", ()
    return REASONS[verdict.reason], tuple(map(threshold_in_words, verdict.kept_if))


def _finite(score: float) -> float | None:
    return float(score) if math.isfinite(score) else None


def _document(explanation: _Explanation) -> dict[str, Any]:
    stored, record, decision = explanation.stored, explanation.record, explanation.decision
    return {
        **asdict(stored),
        "state": stored.state.value,
        "state_in_words": explanation.state,
        "query": None if record is None else record.query,
        "segment": None if record is None else record.segment,
        "route": None if record is None else record.route.value,
        "mode": None if record is None else record.mode.value,
        "score_kind": None if record is None else record.kind.value,
        "profile_id": None if record is None else record.profile_id,
        "flags": [] if record is None else list(record.flags),
        "kept": None if record is None else record.kept,
        "policy": None if decision is None else describe_policy(decision.policy),
        "candidates": [
            {
                **asdict(one),
                "judge": None if one.judge is None else asdict(one.judge),
                "labels": [asdict(label) for label in one.labels],
            }
            for one in explanation.candidates
        ],
        "rejected": [
            {"passage_id": name, "reason": reason, "reply": reply}
            for name, reason, reply in explanation.rejected
        ],
        "picked": dict(explanation.picked),
        "alarm": explanation.alarm,
        "feedback": list(explanation.reactions),
        "notes": list(explanation.notes),
    }


def _print(explanation: _Explanation, output: Output, *, show_all: bool) -> None:
    output.facts(_facts(explanation))
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
        rows = table("passage", "why", "reply", title="Why there is no verdict")
        for name, reason, reply in explanation.rejected:
            rows.add_row(name, reason, reply)
        output.out.print(rows)
    for note in explanation.notes:
        output.note(note)


def _facts(explanation: _Explanation) -> list[tuple[str, str]]:
    stored, record = explanation.stored, explanation.record
    answered = datetime.fromtimestamp(stored.time_seconds, UTC)
    facts = [
        ("request", stored.request_id),
        ("answered", f"{answered:%Y-%m-%d %H:%M:%S} UTC"),
        ("sampled", f"with probability {stored.probability:.3g}"),
        ("state", explanation.state),
        ("session", stored.session_id or ""),
        ("labels", _picked_in_words(explanation)),
        ("feedback", ", ".join(explanation.reactions)),
    ]
    if record is None:
        facts.append(("text", "deleted to bound the store's size, or not readable"))
    else:
        n = len(record.passage_ids)
        facts[1:1] = [("query", record.query or "not stored")]
        facts += [
            ("segment", record.segment or ""),
            ("route", record.route.value),
            ("mode", record.mode.value),
            ("profile", record.profile_id or "none"),
            ("policy", f"kept {record.kept} of {n} candidates; {len(record.served)} were served"),
            *[("flag", f"{flag}: {FLAGS[Flag(flag)]}") for flag in record.flags],
        ]
    if explanation.decision is not None:
        facts.append(("keeps", describe_policy(explanation.decision.policy)))
    return [(name, text) for name, text in facts if text]


def _picked_in_words(explanation: _Explanation) -> str:
    parts = [
        f"picked to depth {depth} with probability {probability:.3g}"
        for depth, probability in explanation.picked.items()
    ]
    if explanation.alarm is not None:
        parts.append(f"requested by the alarm {explanation.alarm}")
    return ", ".join(parts) or "not picked for labels"


def _print_candidates(title: str, candidates: Sequence[_Candidate], output: Output) -> None:
    if not candidates:
        return
    columns = {
        "passage": [one.passage_id for one in candidates],
        "rank>": [str(one.rank) for one in candidates],
        "score>": [number(one.score) for one in candidates],
        "stages": [_legs(one.legs) for one in candidates],
        "why": ["; kept if ".join(_why(one)) for one in candidates],
        "judge": [_graded(one.judge) for one in candidates],
        "people": [_labels(one.labels) for one in candidates],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = table(*shown, title=title)
    for cells in zip(*shown.values(), strict=True):
        rows.add_row(*cells)
    output.out.print(rows)


def _legs(legs: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {score:.4g}" for name, score in legs.items() if score is not None)


def _why(candidate: _Candidate) -> list[str]:
    kept_if = " and ".join(candidate.kept_if)
    return [text for text in (candidate.reason, kept_if) if text]


def _graded(verdict: "Judgment | None") -> str:
    if verdict is None:
        return ""
    if not verdict.judged:
        return "no label"
    return f"{verdict.grade}" + ("" if verdict.negative is None else f" {verdict.negative.value}")


def _labels(labels: "Sequence[LabelRow]") -> str:
    return ", ".join(
        f"{label.annotator} {label.grade}" + (f" {label.negative}" if label.negative else "")
        for label in labels
    )

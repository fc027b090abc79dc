"""Explains one sampled request: the passages served and dropped, and why. Reads the store."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from ctxguard._support.words import count
from ctxguard.core.decision import Decision, decide, decide_with_answers
from ctxguard.core.types import CandidateDecision, Flag, Mode
from ctxguard.monitor.judges import Judgment
from ctxguard.monitor.labels.human import standing
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import LabelRow, SampleStore, State, StoredSample
from ctxguard.profile.describe import FLAGS, REASONS, describe_policy, threshold_in_words
from ctxguard.profile.schema import Profile

_STATES = {
    State.PENDING: "waits to be judged",
    State.JUDGED: "judged by {series}",
    State.INCOMPLETE: "left out: passages got no grade, or the judge does not know the question",
    State.UNREADABLE: "left out",
    State.SKIPPED: "left out at random to stay within the judging budget: others represent it",
    State.FORCED: "added by hand: never judged, and used in no estimate",
}


@dataclass(frozen=True, slots=True)
class ExplainedCandidate:
    """A candidate and everything known about it.

    Attributes:
        title, text: The passage's; empty if it has none, or none is stored.
        rank: Rank in the retriever's own order, from 1.
        score: The score that decided; None where it is not a number.
        legs: The score of each stage, by its name.
        signals: The stored signals, by name.
        outcome: ``served``, ``dropped``, or ``unusable`` without a score that can be compared.
        enforced: In shadow, the policy's decision: ``kept`` or ``dropped``; else None.
        probability: P(relevant) by the profile; None without a model or a profile.
        reason: Why it was dropped, or in shadow would be; None where it was not, or that is not
            known.
        kept_if: The settings at which it would have been kept.
        judge: The judge's grade; None without one.
        labels: People's labels that were not taken back, in the order they were given.
    """

    passage_id: str
    title: str
    text: str
    rank: int
    score: float | None
    legs: Mapping[str, float | None]
    signals: Mapping[str, float | None]
    outcome: str
    enforced: str | None
    probability: float | None
    reason: str | None
    kept_if: tuple[str, ...]
    judge: Judgment | None
    labels: tuple[LabelRow, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One sample.

    Attributes:
        record: None where its text was deleted, or cannot be read.
        candidates: Served ones first, each best first.
        rejected: (passage id, reason, raw reply) of each reply that was no valid grade.
        picked: How many passages draws for labels ask about, by kind.
        decision: The profile's decision; None without a profile, or without a policy for the route.
        notes: Remarks on that decision.
    """

    stored: StoredSample
    record: SampleRecord | None
    candidates: tuple[ExplainedCandidate, ...] = ()
    rejected: tuple[tuple[str, str, str], ...] = ()
    picked: Mapping[str, int] = field(default_factory=dict)
    decision: Decision | None = None
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """How far the sample got, in words."""
        return state_in_words(self.stored, is_readable=self.record is not None)

    @property
    def is_in_shadow(self) -> bool:
        """Whether the request was served in shadow and the policy's decision is known."""
        return any(one.enforced for one in self.candidates)

    @property
    def would_drop(self) -> int:
        """Count the served passages that the policy would drop, in shadow."""
        return sum(one.outcome == "served" and one.enforced == "dropped" for one in self.candidates)

    def facts(self) -> list[tuple[str, str]]:
        """List the facts about the request as a whole, by name."""
        stored, record = self.stored, self.record
        facts = [
            ("request", stored.request_id),
            ("answered", time_in_words(stored.time_seconds)),
            ("sampled", f"with probability {stored.probability:.3g}"),
            ("state", self.state),
            ("labels", self._picked_in_words()),
        ]
        if record is None:
            facts.append(("text", "deleted to bound the store's size, or not readable"))
        else:
            candidates = count(len(record.passage_ids), "candidate")
            keeps = "would keep" if record.mode is Mode.SHADOW else "kept"
            facts[1:1] = [("query", record.query or "not stored")]
            facts += [
                ("route", record.route.value),
                ("mode", record.mode.value),
                ("profile", record.profile_id or "none"),
                ("session", record.session_id or ""),
                ("policy", f"{keeps} {record.kept} of {candidates}, served {len(record.served)}"),
                ("tokens", record.tokens.in_words),
                *[("flag", f"{flag}: {FLAGS[Flag(flag)]}") for flag in record.flags],
            ]
        if self.is_in_shadow:
            served = [one.passage_id for one in self.candidates if one.outcome == "served"]
            kept = [one.passage_id for one in self.candidates if one.enforced == "kept"]
            facts += [("served", ", ".join(served)), ("would keep", ", ".join(kept) or "none")]
        if self.decision is not None:
            facts.append(("keeps", describe_policy(self.decision.policy)))
        return [(name, text) for name, text in facts if text]

    def _picked_in_words(self) -> str:
        parts = [f"picked: {n} by {kind}" for kind, n in self.picked.items()]
        return ", ".join(parts) or "not picked for labels"


def explain_sample(
    store: SampleStore, stored: StoredSample, profile: Profile | None
) -> Explanation:
    """Collect everything the store knows about one sample.

    A profile decides again, which tells the reason of each drop.
    """
    sample_id = stored.sample_id
    record = store.records([sample_id]).get(sample_id)
    judge: dict[str, Judgment] = {}
    picked: Counter[str] = Counter()
    for series in store.series():
        # A later judge may have judged it again: the first judge's grades were the ones counted.
        judge = store.grades(series, [sample_id]).get(sample_id, {}) | judge
        of_sample = store.picked(series, [sample_id]).get(sample_id, [])
        picked.update(one.kind.value for one in of_sample)
    labels = [label for _, label in standing(store.labels([sample_id]))]
    decision, notes = (None, []) if record is None else decided(record, profile)
    return Explanation(
        stored=stored,
        record=record,
        candidates=() if record is None else tuple(candidates_of(record, decision, judge, labels)),
        rejected=store.rejected([sample_id]).get(sample_id, ()),
        picked=picked,
        decision=decision,
        notes=tuple(notes),
    )


def state_in_words(stored: StoredSample, *, is_readable: bool) -> str:
    """Say how far a sample got, and whether its record could be read."""
    words = _STATES[stored.state].format(series=stored.series)
    if stored.state is State.UNREADABLE and not stored.has_text:
        return f"{words}: its text was deleted before it was judged"
    if stored.state is State.UNREADABLE and not is_readable:
        return f"{words}: it cannot be read"
    return words


def time_in_words(time_seconds: float) -> str:
    """Write a time in UTC.

    >>> time_in_words(0.0)
    '1970-01-01 00:00:00 UTC'
    """
    return f"{datetime.fromtimestamp(time_seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def grade_in_words(judgment: Judgment | None) -> str:
    """Write a judge's grade; empty without one.

    >>> grade_in_words(Judgment("a", 2, None)), grade_in_words(None)
    ('2', '')
    """
    if judgment is None:
        return ""
    if not judgment.judged:
        return "no label"
    negative = judgment.negative
    return f"{judgment.grade}" + ("" if negative is None else f" {negative.value}")


def labels_in_words(labels: Sequence[LabelRow]) -> str:
    """Say who gave which grades.

    >>> labels_in_words([LabelRow("r", "a", 0, "distractor", "ann", 1.0)])
    'ann 0 distractor'
    """
    return ", ".join(
        f"{label.annotator} {label.grade}" + (f" {label.negative}" if label.negative else "")
        for label in labels
    )


def decided(record: SampleRecord, profile: Profile | None) -> tuple[Decision | None, list[str]]:
    """Decide on the candidates again with a profile; also return remarks on that decision."""
    if profile is None:
        return None, []
    route = profile.routes.get(record.route)
    if route is None:
        return None, [f"the profile has no policy for the route {record.route.value}"]
    ranking, asked, decision = record.ranking(), route.assessor, None
    if asked is not None and asked.decision == "enforce":
        decision = decide_with_answers(ranking, asked.policy, asked.name, asked.model)
    if decision is None:
        decision = decide(ranking, route.policy)
    notes = []
    if profile.profile_id != record.profile_id:
        then = record.profile_id or "none"
        notes.append(f"the reasons are those of profile {profile.profile_id}; then it was {then}")
    if decision.n_kept != record.kept:
        notes.append(f"this profile keeps {decision.n_kept}; then {record.kept} were kept")
    return decision, notes


def candidates_of(
    record: SampleRecord,
    decision: Decision | None,
    judge: Mapping[str, Judgment],
    labels: Sequence[LabelRow],
) -> list[ExplainedCandidate]:
    """Explain every candidate of a sample, served ones first, each best first.

    ``decision`` is that of ``decided``, and ``labels`` those that were not taken back.
    """
    decided: dict[int, CandidateDecision] = {}
    if decision is not None:
        places = [*decision.order, *(place for place, _ in decision.set_aside)]
        decided = dict(zip(places, decision.decisions, strict=True))
    served, pool = set(record.served), {*record.served, *record.dropped}
    in_shadow = decision is not None and record.mode is Mode.SHADOW
    kept = set(decision.kept) if decision is not None else set()
    unusable = [place for place in range(len(record.passage_ids)) if place not in pool]
    found = []
    for place in (*record.served, *record.dropped, *unusable):
        name, passage = record.passage_ids[place], record.passage(place)
        is_served = place in served
        own = decided.get(place)
        is_kept = place in kept if in_shadow else is_served
        why, kept_if = (None, ()) if is_kept else _reason(own)
        outcome = "served" if is_served else "dropped" if place in pool else "unusable"
        found.append(
            ExplainedCandidate(
                passage_id=name,
                title=passage.title,
                text=passage.text,
                rank=place + 1,
                score=_finite(record.scores[place]),
                legs={leg: _finite(own.scores[place]) for leg, own in record.legs.items()},
                signals={each: _finite(own[place]) for each, own in record.signals.items()},
                outcome=outcome,
                enforced=("kept" if is_kept else "dropped") if in_shadow else None,
                probability=None if own is None else own.probability,
                reason=why,
                kept_if=kept_if,
                judge=judge.get(name),
                labels=tuple([label for label in labels if label.passage_id == name]),
            )
        )
    return found


def _reason(found: CandidateDecision | None) -> tuple[str | None, tuple[str, ...]]:
    """Say why a candidate was not served, and which settings would have kept it."""
    if found is None:
        return None, ()
    if found.reason is None:
        return "kept by the policy, but then a duplicate, over the budget, or unreadable", ()
    return REASONS[found.reason], tuple(map(threshold_in_words, found.kept_if))


def _finite(score: float) -> float | None:
    return float(score) if math.isfinite(score) else None

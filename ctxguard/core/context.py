"""The context: the guard's answer to one query, with a record of the passages left out.

``ctxguard.core.assembly`` chooses the passages and ``ctxguard.core.render`` renders them. Pure: no
I/O, no clock, no logging.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from ctxguard.core.assembly import DEFAULT_ASSEMBLY, Assembly
from ctxguard.core.decision import Decision
from ctxguard.core.metadata_filter import Where
from ctxguard.core.render import LONE_SURROGATE
from ctxguard.core.types import (
    DEFAULT_K,
    AssemblyDrop,
    CandidateDecision,
    DropReason,
    Flag,
    Mode,
    Passage,
    Route,
    StageFailure,
    listed,
)
from ctxguard.core.value_of_information import Assessment


@dataclass(frozen=True, eq=False, repr=False)
class Context:
    """The guard's answer to one query. Instances compare by identity.

    Mode ``enforce`` serves the passages that the decision and assembly kept. ``shadow`` serves the
    bare retriever's top k, with the decisions that ``enforce`` would give. ``off`` serves the bare
    top k too, and decides nothing.

    Attributes:
        passages: In presentation order, with their texts as the retriever gave them (except one
            that ``truncate`` cut): only ``text`` is sanitised.
        decision: On the whole ranking.
        failures: Stages that were left out, and failures during assembly.
        differences: How the system that answered differs from the one that the profile was
            calibrated on, one readable line each.
        p_sufficient: P(relevant) of the best passage that the decision kept;
            0.0 if it kept none. None if it was not calibrated for the policy, or could not be
            computed.
        sufficient: Whether ``p_sufficient`` reaches the certified threshold; None if either is
            missing.
        today_k: Number of passages that the bare retriever serves, the baseline of savings.
        assessment: The assessor's questions and answers about the candidates; None if it was not
            asked.
        enforced: Whether a policy, calibrated or set by hand, chose the served passages; otherwise
            they are the first of the list.
    """

    request_id: str
    query: str
    route: Route
    mode: Mode
    passages: tuple[Passage, ...]
    decision: Decision
    dropped_in_assembly: tuple[AssemblyDrop, ...] = ()
    flags: tuple[Flag, ...] = ()
    failures: tuple[StageFailure, ...] = ()
    assembly: Assembly = DEFAULT_ASSEMBLY
    session_id: str | None = None
    profile_id: str | None = None
    differences: tuple[str, ...] = ()
    p_sufficient: float | None = None
    sufficient: bool | None = None
    where: Where | None = None
    today_k: int = DEFAULT_K
    assessment: Assessment | None = None
    enforced: bool = True

    def __len__(self) -> int:
        return len(self.passages)

    def __repr__(self) -> str:
        dropped = {str(reason): count for reason, count in self.dropped_by_reason.items()}
        # Neither the query nor a text: printed objects end in logs and error trackers.
        return (
            f"Context(request_id={self.request_id!r}, route={self.route.value!r}, "
            f"mode={self.mode.value!r}, "
            f"passages={listed([passage.passage_id for passage in self.passages])}, "
            f"candidates={self.candidates}, dropped={dropped}, "
            f"flags=[{', '.join(self.flags)}], "
            f"failures=[{', '.join(failure.stage for failure in self.failures)}])"
        )

    @property
    def empty(self) -> bool:
        return not self.passages

    @cached_property
    def text(self) -> str:
        """The text to give to the model: rendered, sanitised, delimiters escaped."""
        insufficient = self.mode is Mode.ENFORCE and (self.sufficient is False or self.empty)
        return self.assembly.render(self.passages, insufficient=insufficient)

    @property
    def served_ids(self) -> tuple[str, ...]:
        """Ids of the served passages, in presentation order."""
        return tuple([passage.passage_id for passage in self.passages])

    @property
    def kept_ids(self) -> tuple[str, ...]:
        """Ids of the served passages, best first."""
        return self.would_keep_ids if self.mode is Mode.ENFORCE else self.served_ids

    @cached_property
    def would_keep_ids(self) -> tuple[str, ...]:
        """Ids of the passages that both the decision and assembly kept, best first.

        In shadow, ``enforce`` would have served these in place of ``served_ids``.
        """
        out = {drop.position for drop in self.dropped_in_assembly}
        ids = self.decision.ranking.passage_ids
        return tuple([ids[position] for position in self.decision.kept if position not in out])

    @property
    def candidates(self) -> int:
        """Number of candidates that the retriever returned."""
        return len(self.decision.ranking)

    @cached_property
    def dropped_by_reason(self) -> dict[DropReason, int]:
        """Number of candidates dropped for each reason; with the kept ones they add up to all."""
        counts = dict(self.decision.dropped_by_reason)
        for drop in self.dropped_in_assembly:
            counts[drop.reason] = counts.get(drop.reason, 0) + 1
        return counts

    @cached_property
    def decisions(self) -> tuple[CandidateDecision, ...]:
        """The decision on each candidate; passages that assembly dropped are marked as dropped."""
        if not self.dropped_in_assembly:
            return self.decision.decisions
        drops = {drop.position: drop for drop in self.dropped_in_assembly}
        found = [*self.decision.decisions]
        for index, position in enumerate(self.decision.kept):
            if drop := drops.get(position):
                found[index] = found[index]._replace(reason=drop.reason, kept_if=drop.kept_if)
        return tuple(found)

    def to_dict(self) -> dict[str, object]:
        """Return the answer and its record, ready for JSON.

        A number that JSON cannot represent is None. The ranking's columns (legs, texts of passages
        not served) are left out: read them from ``decision``.
        """
        return {
            name: _json_ready(value)
            for name, value in {
                "request_id": self.request_id,
                "session_id": self.session_id,
                "query": self.query,
                "route": self.route,
                "mode": self.mode,
                "profile_id": self.profile_id,
                "sufficient": self.sufficient,
                "p_sufficient": self.p_sufficient,
                "flags": self.flags,
                "differences": self.differences,
                "failures": [asdict(each) for each in self.failures],
                "text": self.text,
                "candidates": self.candidates,
                "kept_ids": self.kept_ids,
                "would_keep_ids": self.would_keep_ids,
                "dropped": self.dropped_by_reason,
                "passages": [
                    {
                        "passage_id": passage.passage_id,
                        "title": passage.title,
                        "text": passage.text,
                        "metadata": _readable(passage.metadata),
                    }
                    for passage in self.passages
                ],
                "decisions": [
                    {
                        **candidate._asdict(),
                        "kept": candidate.kept,
                        "kept_if": [each._asdict() for each in candidate.kept_if],
                    }
                    for candidate in self.decisions
                ],
            }.items()
        }


def _readable(metadata: object) -> object:
    """Convert metadata for JSON; None if it cannot be read."""
    try:
        return _json_ready(metadata)
    except Exception:
        return None


def _json_ready(value: object) -> object:
    """Convert a value to portable JSON: no NaN, no lone surrogate, no foreign type."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        # Strict readers refuse the escape of half a surrogate pair.
        return LONE_SURROGATE.sub("\ufffd", str.__str__(value))
    if isinstance(value, Mapping):
        return {str(_json_ready(str(key))): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return _json_ready(str(value))
    return number if math.isfinite(number) else None

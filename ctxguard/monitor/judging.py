"""From a sampled request to what the estimates need of it: the verdicts, reduced.

All served passages are judged, and dropped ones with the probabilities that the record holds
(DESIGN.md §8). A verdict that is missing, misplaced or out of range is counted and never imputed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ctxguard.errors import ConfigurationError
from ctxguard.metrics import Utilities, strict_utilities
from ctxguard.monitor.chance import Chance
from ctxguard.monitor.estimates import JudgedRequest
from ctxguard.monitor.judges import Judge, Judgment
from ctxguard.monitor.records import Record
from ctxguard.types import Passage

PassageLookup = Callable[[str], Passage]
"""The passage of an id; raises where there is none."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one sample.

    Attributes:
        request: None where a served passage got no valid verdict: the sample is left out.
        verdicts: The valid ones by passage id, in the order in which they were asked for.
        asked: Passages that a verdict was wanted of.
        invalid: Those among them without a valid one, unreadable passages included.
    """

    request: JudgedRequest | None
    verdicts: Mapping[str, Judgment]
    asked: int
    invalid: int


class Audit:
    """What the retriever itself missed: a search as deep as can be, for a few requests.

    Args:
        search: The ids that an exhaustive search, or a much deeper one, finds for a query, best
            first; ``depth`` of them.
        probability: That a judged request is audited, in [0, 1]. Each costs a deep search.
        depth: How deep, > 0.
        judged: The probability with which each passage beyond the pool is judged, in (0, 1].
        seed: Of the choices.

    Raises:
        ConfigurationError: a rate or a depth out of range.
    """

    def __init__(
        self,
        search: Callable[..., Sequence[str]],
        *,
        probability: float = 0.02,
        depth: int = 1000,
        judged: float = 0.05,
        seed: str = "",
    ) -> None:
        if depth < 1:
            raise ConfigurationError(f"audit depth {depth!r} must be at least 1")
        if not 0.0 < judged <= 1.0:
            raise ConfigurationError(f"audit rate judged {judged!r} must lie in (0, 1]")
        self.probability = probability
        self.judged = judged
        self._search = search
        self._depth = depth
        self._chosen = Chance(probability, purpose="audit", seed=seed)
        self._passage = Chance(judged, purpose="audited passage", seed=seed)

    def missed(self, asked: int, verdicts: Sequence[Judgment]) -> float | None:
        """How many relevant passages lie beyond the pool, estimated from those judged."""
        if not verdicts:
            return None if asked else 0.0
        # Those with a verdict stand for those without.
        relevant = sum(verdict.grade > 0 for verdict in verdicts)
        return relevant * asked / len(verdicts) / self.judged

    def passage_ids(self, record: Record) -> list[str] | None:
        """Those beyond the pool that are to be judged; None for a request that is not audited."""
        if record.query is None or not self._chosen.chooses(record.request_id):
            return None
        known = set(record.passage_ids)
        found = self._search(record.query, depth=self._depth)
        return [
            passage_id
            for passage_id in dict.fromkeys(found)
            if passage_id not in known
            and self._passage.chooses(f"{record.request_id}\0{passage_id}")
        ]


class Judging:
    """Has samples judged.

    Args:
        judge: Who grades passages.
        utilities: What a passage is worth; every served passage that is not relevant costs.
        lookup: Where the texts of passages are found that were not stored; None where all are.
        audit: What the retriever missed; None for no audit.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        utilities: Utilities,
        lookup: PassageLookup | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.judge = judge
        self.utilities = utilities
        self.audit = audit
        self._lookup = lookup
        self._reads = getattr(judge, "reads_text", True)

    def __call__(self, record: Record, probability: float | None = None) -> Judged:
        """Judge one sample; raises whatever the judge raises.

        Args:
            record: The sample.
            probability: With which it was sampled and then taken up for judging; None for the
                sampling alone.
        """
        verdicts = self._verdicts(record, record.served)
        asked = len(record.served)
        if len(verdicts) < asked:
            return Judged(None, verdicts, asked, asked - len(verdicts))
        answered = any(verdict.grade > 0 for verdict in verdicts.values())
        chosen = record.to_judge(answered=answered)
        verdicts |= self._verdicts(record, chosen)
        beyond, found = self._audited(record)
        asked += len(chosen) + len(beyond or ())
        request = judged_request(
            record,
            verdicts,
            utilities=self.utilities,
            max_grade=self.judge.max_grade,
            probability=probability,
        )
        if self.audit is not None and beyond is not None:
            request = replace(
                request,
                missed_relevant=self.audit.missed(len(beyond), found),
                audit_probability=self.audit.probability,
            )
        return Judged(request, verdicts, asked, asked - len(verdicts) - len(found))

    def _audited(self, record: Record) -> tuple[list[str] | None, list[Judgment]]:
        """The passages beyond the pool that were asked about, and their verdicts."""
        beyond = None if self.audit is None else self.audit.passage_ids(record)
        passages = [
            self._read(passage_id) if self._reads else Passage(passage_id, "")
            for passage_id in beyond or ()
        ]
        return beyond, list(self._graded(record, passages).values())

    def _read(self, passage_id: str) -> Passage | None:
        try:
            return None if self._lookup is None else self._lookup(passage_id)
        except Exception:
            return None

    def _verdicts(self, record: Record, positions: Sequence[int]) -> dict[str, Judgment]:
        return self._graded(record, [self._passage(record, position) for position in positions])

    def _passage(self, record: Record, position: int) -> Passage | None:
        passage = record.passage(position)
        if passage.text or passage.title or not self._reads:
            return passage
        return self._read(passage.passage_id)

    def _graded(self, record: Record, wanted: Sequence[Passage | None]) -> dict[str, Judgment]:
        """The valid verdicts: not those missing, misplaced or out of range."""
        passages = [passage for passage in wanted if passage is not None]
        if not passages or record.query is None:
            return {}
        verdicts = self.judge.judge(record.query, passages)
        if len(verdicts) != len(passages):
            return {}
        highest = self.judge.max_grade
        return {
            passage.passage_id: verdict
            for verdict, passage in zip(verdicts, passages, strict=True)
            if verdict is not None
            and verdict.passage_id == passage.passage_id
            and isinstance(verdict.grade, int)
            and 0 <= verdict.grade <= highest
        }


def judged_request(
    record: Record,
    verdicts: Mapping[str, Judgment],
    *,
    utilities: Utilities,
    max_grade: int,
    probability: float | None = None,
) -> JudgedRequest:
    """What the verdicts on a sample say, reduced to what the estimates need.

    Args:
        record: The sample; every served passage needs a verdict.
        verdicts: By passage id.
        utilities: What a passage is worth.
        max_grade: The highest that the judge gives.
        probability: With which it was sampled and then taken up; None for the sampling alone.

    Raises:
        KeyError: a served passage without a verdict.
    """
    rates, ids = record.rates, record.passage_ids
    of_served = [verdicts[ids[position]] for position in record.served]
    grades = tuple([verdict.grade for verdict in of_served])
    answered = any(grade > 0 for grade in grades)
    chosen = record.to_judge(answered=answered)
    of_chosen = [verdicts.get(ids[position]) for position in chosen]
    certain = not record.dropped or rates.dropped == 1.0
    pool_probability = 1.0 if certain else rates.pool if answered else rates.unanswered_pool
    in_baseline = set(record.in_baseline)

    # A dropped passage is judged if its whole pool is, if the first few are and it is one of
    # them, or if it is picked by itself.
    alone = pool_probability + (1.0 - pool_probability) * rates.dropped
    among_first = alone + (1.0 - alone) * rates.baseline
    relevant, weighted, missing = 0, 0.0, 0
    for position, verdict in zip(chosen, of_chosen, strict=True):
        if verdict is None:
            missing += 1
        elif verdict.grade > 0:
            relevant += 1
            weighted += 1.0 / (among_first if position in in_baseline else alone)
    share = 1.0 - missing / len(chosen) if chosen else 1.0
    whole = certain or record.whole or (record.whole_if_unanswered and not answered)
    found = sum(grade > 0 for grade in grades) + relevant
    observed = alone > 0.0 and share > 0.0
    return JudgedRequest(
        probability=record.probability if probability is None else probability,
        grades=grades,
        utilities=tuple(
            strict_utilities(
                list(grades),
                top_grade=max_grade,
                negatives=[verdict.negative for verdict in of_served],
                utilities=utilities,
            )
        ),
        # Those with a verdict stand for those without.
        dropped_relevant=weighted / share if observed else None,
        dropped_probability=alone * share,
        pool_relevant=found if whole and not missing else None,
        pool_found=found if whole and missing else None,
        pool_probability=pool_probability,
        unanswered_probability=1.0 if certain else rates.unanswered_pool,
        session_id=record.session_id,
        recall_loss=_recall_loss(record, verdicts) if record.baseline or record.whole else None,
    )


def _recall_loss(record: Record, verdicts: Mapping[str, Judgment]) -> float | None:
    """Share of the relevant among the retriever's first few that was not served.

    Asked of requests that were chosen whatever was served: those whose pool was judged because
    nothing relevant was served would make the loss look larger.
    """
    served = set(record.served)
    kept = lost = 0
    for position in record.in_baseline:
        verdict = verdicts.get(record.passage_ids[position])
        if verdict is None:
            return None
        if verdict.grade > 0:
            kept += position in served
            lost += position not in served
    return lost / (kept + lost) if kept + lost else None

"""Asks an assessor, as a stage, about candidates whose answers can change the context.

Like every stage it has a deadline, bounded threads and a circuit breaker, and also a cache of calls
and a budget. It asks in one call about the candidates whose value exceeds the price, limited per
request and per second. If it is absent or fails, the route's own decision applies.

A model reads all texts of a call, and one text may tell it how to rate the others. So an answer
depends on its whole call, and is reused only for the same query, texts and filter. Calls the
assessor, on threads, and the redactor; reads the texts, and the monotonic clock.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxguard._support.checks import check_positive
from ctxguard._support.error_text import drop_tracebacks
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.decision import Decision
from ctxguard.core.metadata_filter import Where
from ctxguard.core.passages import read_passages
from ctxguard.core.types import FloatArray, PassageSource, StageFailure
from ctxguard.core.value_of_information import ASSESS, DEFAULT_PER_SECOND, Assessment, to_ask
from ctxguard.errors import StageError
from ctxguard.guard.wrapped_retriever import call_if
from ctxguard.profile.schema import AssessorProfile
from ctxguard.resilience.stage import Stage, attempt, failure_of

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import Assessor

_MAX_PASSAGE_CHARS = 200_000
"""The longest passage that is asked about."""

_WORKERS = 16
_CACHE_SECONDS = 3_600.0
_CACHE_ENTRIES = 5_000
"""How many calls' answers are kept, at a few thousand bytes each."""

_Answers = tuple[Mapping[str, FloatArray], FloatArray]
"""The answers to one call, by name (NaN for a refusal), and the texts' places in the call.

Shape (texts,) each, in the order of the sorted texts.
"""


class Question(NamedTuple):
    """The question that an assessor is asked about one request.

    Attributes:
        texts: In the order of the call.
        positions: Positions of the texts in the ranking.
        key: A digest of everything in the call, and of the request's filter.
        known: The answers of an equal call a short while ago; None without one.
        n: Number of candidates in the ranking.
        over_budget: Candidates worth asking about that were left out.
    """

    query: str
    texts: Sequence[str]
    positions: Sequence[int]
    key: bytes
    known: _Answers | None
    n: int
    over_budget: int


class AssessorStage:
    """Asks an assessor within a deadline and a budget.

    Args:
        assessor: Answers questions about several candidates in one call.
        deadline_seconds: Longest wait for a call, > 0; after it the decision is made without an
            answer.
        max_per_second: Most candidates asked about per second, over all requests of this process, >
            0; also the size of a burst. Calibration, which asks once, sets a high limit.
        redact: Applied to the query and the texts before they are sent; a text that cannot be
            redacted is not sent. None sends them unchanged.

    Raises:
        ConfigurationError: a setting is out of range.
    """

    def __init__(
        self,
        assessor: "Assessor",
        *,
        deadline_seconds: float = 2.0,
        max_per_second: float = DEFAULT_PER_SECOND,
        redact: Callable[[str], str] | None = None,
    ) -> None:
        check_positive(deadline_seconds=deadline_seconds, max_per_second=max_per_second)
        self.assessor = assessor
        self._seconds = deadline_seconds
        self._per_second = max_per_second
        self._redact = redact
        self._stage = Stage(ASSESS, workers=_WORKERS)
        self.watch = self._stage.watch
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        self._lock = Lock()
        # The call that was used last is the last.
        self._cache: dict[bytes, tuple[float, _Answers]] = {}
        self._left = self._per_second
        self._filled_at = monotonic()
        self._cost = 0.0

    @property
    def fingerprint(self) -> str:
        return self.assessor.fingerprint

    def close(self) -> None:
        """Close the assessor's connections; asking again opens new ones."""
        call_if(self.assessor, "close")

    def question(
        self,
        request_id: str,
        query: str,
        decision: Decision,
        profile: AssessorProfile,
        *,
        where: Where | None = None,
    ) -> Question | None:
        """Choose the candidates that are worth asking about; None if none is.

        ``decision`` is the one that the profile's policy makes before any answer. The request's id
        shuffles the candidates, because a model may favour a place in the call.
        """
        probabilities, policy = decision.probabilities, profile.policy
        if probabilities is None:
            return None
        # They are best first: those beyond k and `first` only count as what may move up.
        values = profile.model.values(
            np.asarray(probabilities), policy.k, policy.min_probability, profile.first
        )
        chosen = to_ask(values, profile.price, profile.first).tolist()
        if not chosen:
            return None
        positions = [decision.order[index] for index in chosen]
        passages = decision.ranking.passages
        n = len(decision.ranking)
        return self.about(request_id, query, passages, positions, n, where=where)

    def about(
        self,
        request_id: str,
        query: str,
        passages: PassageSource,
        positions: Sequence[int],
        n: int,
        *,
        where: Where | None = None,
    ) -> Question | None:
        """Ask about these candidates of n, the most valuable first; None if none can be.

        The request's id seeds their order; with its filter, two tenants never share an answer.
        """
        read = read_passages(passages, positions, _MAX_PASSAGE_CHARS)
        texts = [
            f"{each.title}\n{each.text}" if each.title else each.text for each in read.passages
        ]
        sendable = self._sendable(query, list(zip(texts, read.positions, strict=True)))
        if sendable is None:
            return None
        query, asked = sendable
        texts = [text for text, _ in asked]
        key = self._key(query, texts, where)
        known = self._known(key)
        n_granted = len(texts) if known else self._granted(len(texts))
        over_budget = len(texts) - n_granted
        if not n_granted:
            return Question(query, (), (), b"", None, n, over_budget) if over_budget else None
        if over_budget:
            key = self._key(query, texts[:n_granted], where)
            known = self._known(key)
        asked = asked[:n_granted]
        Random(request_id.encode("utf-8", "surrogatepass")).shuffle(asked)  # noqa: S311  no secret depends on it
        return Question(
            query,
            [text for text, _ in asked],
            [position for _, position in asked],
            key,
            known,
            n,
            over_budget,
        )

    def ask(self, question: Question) -> Assessment:
        """Ask; never raises, and takes no longer than the deadline."""
        found: _Answers | StageFailure | None = question.known
        if found is None and question.texts:
            work = partial(self._answers, question)
            found = attempt(ASSESS, self._stage.call, work, self._seconds)
        return self._assessment(question, found)

    async def aask(self, question: Question) -> Assessment:
        """`ask` without blocking the event loop."""
        found: _Answers | StageFailure | None = question.known
        if found is None and question.texts:
            try:
                work = partial(self._answers, question)
                found = await self._stage.submit(work, self._seconds).aresult()
            except Exception as error:
                found = failure_of(ASSESS, error)
                drop_tracebacks(error)
        return self._assessment(question, found)

    def _sendable(
        self, query: str, texts: list[tuple[str, int]]
    ) -> tuple[str, list[tuple[str, int]]] | None:
        """Redact the query and the texts at these positions; leave out what cannot be redacted.

        None if the query cannot be.
        """
        redact = self._redact
        if redact is None:
            return query, texts
        sent = _redacted(redact, query)
        if sent is None:
            return None
        cleaned = [(_redacted(redact, text), position) for text, position in texts]
        return sent, [(text, position) for text, position in cleaned if text is not None]

    def _key(self, query: str, texts: Sequence[str], where: Where | None) -> bytes:
        digest = hashlib.blake2b(b"" if where is None else where.digest, digest_size=16)
        for part in (self.fingerprint, query, *sorted(texts)):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.digest()

    def _granted(self, n: int) -> int:
        """Take up to this many candidates from the per-second budget."""
        with self._lock:
            now = monotonic()
            gained = (now - self._filled_at) * self._per_second
            # A bucket of one second, and never less than one candidate.
            self._left = min(max(self._per_second, 1.0), self._left + gained)
            self._filled_at = now
            granted = min(n, int(self._left))
            self._left -= granted
        return granted

    def _known(self, key: bytes) -> _Answers | None:
        """Return the cached answers to a recent call."""
        with self._lock:
            expires_at, answers = self._cache.pop(key, (-math.inf, None))
            if answers is None or monotonic() >= expires_at:
                return None
            self._cache[key] = expires_at, answers
            return answers

    def _answers(self, question: Question) -> _Answers:
        """Call the assessor; raise a `StageError` if a number is missing for a text and name."""
        texts, n = question.texts, len(question.texts)
        answers = self.assessor.assess(question.query, texts)
        by_text, found = _order(texts), {}
        for name in self.assessor.names:
            try:
                values = np.asarray(answers[name], dtype=np.float64)
            except (KeyError, TypeError, ValueError):
                raise StageError(ASSESS, "the answers must be numbers by name") from None
            if values.shape != (n,):
                raise StageError(ASSESS, f"{values.shape} answers to {n} candidates")
            found[name] = np.where(np.isfinite(values), values, np.nan)[by_text]
        return found, _places(n)[by_text]

    def _assessment(self, question: Question, found: _Answers | StageFailure | None) -> Assessment:
        """Place the answers in the ranking, and keep new ones for equal calls later."""
        failure, found = (found, None) if isinstance(found, StageFailure) else (None, found)
        asked, n_answered = len(question.positions), 0
        columns = {name: np.full(question.n, np.nan) for name in self.assessor.names}
        places = np.full(question.n, np.nan)
        if found is None:
            places[[*question.positions]] = _places(asked)
        else:
            answers, own_places = found
            positions = np.asarray(question.positions)[_order(question.texts)]
            places[positions] = own_places
            for name, values in answers.items():
                columns[name][positions] = values
            n_answered = int(np.isfinite([*answers.values()]).any(axis=0).sum())
            if n_answered and question.known is None:
                with self._lock:
                    self._cache[question.key] = monotonic() + _CACHE_SECONDS, found
                    while len(self._cache) > _CACHE_ENTRIES:
                        self._cache.pop(next(iter(self._cache)))
        return Assessment(
            columns,
            places,
            asked,
            cached=0 if question.known is None else n_answered,
            refused=asked - n_answered,
            over_budget=question.over_budget,
            cost=self._spent(),
            failure=failure,
        )

    def _spent(self) -> float:
        """Return the cost since the last such call; exact in total, but not for each request."""
        ledger = getattr(self.assessor, "ledger", None)
        cost = None if ledger is None else ledger.accounts().cost
        if cost is None:
            return 0.0
        with self._lock:
            spent, self._cost = cost - self._cost, cost
        return float(spent)


def _redacted(redact: Callable[[str], str], text: str) -> str | None:
    try:
        return redact(text)
    except Exception:  # it is the caller's, and may raise anything
        return None


def _order(texts: Sequence[str]) -> list[int]:
    return sorted(range(len(texts)), key=texts.__getitem__)


def _places(n: int) -> FloatArray:
    """Return the places of n texts in a call, from −½ (first) to ½ (last)."""
    places: FloatArray = (np.arange(n) + 0.5) / max(n, 1) - 0.5
    return places

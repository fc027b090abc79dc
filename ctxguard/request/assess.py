"""The stage that asks an assessor about candidates whose answers can change the context.

It has what every stage has (deadline, bounded threads, circuit breaker), a cache of answers, and a
budget: candidates whose value exceeds the price, at most so many of a request and of a second, all
in one call. Without it, or where it fails, the policy that was calibrated decides alone.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from random import Random
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ctxguard._support.error_text import drop_tracebacks
from ctxguard._support.fork_safety import reset_in_children
from ctxguard.core.asking import ASSESS, Assessment, to_ask
from ctxguard.core.assembly import read_passages
from ctxguard.core.decision import Decision
from ctxguard.core.policies import ExpectedUtilityPolicy
from ctxguard.core.types import FloatArray, Passage, PassageSource
from ctxguard.errors import ConfigurationError, StageError
from ctxguard.profile.schema import AssessorProfile
from ctxguard.resilience import Stage, failure_of
from ctxguard.resilience.breaker import Watcher
from ctxguard.resilience.deadlines import check_seconds

if TYPE_CHECKING:
    from ctxguard.retrieval.protocols import Assessor

_MAX_PASSAGE_CHARS = 200_000
"""A longer passage is not asked about."""

_WORKERS = 16


class Question(NamedTuple):
    """What one request asks an assessor.

    Attributes:
        query: The query.
        texts: The texts, in the order of the call.
        positions: Their positions in the ranking.
        keys: Digests that identify query, text and assessor.
        n: How many candidates the ranking has.
        over_budget: Candidates worth asking about that were left out.
    """

    query: str
    texts: Sequence[str]
    positions: Sequence[int]
    keys: Sequence[bytes]
    n: int
    over_budget: int


class AssessorStage:
    """Asks an assessor within a deadline and a budget.

    Args:
        assessor: Answers questions about several candidates in one call.
        deadline_seconds: Longest wait for a call, > 0; the answer is then decided without it.
        max_per_second: Most candidates asked about a second, over all requests of this process,
            > 0; as many may be asked about at once. None for no such limit.
        cache_entries: Answers that are kept, ≥ 0; a few hundred bytes each.
        redact: Applied to the query and the texts before they are sent; what cannot be redacted is
            not sent. None sends them as they are.
        clock: Monotonic seconds.

    Raises:
        ConfigurationError: a setting is out of range.
    """

    def __init__(
        self,
        assessor: "Assessor",
        *,
        deadline_seconds: float = 2.0,
        max_per_second: float | None = None,
        cache_entries: int = 50_000,
        redact: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_seconds("deadline_seconds", deadline_seconds)
        if max_per_second is not None and not 0.0 < max_per_second < math.inf:
            raise ConfigurationError(f"max_per_second {max_per_second!r} must be finite and > 0")
        if cache_entries < 0:
            raise ConfigurationError(f"cache_entries {cache_entries!r} must be at least 0")
        self.assessor = assessor
        self._seconds = deadline_seconds
        self._per_second = max_per_second
        self._cache_entries = cache_entries
        self._redact = redact
        self._clock = clock
        self._stage = Stage(ASSESS, workers=_WORKERS)
        self._reset_after_fork()
        reset_in_children(self)

    def _reset_after_fork(self) -> None:
        self._lock = Lock()
        self._cache: OrderedDict[bytes, Mapping[str, float]] = OrderedDict()
        self._left = self._per_second or 0.0
        self._filled_at = self._clock()
        self._cost = 0.0

    @property
    def fingerprint(self) -> str:
        """The assessor's."""
        return self.assessor.fingerprint

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` when the assessor's circuit opens or closes."""
        self._stage.watch(watcher)

    def close(self) -> None:
        """Close the assessor's connections; asking again opens new ones."""
        close = getattr(self.assessor, "close", None)
        if close is not None:
            close()

    def question(
        self, request_id: str, query: str, decision: Decision, profile: AssessorProfile
    ) -> Question | None:
        """Choose the candidates that are worth asking about; None if none is.

        Their order in the call is drawn by the request's id: a model may favour a place.
        """
        chances = decision.probabilities
        if chances is None or profile.model.effect == 0.0:
            return None
        policy = cast(ExpectedUtilityPolicy, decision.policy)
        # They are best first: those beyond k and `first` only count as what may move up.
        values = profile.model.values(
            np.asarray(chances), policy.k, policy.min_probability, profile.first
        )
        chosen = to_ask(values, profile.price, profile.first).tolist()
        if not chosen:
            return None
        positions = [decision.order[index] for index in chosen]
        return self.about(request_id, query, decision.ranking.passages, positions, len(values))

    def about(
        self,
        request_id: str,
        query: str,
        passages: PassageSource,
        positions: Sequence[int],
        n: int,
    ) -> Question | None:
        """Ask about these candidates, the most valuable first; None if none can be."""
        read = read_passages(passages, positions, _MAX_PASSAGE_CHARS)
        texts, taken = [_searchable(each) for each in read.passages], read.positions
        query, texts, taken = self._sendable(query, texts, taken)
        keys = [self._key(query, text) for text in texts]
        granted = self._granted([key not in self._cache for key in keys])
        over_budget = len(keys) - len(granted)
        if not granted:
            return Question(query, (), (), (), n, over_budget) if over_budget else None
        Random(request_id.encode("utf-8", "surrogatepass")).shuffle(granted)  # noqa: S311  no secret depends on it
        return Question(
            query,
            [texts[index] for index in granted],
            [taken[index] for index in granted],
            [keys[index] for index in granted],
            n,
            over_budget,
        )

    def ask(self, question: Question) -> Assessment:
        """Ask; never raises, and takes no longer than the deadline."""
        known, missing = self._known(question)
        if not missing:
            return self._assessment(question, known, None, len(known))
        try:
            answers = self._stage.call(self._work(question, missing), self._seconds)
        except Exception as error:
            return self._assessment(question, known, error, len(known))
        found = self._learned(question, known, missing, answers)
        return self._assessment(question, found, None, len(known))

    async def aask(self, question: Question) -> Assessment:
        """`ask` without blocking the event loop."""
        known, missing = self._known(question)
        if not missing:
            return self._assessment(question, known, None, len(known))
        try:
            call = self._stage.submit(self._work(question, missing), self._seconds)
            answers = await call.aresult()
        except Exception as error:
            return self._assessment(question, known, error, len(known))
        found = self._learned(question, known, missing, answers)
        return self._assessment(question, found, None, len(known))

    def _sendable(
        self, query: str, texts: list[str], positions: list[int]
    ) -> tuple[str, list[str], list[int]]:
        """Redact what is sent; leave out what cannot be redacted."""
        if self._redact is None:
            return query, texts, positions
        redacted = [_redacted(self._redact, text) for text in (query, *texts)]
        if redacted[0] is None:
            return "", [], []
        kept = [
            (text, position)
            for text, position in zip(redacted[1:], positions, strict=True)
            if text is not None
        ]
        return redacted[0], [text for text, _ in kept], [position for _, position in kept]

    def _key(self, query: str, text: str) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.fingerprint, query, text):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.digest()

    def _granted(self, costs: Sequence[bool]) -> list[int]:
        """Indices within the budget of a second, in order; what is cached costs nothing."""
        if self._per_second is None:
            return list(range(len(costs)))
        with self._lock:
            now = self._clock()
            gained = (now - self._filled_at) * self._per_second
            # A bucket of one second, and never less than one candidate.
            self._left = min(max(self._per_second, 1.0), self._left + gained)
            self._filled_at = now
            granted = []
            for index, costs_one in enumerate(costs):
                if costs_one and self._left < 1.0:
                    continue
                self._left -= costs_one
                granted.append(index)
        return granted

    def _known(self, question: Question) -> tuple[dict[int, Mapping[str, float]], list[int]]:
        """Answers from the cache by index, and the indices without one."""
        known = {}
        with self._lock:
            for index, key in enumerate(question.keys):
                if (answer := self._cache.get(key)) is not None:
                    self._cache.move_to_end(key)
                    known[index] = answer
        return known, [index for index in range(len(question.keys)) if index not in known]

    def _work(self, question: Question, missing: list[int]) -> Callable[[], Any]:
        texts = [question.texts[index] for index in missing]
        n = len(texts)

        def assess() -> Mapping[str, FloatArray]:
            answers = self.assessor.assess(question.query, texts)
            found = {}
            for name in self.assessor.names:
                try:
                    values = np.asarray(answers[name], dtype=np.float64)
                except (KeyError, TypeError, ValueError):
                    raise StageError(ASSESS, "the answers are no numbers by name") from None
                if values.shape != (n,):
                    raise StageError(ASSESS, f"{values.shape} answers to {n} candidates")
                found[name] = np.where(np.isfinite(values), values, np.nan)
            return found

        return assess

    def _learned(
        self,
        question: Question,
        known: dict[int, Mapping[str, float]],
        missing: list[int],
        answers: Mapping[str, FloatArray],
    ) -> dict[int, Mapping[str, float]]:
        """All answers by index; new ones are kept, but for refusals."""
        columns = {name: values.tolist() for name, values in answers.items()}
        found = dict(known)
        with self._lock:
            for row, index in enumerate(missing):
                answer = {name: values[row] for name, values in columns.items()}
                if not any(map(math.isfinite, answer.values())):
                    continue
                found[index] = answer
                self._cache[question.keys[index]] = answer
            while len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
        return found

    def _assessment(
        self,
        question: Question,
        found: Mapping[int, Mapping[str, float]],
        error: Exception | None,
        cached: int,
    ) -> Assessment:
        asked, n = len(question.positions), question.n
        places = np.full(n, np.nan)
        if asked:
            places[list(question.positions)] = (np.arange(asked) + 0.5) / asked - 0.5
        answers = {}
        for name in self.assessor.names:
            values = np.full(n, np.nan)
            for index, answer in found.items():
                values[question.positions[index]] = answer[name]
            answers[name] = values
        failure = None
        if error is not None:
            failure = failure_of(ASSESS, error)
            drop_tracebacks(error)
        return Assessment(
            answers,
            places,
            asked,
            cached=cached,
            refused=asked - len(found),
            over_budget=question.over_budget,
            cost=self._spent(),
            failure=failure,
        )

    def _spent(self) -> float:
        """Cost since the last call of this: of all requests together it is exact."""
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


def _searchable(passage: Passage) -> str:
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text

"""Judges passages by a cross-encoder's or reranker's score: relevant from a threshold up.

Loads and runs a model, or touches the network.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from ctxguard.core.render import sanitise
from ctxguard.core.scores import logistic
from ctxguard.core.types import Passage, ScoreKind
from ctxguard.endpoints.failures import InvalidReason
from ctxguard.endpoints.forms import FORMS, RerankProtocol
from ctxguard.endpoints.rerank import RerankClient
from ctxguard.endpoints.usage import Ledger
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.redaction import redact
from ctxguard.monitor.sampling.record import Judgment
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.models.files import portable_name
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from ctxguard.retrieval.protocols import Reranker


class ScoreJudge:
    """Grades 1 if a model's score is at least ``min_score``, which is finite, else 0.

    Its grades repeat the model's errors, however many samples it grades. Check the model and the
    threshold against human labels, which also correct the estimates
    (``ctxguard.measure.corrected``). Scores are log-odds (``is_logit``), or from 0 to 1.
    """

    max_grade = 1
    _scorer: RerankClient | CrossEncoderReranker

    def __init__(self, min_score: float, *, is_logit: bool = True) -> None:
        if not math.isfinite(min_score):
            raise ConfigurationError(f"min_score {min_score!r} must be finite")
        self.min_score = float(min_score)
        self._is_logit = is_logit
        self.ledger = Ledger(redact=redact)

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        """Return one grade per passage, in their order; None if the score is not finite."""
        if not passages:
            return []
        # One lone surrogate would make the tokenizer refuse the whole batch.
        texts = [sanitise(searchable_text(passage)) for passage in passages]
        self.ledger.add(calls=1)
        scores = self._scorer.score(sanitise(query), texts).tolist()
        names = [passage.passage_id for passage in passages]
        return [self._judgment(name, score) for name, score in zip(names, scores, strict=True)]

    def _judgment(self, passage_id: str, score: float) -> Judgment | None:
        if not math.isfinite(score):
            self.ledger.add_invalid(passage_id, InvalidReason.NOT_FINITE, repr(score))
            return None
        p = float(logistic(score)) if self._is_logit else score
        return Judgment(passage_id, int(score >= self.min_score), score=min(max(p, 0.0), 1.0))


class RerankJudge(ScoreJudge):
    """Judges by a reranker on another server; the guard's own would only judge itself.

    Args:
        url, model, protocol, key, max_calls_per_second: As for ``RerankClient``.
        min_score: The lowest score of a relevant passage; None for a probability of one half.
        timeout_seconds: Time limit of the calls for one list of passages, > 0.

    Raises:
        ConfigurationError: a setting that cannot work.
        MissingExtraError: the extra ``rerank`` is not installed.
    """

    name = "reranker"

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        protocol: RerankProtocol = "cohere",
        key: str | None = None,
        min_score: float | None = None,
        max_calls_per_second: float | None = None,
        timeout_seconds: float = 30.0,
    ) -> None:
        self._client = self._scorer = RerankClient(
            url,
            protocol=protocol,
            key=key,
            model=model,
            timeout_seconds=timeout_seconds,
            max_calls_per_second=max_calls_per_second,
        )
        is_logit = FORMS[protocol].kind is ScoreKind.LOGIT
        if min_score is None:
            min_score = 0.0 if is_logit else 0.5
        super().__init__(min_score, is_logit=is_logit)
        self.version = f"{self._client.fingerprint} score>={min_score:g}"

    def close(self) -> None:
        """Close the connections; judging again opens new ones."""
        self._client.close()


class CrossEncoderJudge(ScoreJudge):
    """Grades 1 if a cross-encoder's logit is at least a threshold, else 0.

    The guard's own reranker would agree with its own ranking, so it is refused: its weights are
    compared, whatever its name. A call of its ``ledger`` is one list of passages.

    Args:
        name_or_path: A CrossEncoder with one output, by folder or hub name.
        min_score: The lowest logit of a relevant passage; 0 is a probability of one half for a
            model trained with a logistic loss.
        reranker: The guard's reranker; None without one.

    Raises:
        ConfigurationError: the weights are the reranker's own, the threshold is not finite, or
            the model cannot be loaded.
        MissingExtraError: the extra ``embedded`` is not installed.
    """

    name = "cross-encoder"

    def __init__(
        self, name_or_path: str | Path, *, min_score: float = 0.0, reranker: Reranker | None = None
    ) -> None:
        super().__init__(min_score)
        self._scorer = model = CrossEncoderReranker(name_or_path)
        name, _, weights = model.files
        if reranker is not None and weights in reranker.fingerprint:
            raise ConfigurationError(
                f"the cross-encoder {name!r} has the weights of the guard's own reranker "
                f"({reranker.fingerprint}), which cannot judge itself; use another model"
            )
        self.version = f"{portable_name(name)} {weights[:12]} logit>={min_score:g}"

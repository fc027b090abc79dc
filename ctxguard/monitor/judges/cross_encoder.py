"""A cross-encoder as judge, other than the guard's own reranker."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ctxguard.core.render import sanitise
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.judges.protocol import Judgment
from ctxguard.monitor.judges.usage import InvalidReason, Ledger
from ctxguard.retrieval.index.passages import searchable_text
from ctxguard.retrieval.models.files import model_folder, portable_name, weights_digest
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from ctxguard.retrieval.protocols import Reranker

if TYPE_CHECKING:
    from ctxguard.guard import ContextGuard


class CrossEncoderJudge:
    """Grades 1 if a cross-encoder's logit reaches a threshold, else 0.

    Its verdicts repeat the model's errors, however many samples it grades. Check the model and the
    threshold against human labels, which also correct the estimates
    (``ctxguard.monitor.estimation.ppi``).

    The guard's own reranker would agree with its own ranking, so it is refused: if ``reranker``
    or ``guard`` is given, its weights are compared, whatever its name. A call of its ``ledger`` is
    one list of passages.

    Args:
        name_or_path: A CrossEncoder with one output, by folder or hub name.
        min_logit: The lowest logit of a relevant passage; 0 is a probability of one half for a
            model trained with a logistic loss.
        reranker: The guard's reranker.
        guard: The guard whose traffic is judged.

    Raises:
        ConfigurationError: the weights are the reranker's own, the threshold is not finite, or
            the model cannot be loaded.
        MissingExtraError: the extra ``embedded`` is not installed.
    """

    name = "cross-encoder"
    max_grade = 1

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        min_logit: float = 0.0,
        reranker: Reranker | None = None,
        guard: "ContextGuard | None" = None,
    ) -> None:
        if not np.isfinite(min_logit):
            raise ConfigurationError(f"min_logit {min_logit!r} must be finite")
        self._model = CrossEncoderReranker(name_or_path)
        weights = weights_digest(model_folder(self._model.name))
        for used in _fingerprints(reranker, guard):
            if weights in used:
                raise ConfigurationError(
                    f"the cross-encoder {self._model.name!r} has the weights of the guard's own "
                    f"reranker ({used}), which cannot judge itself; take another model"
                )
        self.min_logit = float(min_logit)
        self.version = f"{portable_name(self._model.name)} {weights[:12]} logit>={min_logit:g}"
        self.ledger = Ledger()

    def judge(self, query: str, passages: Sequence[Passage]) -> list[Judgment | None]:
        """Return one verdict per passage, in their order; None if the logit is not finite."""
        if not passages:
            return []
        # One lone surrogate would make the tokenizer refuse the whole batch.
        texts = [sanitise(searchable_text(passage)) for passage in passages]
        self.ledger.add(calls=1)
        logits = self._model.score(sanitise(query), texts)
        return [
            self._verdict(passage, float(logit))
            for passage, logit in zip(passages, logits, strict=True)
        ]

    def _verdict(self, passage: Passage, logit: float) -> Judgment | None:
        if not np.isfinite(logit):
            self.ledger.add_invalid(passage.passage_id, InvalidReason.NOT_FINITE, repr(logit))
            return None
        self.ledger.add(verdicts=1)
        return Judgment(passage.passage_id, int(logit >= self.min_logit))


def _fingerprints(reranker: Reranker | None, guard: "ContextGuard | None") -> list[str]:
    """Return the fingerprints of the models that the guard uses, as far as they are known."""
    fingerprints = [] if reranker is None else [reranker.fingerprint]
    if guard is not None:
        own = getattr(guard.retriever, "fingerprint", None)
        fingerprints += map(str, own().values()) if callable(own) else []
        fingerprints += [] if guard.profile is None else guard.profile.fingerprint.values()
    return fingerprints

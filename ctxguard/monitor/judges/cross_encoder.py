"""A cross-encoder as judge, other than the guard's own reranker."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard.core.types import FloatArray
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.judges.scores import ScoreJudge
from ctxguard.retrieval.models.files import model_folder, portable_name, weights_digest
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from ctxguard.retrieval.protocols import Reranker

if TYPE_CHECKING:
    from ctxguard.guard import ContextGuard


class CrossEncoderJudge(ScoreJudge):
    """Grades 1 if a cross-encoder's logit reaches a threshold, else 0.

    The guard's own reranker would agree with its own ranking, so it is refused: if ``reranker``
    or ``guard`` is given, its weights are compared, whatever its name. A call of its ``ledger`` is
    one list of passages.

    Args:
        name_or_path: A CrossEncoder with one output, by folder or hub name.
        min_score: The lowest logit of a relevant passage; 0 is a probability of one half for a
            model trained with a logistic loss.
        reranker: The guard's reranker.
        guard: The guard whose traffic is judged.

    Raises:
        ConfigurationError: the weights are the reranker's own, the threshold is not finite, or
            the model cannot be loaded.
        MissingExtraError: the extra ``embedded`` is not installed.
    """

    name = "cross-encoder"

    def __init__(
        self,
        name_or_path: str | Path,
        *,
        min_score: float = 0.0,
        reranker: Reranker | None = None,
        guard: "ContextGuard | None" = None,
    ) -> None:
        super().__init__(min_score)
        self._model = CrossEncoderReranker(name_or_path)
        weights = weights_digest(model_folder(self._model.name))
        for used in _fingerprints(reranker, guard):
            if weights in used:
                raise ConfigurationError(
                    f"the cross-encoder {self._model.name!r} has the weights of the guard's own "
                    f"reranker ({used}), which cannot judge itself; take another model"
                )
        self.version = f"{portable_name(self._model.name)} {weights[:12]} logit>={min_score:g}"

    def scores(self, query: str, texts: Sequence[str]) -> FloatArray:
        """Return the model's logits."""
        return self._model.score(query, texts)


def _fingerprints(reranker: Reranker | None, guard: "ContextGuard | None") -> list[str]:
    """Return the fingerprints of the models that the guard uses, as far as they are known."""
    fingerprints = [] if reranker is None else [reranker.fingerprint]
    if guard is not None:
        own = getattr(guard.retriever, "fingerprint", None)
        fingerprints += map(str, own().values()) if callable(own) else []
        fingerprints += [] if guard.profile is None else guard.profile.fingerprint.values()
    return fingerprints

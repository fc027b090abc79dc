"""A scorer in place of a reranker's server."""

from collections.abc import Sequence

import numpy as np

from ctxguard.core.types import FloatArray


class LengthScores:
    """Scores each document by its length, the shorter the better."""

    fingerprint = "length"

    async def ascore(self, query: str, documents: Sequence[str], **_: object) -> FloatArray:
        return np.array([1.0 / (1.0 + len(document)) for document in documents])

    async def aclose(self) -> None:
        pass

"""Sketches a corpus: keeps enough of its passages' digests to tell how much has changed.

A sketch holds the k smallest digests of a corpus (a bottom-k sketch: Beyer et al., "On synopses
for distinct-value estimation under multiset operations", SIGMOD 2007; Cohen and Kaplan,
"Leveraging discarded samples for tighter estimation of multiple-set aggregates", SIGMETRICS 2009).
A digest behaves like a random number, so the passages with the smallest digests are a random sample
of the corpus, and corpora that share passages sample the same ones. Pure: no I/O, no clock, no
logging.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.types import Passage

SKETCH_SIZE = 1024
"""Digests in a sketch: shares are accurate to within 0.03, for 11 kB of a profile."""

DigestArray = NDArray[np.uint64]

_STORED = np.dtype("<u8")
_LARGEST = np.uint64(2**64 - 1)


def passage_digest(passage: Passage) -> int:
    """Hash the content of a passage (its id, title and text) to 64 bits."""
    content = json.dumps([passage.passage_id, passage.title, passage.text])
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest())


@dataclass(frozen=True)
class CorpusSketch:
    """The smallest digests of a corpus's passages; comparing two estimates how far corpora differ.

    Attributes:
        passages: Passages in the corpus.
        digests: The `SKETCH_SIZE` smallest digests, or all of a smaller corpus, ascending, as
            base64 of unsigned integers of 64 bits, least byte first.

    Raises:
        ValueError: ``digests`` has the wrong number of digests, or is not in this form.
    """

    passages: int
    digests: str

    def __post_init__(self) -> None:
        n, values = min(self.passages, SKETCH_SIZE), self._values
        if self.passages < 0 or values.size != n:
            raise ValueError(f"a sketch of {self.passages} passages holds {n} digests")
        if np.any(values[1:] < values[:-1]):
            raise ValueError("the digests of a sketch must be in ascending order")

    @classmethod
    def of(cls, digests: "Iterable[int] | DigestArray") -> "CorpusSketch":
        """Build the sketch of a corpus from the `passage_digest` of every passage, in any order."""
        values = np.asarray(
            digests if isinstance(digests, np.ndarray) else list(digests), dtype=np.uint64
        )
        smallest = values
        if values.size > SKETCH_SIZE:
            smallest = np.partition(values, SKETCH_SIZE - 1)[:SKETCH_SIZE]
        stored = np.sort(smallest).astype(_STORED).tobytes()
        return cls(values.size, base64.b64encode(stored).decode())

    def changed_share(self, other: "CorpusSketch") -> float:
        """Estimate the share of the larger corpus that is missing from the smaller one, in [0, 1].

        This is c = 1 − |A ∩ B| / max(|A|, |B|): the share of the present corpus that is new, or the
        share of the former one that is gone, whichever is larger. An edited passage counts as
        another passage. The result is the same in both directions.

        Both corpora are known up to the smaller of the two sketches' largest digests: a and b
        digests, of which i are shared. |A ∩ B| is estimated by i (|A| + |B|) / (a + b), and never
        as more than the smaller corpus. With J = i / (a + b − i), the standard error of c is (|A| +
        |B|) / max(|A|, |B|) / (1 + J)² · √(J (1 − J) / (a + b − i)), at most 0.014: two corpora are
        compared to within 0.03. If both have at most `SKETCH_SIZE` passages, it is exact.

        >>> half = CorpusSketch.of(range(500))
        >>> half.changed_share(CorpusSketch.of(range(1000)))
        0.5
        """
        smaller, larger = sorted((self.passages, other.passages))
        if larger == 0:
            return 0.0
        limit = min(self._limit, other._limit)
        these, those = (each._values[each._values <= limit] for each in (self, other))
        common: int = np.intersect1d(these, those, assume_unique=True).size
        estimate = common * (smaller + larger) / max(these.size + those.size, 1)
        return 1.0 - min(estimate, smaller) / larger

    @cached_property
    def _values(self) -> DigestArray:
        try:
            stored = base64.b64decode(self.digests, validate=True)
            return np.frombuffer(stored, dtype=_STORED).astype(np.uint64)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"the digests of a sketch cannot be read: {error}") from error

    @property
    def _limit(self) -> np.uint64:
        """The digest up to which the sketch holds the whole corpus."""
        return _LARGEST if self.passages <= SKETCH_SIZE else self._values[-1]

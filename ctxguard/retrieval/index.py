"""What a hybrid retriever searches: passages, both indexes, and the identity of the embedder.

An index never changes: adding and deleting make a new one that shares what stays.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxguard._extras import require
from ctxguard.errors import ConfigurationError, DataError, IndexFolderError
from ctxguard.fusion import Fusion
from ctxguard.retrieval import storage
from ctxguard.retrieval.dense import CODES, EXACT_LIMIT, DenseIndex, unit_rows
from ctxguard.retrieval.lexical import Bm25sIndex, LexicalEngine, build_lexical, load_lexical
from ctxguard.retrieval.passages import BuildReport, PassageTable, admit, searchable_text
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    LexicalHits,
    LexicalIndex,
    Progress,
    RowArray,
)
from ctxguard.types import Passage

if TYPE_CHECKING:
    from ctxguard.retrieval.kernels import FusionNumbers, United


@dataclass(frozen=True, slots=True)
class HybridIndex:
    """Passages with their lexical and dense index; row i is the same passage in all three.

    Attributes:
        engine: The lexical engine.
        embedder: The name of the model that made the vectors.
        embedder_weights: The digest of its weights.
        exact_limit: Passages above which the dense leg compares codes first.
        corpus_digest: sha256 over ids, titles and texts, whatever order they came in.
        report: What became of the passages given.
    """

    passages: PassageTable
    lexical: LexicalIndex
    dense: DenseIndex
    engine: LexicalEngine
    embedder: str
    embedder_weights: str
    exact_limit: int
    corpus_digest: str
    report: BuildReport

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        *,
        embedder: Embedder,
        engine: LexicalEngine = "bm25s",
        exact_limit: int = EXACT_LIMIT,
        progress: Progress | None = None,
    ) -> "HybridIndex":
        """Index passages in both legs.

        Raises:
            DataError: passages that cannot be indexed, or vectors that are no numbers.
            ConfigurationError: an unknown engine, or vectors of the wrong shape.
        """
        admitted, report = admit(passages)
        vectors = _encode(embedder, admitted, progress)
        return cls._of(
            admitted,
            vectors,
            engine=engine,
            embedder=embedder.name,
            embedder_weights=embedder.fingerprint(),
            exact_limit=exact_limit,
            report=report,
        )

    @classmethod
    def _of(
        cls,
        passages: Sequence[Passage],
        vectors: Float32Array,
        *,
        engine: LexicalEngine,
        embedder: str,
        embedder_weights: str,
        exact_limit: int,
        report: BuildReport,
    ) -> "HybridIndex":
        table = PassageTable.of(passages)
        return cls(
            passages=table,
            lexical=build_lexical(engine, map(searchable_text, passages)),
            dense=DenseIndex.build(vectors, exact_limit=exact_limit),
            engine=engine,
            embedder=embedder,
            embedder_weights=embedder_weights,
            exact_limit=exact_limit,
            corpus_digest=table.digest(),
            report=report,
        )

    def added(
        self,
        passages: Iterable[Passage],
        embedder: Embedder,
        progress: Progress | None = None,
    ) -> "HybridIndex":
        """An index with more passages; only the new ones are encoded.

        Raises:
            DataError: an id that is already there, and whatever ``build`` raises it for.
        """
        new, report = admit(passages)
        known = self.passages.row_of
        repeated = [passage.passage_id for passage in new if passage.passage_id in known]
        if repeated:
            raise DataError(
                f"{len(repeated)} of {len(new)} passages have the id of one in the index, first "
                f"{repeated[0]!r}; delete those first to replace them"
            )
        vectors = np.concatenate((self.dense.vectors, _encode(embedder, new, progress)))
        together = [*self.passages, *new]
        order = sorted(range(len(together)), key=lambda row: together[row].passage_id)
        return self._with(
            [together[row] for row in order],
            vectors[order],
            BuildReport(
                len(together),
                self.report.empty + report.empty,
                self.report.repaired + report.repaired,
            ),
        )

    def deleted(self, passage_ids: Iterable[str]) -> "HybridIndex":
        """An index without some passages.

        Raises:
            DataError: an id that is not in the index, or nothing would be left.
        """
        gone = set(passage_ids)
        unknown = sorted(gone - self.passages.row_of.keys())
        if unknown:
            raise DataError(
                f"{len(unknown)} of {len(gone)} passages to delete are not in the index, first "
                f"{unknown[0]!r}; nothing was deleted"
            )
        rows = [row for row, passage_id in enumerate(self.passages.ids) if passage_id not in gone]
        if not rows:
            raise DataError("deleting every passage would leave nothing to search")
        return self._with(
            [self.passages[row] for row in rows],
            self.dense.vectors[rows],
            BuildReport(len(rows), self.report.empty, self.report.repaired),
        )

    def _with(
        self, passages: Sequence[Passage], vectors: Float32Array, report: BuildReport
    ) -> "HybridIndex":
        return self._of(
            passages,
            vectors,
            engine=self.engine,
            embedder=self.embedder,
            embedder_weights=self.embedder_weights,
            exact_limit=self.exact_limit,
            report=report,
        )

    def check_embedder(self, embedder: Embedder) -> None:
        """Refuse an embedder other than the one that made the vectors.

        Raises:
            ConfigurationError: other weights: its queries would find the wrong passages silently.
        """
        weights = embedder.fingerprint()
        if weights != self.embedder_weights:
            raise ConfigurationError(
                f"the index was built with the embedder {self.embedder!r} (weights "
                f"{self.embedder_weights[:12]}…), not with {embedder.name!r} (weights "
                f"{weights[:12]}…); give that embedder, or build the index anew"
            )

    def search_both(
        self, query: str, vector: Float32Array, k: int, fusion: Fusion
    ) -> "United | None":
        """Both legs' searches, united in one compiled call; None where the engine has none.

        Several clients queue for the interpreter lock as often as it is given up: once here, or
        twice where codes are compared first.

        Args:
            query: What to search for.
            vector: Its unit vector.
            k: The most rows that each leg finds.
            fusion: How their scores become one.
        """
        lexical = self.lexical
        if not isinstance(lexical, Bm25sIndex):
            return None
        words = lexical.words(query)
        k = min(k, len(self.dense))
        united: United = _kernels().search_both(
            words,
            lexical.postings,
            self.dense.vectors,
            vector,
            k,
            self.dense.looked_at(vector, k),
            numbers_of(fusion),
        )
        return united

    def unite(
        self, hits: LexicalHits, dense_rows: RowArray, vector: Float32Array, fusion: Fusion
    ) -> "United":
        """What each leg found by itself, every row scored in both, and fused."""
        united: United = _kernels().unite(
            hits.rows, hits.every, dense_rows, self.dense.vectors, vector, numbers_of(fusion)
        )
        return united

    def save(self, folder: Path) -> None:
        """Save as a folder of plain files.

        Raises:
            IndexFolderError: the folder holds something else, or cannot be written.
        """
        content = {
            "passages": len(self.passages),
            "report": {"empty": self.report.empty, "repaired": self.report.repaired},
            "corpus_digest": self.corpus_digest,
            "lexical": {"engine": self.engine, "fingerprint": self.lexical.fingerprint},
            "dense": {
                "embedder": self.embedder,
                "weights": self.embedder_weights,
                "exact_limit": self.exact_limit,
                "codes": not self.dense.is_exact,
            },
        }
        storage.save(folder, content, self._write)

    def _write(self, folder: Path) -> None:
        self.passages.save(folder)
        self.lexical.save(folder)
        self.dense.save(folder)

    @classmethod
    def load(cls, folder: Path, *, verify: bool | None = None) -> "HybridIndex":
        """Read a saved index, its large files memory-mapped.

        Args:
            folder: What ``save`` wrote.
            verify: See `storage.load`.

        Raises:
            IndexFolderError: it is not a saved index, of another version, incomplete or damaged.
        """
        manifest, files = storage.load(folder, verify=verify)
        try:
            return cls._read(manifest, files)
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            raise IndexFolderError(
                f"{folder} is not a usable index ({type(error).__name__}: {error}); build it anew "
                "with `ctxguard index`"
            ) from error

    @classmethod
    def _read(cls, manifest: Mapping[str, Any], files: Path) -> "HybridIndex":
        lexical, dense = manifest["lexical"], manifest["dense"]
        if dense["codes"]:
            storage.check_digest(files / CODES, manifest["files"][CODES]["sha256"])
        index = cls(
            passages=PassageTable.load(files),
            lexical=load_lexical(lexical["engine"], files),
            dense=DenseIndex.load(files, with_codes=dense["codes"]),
            engine=lexical["engine"],
            embedder=dense["embedder"],
            embedder_weights=dense["weights"],
            exact_limit=dense["exact_limit"],
            corpus_digest=manifest["corpus_digest"],
            report=BuildReport(manifest["passages"], **manifest["report"]),
        )
        counts = {
            len(index.passages),
            len(index.lexical),
            len(index.dense),
            manifest["passages"],
        }
        if len(counts) > 1:
            raise ValueError(f"its parts hold different numbers of passages: {sorted(counts)}")
        if index.lexical.fingerprint != lexical["fingerprint"]:
            raise ValueError(
                f"it was analysed as {lexical['fingerprint']!r}, this release analyses as "
                f"{index.lexical.fingerprint!r}"
            )
        return index


def numbers_of(fusion: Fusion) -> "FusionNumbers":
    """What the compiled loops take for a fusion."""
    return (fusion.weight if fusion.method == "convex" else math.nan), fusion.constant


@cache
def _kernels() -> Any:
    return require("ctxguard.retrieval.kernels", "embedded")


def _encode(
    embedder: Embedder, passages: Sequence[Passage], progress: Progress | None
) -> Float32Array:
    texts = [searchable_text(passage) for passage in passages]
    vectors = embedder.encode_passages(texts, progress)
    if vectors.shape != (len(texts), embedder.dimension):
        raise ConfigurationError(
            f"the embedder {embedder.name!r} returned shape {vectors.shape} for {len(texts)} "
            f"passages; it must be {(len(texts), embedder.dimension)}"
        )
    return unit_rows(vectors, [passage.passage_id for passage in passages])

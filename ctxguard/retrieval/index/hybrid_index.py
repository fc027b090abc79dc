"""The index of a hybrid retriever: passages, a lexical and a dense index, the embedder's identity.

An index never changes: adding and deleting make a new one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxguard._support.extras import require
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError, DataError, IndexFolderError
from ctxguard.retrieval.analysers import analyser_of_index
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.dense import CODES, EXACT_LIMIT, DenseIndex, unit_rows
from ctxguard.retrieval.index.filters import AllowedRows
from ctxguard.retrieval.index.lexical import Bm25sIndex, LexicalEngine, build_lexical, load_lexical
from ctxguard.retrieval.index.passages import (
    BuildReport,
    PassageTable,
    searchable_text,
    validate_passages,
)
from ctxguard.retrieval.index.scripts import unhandled_letters
from ctxguard.retrieval.protocols import (
    Analyser,
    Embedder,
    Float32Array,
    LexicalHits,
    LexicalIndex,
    Progress,
    RowArray,
)

if TYPE_CHECKING:
    from ctxguard.retrieval.index.kernels import FusedCandidates


@dataclass(frozen=True, slots=True)
class HybridIndex:
    """Passages with their lexical and dense index; row i is the same passage in all three.

    Attributes:
        passages: The passages, in the order of their ids.
        lexical: Their BM25 index.
        dense: Their vectors.
        engine: The lexical engine.
        embedder: The name of the model that made the vectors.
        embedder_weights: The digest of its weights.
        corpus_digest: sha256 over ids, titles and texts; the same in any order of the corpus.
        report: How many passages were indexed, left out and repaired.
    """

    passages: PassageTable
    lexical: LexicalIndex
    dense: DenseIndex
    engine: LexicalEngine
    embedder: str
    embedder_weights: str
    corpus_digest: str
    report: BuildReport

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        *,
        embedder: Embedder,
        engine: LexicalEngine = "bm25s",
        analyser: Analyser = ENGLISH,
        exact_limit: int = EXACT_LIMIT,
        progress: Progress | None = None,
    ) -> "HybridIndex":
        """Index passages for both legs; arguments as for ``HybridRetriever.build``.

        Raises:
            DataError: passages that cannot be indexed, or vectors with NaN or an infinity.
            ConfigurationError: an unknown engine, or vectors of the wrong shape.
        """
        valid, report = validate_passages(passages)
        vectors = _encode(embedder, valid, progress)
        return cls._of(
            valid,
            vectors,
            engine=engine,
            analyser=analyser,
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
        analyser: Analyser,
        embedder: str,
        embedder_weights: str,
        exact_limit: int,
        report: BuildReport,
    ) -> "HybridIndex":
        table = PassageTable.of(passages)
        texts = [searchable_text(passage) for passage in passages]
        unhandled, warning = unhandled_letters(texts, analyser)
        return cls(
            passages=table,
            lexical=build_lexical(engine, texts, analyser),
            dense=DenseIndex.build(vectors, exact_limit=exact_limit),
            engine=engine,
            embedder=embedder,
            embedder_weights=embedder_weights,
            corpus_digest=table.digest(),
            report=replace(report, unhandled_letters=unhandled, script_warning=warning),
        )

    def added(
        self,
        passages: Iterable[Passage],
        embedder: Embedder,
        progress: Progress | None = None,
    ) -> "HybridIndex":
        """An index with more passages; only the new ones are encoded.

        Raises:
            DataError: an id that is already there; otherwise as for ``build``.
        """
        new, report = validate_passages(passages)
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
            analyser=self.lexical.analyser,
            embedder=self.embedder,
            embedder_weights=self.embedder_weights,
            exact_limit=self.dense.exact_limit,
            report=report,
        )

    def check_embedder(self, embedder: Embedder) -> None:
        """Refuse an embedder other than the one that made the vectors.

        Raises:
            ConfigurationError: it has other weights, so that its queries would find the wrong
                passages without any other error.
        """
        weights = embedder.fingerprint()
        if weights != self.embedder_weights:
            raise ConfigurationError(
                f"the index was built with the embedder {self.embedder!r} (weights "
                f"{self.embedder_weights[:12]}…), not with {embedder.name!r} (weights "
                f"{weights[:12]}…); give that embedder, or build the index again"
            )

    def search_lexical(self, query: str, k: int, allowed: AllowedRows | None) -> LexicalHits:
        """The at most ``k`` best rows that share a word with a query.

        Args:
            query: What to search for.
            k: ≥ 1.
            allowed: The only rows to return; None for all. Scores do not depend on it: how rare a
                word is was counted over all passages.
        """
        hits = self.lexical.search(query, k)
        if allowed is None:
            return hits
        scores = hits.all_scores[allowed.rows]
        best = _kernels().best_first(scores, k, 0.0)
        return LexicalHits(allowed.rows[best], scores[best].astype(np.float64), hits.all_scores)

    def search_both(
        self, query: str, vector: Float32Array, k: int, fusion: Fusion
    ) -> "FusedCandidates | None":
        """Both legs' searches and their fusion, in one compiled call.

        Concurrent clients wait for the interpreter lock whenever it is released: here once, or
        twice where codes are compared first.

        Args:
            query: What to search for.
            vector: Its unit vector, shape (dimension,).
            k: The most rows of each leg, and of their fusion.
            fusion: How the legs' scores become one.

        Returns:
            None where the lexical engine has no compiled search.
        """
        lexical, dense, kernels = self.lexical, self.dense, _kernels()
        if not isinstance(lexical, Bm25sIndex):
            return None
        fused: FusedCandidates = kernels.search_both(
            lexical.words(query),
            lexical.postings,
            dense.vectors,
            vector,
            k,
            None if dense.is_exact else dense.candidate_rows(vector, k),
            kernels.kernel_params(fusion),
        )
        return fused

    def fuse(
        self, hits: LexicalHits, dense_rows: RowArray, vector: Float32Array, k: int, fusion: Fusion
    ) -> "FusedCandidates":
        """The at most ``k`` best of what each leg found by itself, every row scored in both."""
        kernels = _kernels()
        fused: FusedCandidates = kernels.fuse_candidates(
            hits.rows,
            hits.all_scores,
            dense_rows,
            self.dense.vectors,
            vector,
            k,
            kernels.kernel_params(fusion),
        )
        return fused

    def save(self, folder: Path) -> None:
        """Save as a folder of plain files.

        Raises:
            IndexFolderError: the folder holds something else, or cannot be written.
        """
        content = {
            "passages": len(self.passages),
            "report": {
                "empty": self.report.empty,
                "repaired": self.report.repaired,
                "unhandled_letters": self.report.unhandled_letters,
                "script_warning": self.report.script_warning,
            },
            "corpus_digest": self.corpus_digest,
            "lexical": {
                "engine": self.engine,
                "analyser": self.lexical.analyser.name,
                "fingerprint": self.lexical.fingerprint,
            },
            "dense": {
                "embedder": self.embedder,
                "weights": self.embedder_weights,
                "exact_limit": self.dense.exact_limit,
                "codes": not self.dense.is_exact,
            },
        }
        storage.save(folder, content, self._write)

    def _write(self, folder: Path) -> None:
        self.passages.save(folder)
        self.lexical.save(folder)
        self.dense.save(folder)

    @classmethod
    def load(
        cls, folder: Path, *, analyser: Analyser | None = None, verify: bool | None = None
    ) -> "HybridIndex":
        """Read a saved index, its large files memory-mapped.

        Args:
            folder: What ``save`` wrote.
            analyser: The one that the index was built with; None for one that comes with
                ctxguard.
            verify: As for `storage.load`.

        Raises:
            IndexFolderError: not a saved index, of another version, incomplete or damaged.
            ConfigurationError: the index was built with another analyser.
        """
        manifest, files = storage.load(folder, verify=verify)
        try:
            return cls._read(manifest, files, analyser)
        except ConfigurationError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            raise IndexFolderError(
                f"{folder} is not a usable index ({type(error).__name__}: {error}); build it again "
                "with `ctxguard index`"
            ) from error

    @classmethod
    def _read(
        cls, manifest: Mapping[str, Any], files: Path, analyser: Analyser | None
    ) -> "HybridIndex":
        lexical, dense = manifest["lexical"], manifest["dense"]
        if dense["codes"]:
            storage.check_digest(files / CODES, manifest["files"][CODES]["sha256"])
        index = cls(
            passages=PassageTable.load(files),
            lexical=load_lexical(
                lexical["engine"],
                files,
                # Indexes built before there was a choice do not name it.
                analyser_of_index(lexical.get("analyser", ENGLISH.name), analyser),
            ),
            dense=DenseIndex.load(
                files, with_codes=dense["codes"], exact_limit=dense["exact_limit"]
            ),
            engine=lexical["engine"],
            embedder=dense["embedder"],
            embedder_weights=dense["weights"],
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
                f"it was analysed as {lexical['fingerprint']!r}, its queries would be as "
                f"{index.lexical.fingerprint!r}"
            )
        return index


@cache
def _kernels() -> Any:
    return require("ctxguard.retrieval.index.kernels", "embedded")


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

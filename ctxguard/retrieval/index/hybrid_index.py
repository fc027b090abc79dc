"""The index of a hybrid retriever: passages, a lexical and a dense index, the embedder's identity.

An index never changes: adding and deleting make a new one, which shares the base with the old one.
A search of an edited index finds what a search of one built anew from its passages finds; only
codes, where there are any, are those of the base.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError, DataError, IndexFolderError
from ctxguard.retrieval.analysers import analyser_of_index
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.dense import (
    CODES,
    EXACT_LIMIT,
    DenseIndex,
    EditedDenseIndex,
    unit_rows,
)
from ctxguard.retrieval.index.filters import AllowedRows
from ctxguard.retrieval.index.forward import EditedForwardIndex, ForwardIndex
from ctxguard.retrieval.index.lexical import Bm25sIndex, EditedBm25sIndex, LexicalEngine
from ctxguard.retrieval.index.part_files import Maps, PartFiles
from ctxguard.retrieval.index.passages import (
    BuildReport,
    EditedPassageTable,
    PassageTable,
    passage_line,
    searchable_text,
    validate_passages,
)
from ctxguard.retrieval.index.row_map import RowMap
from ctxguard.retrieval.index.scripts import letters_by_script, unhandled_letters
from ctxguard.retrieval.index.segment import Encoded, Segment, SignalLevel
from ctxguard.retrieval.index.sentences import (
    SearchedSentences,
    SentenceIndex,
    TokenTable,
)
from ctxguard.retrieval.protocols import (
    Analyser,
    Embedder,
    Float32Array,
    LexicalHits,
    LexicalIndex,
    Progress,
    RowArray,
    TokenEncoder,
    token_encoder_of,
)

if TYPE_CHECKING:
    from ctxguard.retrieval.index.kernels import FusedCandidates


MERGE_FROM = 2_000
"""Passages in the tail, or deleted from the base, above which a change merges base and tail."""

_BASE, _TAIL, _TOKENS = "base", "tail", "tokens"
_DELETED = "deleted.npy"


@dataclass(frozen=True, slots=True)
class Changes:
    """What a change of an index did, in passages.

    Attributes:
        added: New ids.
        changed: Ids that were there with another title, text or metadata.
        deleted: Ids that are no longer there.
        unchanged: Ids that were given as they were there.
        encoded: Passages whose vectors were computed: those added or with another title or text.
    """

    added: int = 0
    changed: int = 0
    deleted: int = 0
    unchanged: int = 0
    encoded: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """What was added to the base of an index and deleted from it, and is not merged yet.

    Attributes:
        tail: The passages that were added.
        deleted: The rows of the base that were deleted, ascending.
        row_map: The rows that are left, of both.
    """

    tail: Segment
    deleted: RowArray
    row_map: RowMap

    @classmethod
    def of(cls, base: Segment, tail: Segment, deleted: RowArray) -> "Edits":
        """Map the rows of a base and a tail."""
        row_map = RowMap.of(base.passages.ids, tail.passages.ids, deleted)
        return cls(tail, deleted, row_map)

    def save(self, folder: Path) -> None:
        """Write plain files into a folder that is there."""
        self.tail.save(folder)
        np.save(folder / _DELETED, self.deleted)


@dataclass(frozen=True, slots=True)
class HybridIndex:
    """Passages with what is kept for each; row i is the same passage in all of it.

    Attributes:
        base: The passages as they were built or merged last.
        edits: What was added and deleted since; None for nothing.
        passages: The passages, in the order of their ids.
        lexical: Their BM25 index.
        dense: Their vectors.
        forward: Their words in order; None where they are not kept.
        sentences: Their sentences; None where they are not kept.
        engine: The lexical engine.
        embedder: The name of the model that made the vectors.
        embedder_weights: The digest of its weights.
        letters: How many letters of each script the passages have.
        report: How many passages were indexed, left out and repaired.
        maps: The files that are mapped. A search asks first whether they are whole.
        unchecked: Files that it was read from whose digests are still to be checked.
    """

    base: Segment
    edits: Edits | None
    passages: PassageTable
    lexical: LexicalIndex
    dense: DenseIndex | EditedDenseIndex
    forward: ForwardIndex | None
    sentences: SearchedSentences | None
    engine: LexicalEngine
    embedder: str
    embedder_weights: str
    letters: Mapping[str, int]
    report: BuildReport
    maps: Maps
    unchecked: Mapping[Path, str] = field(default_factory=dict)

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
        signals: SignalLevel = "none",
    ) -> "HybridIndex":
        """Index passages for both legs; arguments as for ``HybridRetriever.build``.

        Raises:
            DataError: passages that cannot be indexed, or vectors with NaN or an infinity.
            ConfigurationError: an unknown engine, vectors of the wrong shape, or an embedder
                that cannot give the signals.
        """
        valid, report = validate_passages(passages)
        table = None
        if signals == "full":
            table = TokenTable.of(_token_encoder(embedder).token_table())
        segment = Segment.build(
            valid,
            _encode(embedder, valid, table, progress),
            engine=engine,
            analyser=analyser,
            exact_limit=exact_limit,
            signals=signals,
        )
        return cls._of(
            segment,
            None,
            table=table,
            engine=engine,
            embedder=embedder.name,
            embedder_weights=embedder.fingerprint(),
            letters=letters_by_script([searchable_text(passage) for passage in valid]),
            report=report,
        )

    @classmethod
    def _of(
        cls,
        base: Segment,
        edits: Edits | None,
        *,
        table: TokenTable | None,
        engine: LexicalEngine,
        embedder: str,
        embedder_weights: str,
        letters: Mapping[str, int],
        report: BuildReport,
    ) -> "HybridIndex":
        passages, lexical, dense, forward = _searched(base, edits)
        sentences = None if table is None else _searched_sentences(table, base, edits)
        unhandled, warning = unhandled_letters(letters, lexical.analyser)
        return cls(
            base=base,
            edits=edits,
            passages=passages,
            lexical=lexical,
            dense=dense,
            forward=forward,
            sentences=sentences,
            engine=engine,
            embedder=embedder,
            embedder_weights=embedder_weights,
            letters=letters,
            maps={**base.maps, **({} if edits is None else edits.tail.maps)},
            report=replace(
                report,
                indexed=len(passages),
                unhandled_letters=unhandled,
                script_warning=warning,
            ),
        )

    @property
    def corpus_digest(self) -> str:
        """sha256 over the digests of ids, titles and texts; the same in any order of the corpus."""
        return self.passages.digest

    @property
    def signals(self) -> SignalLevel:
        """What is kept for signals."""
        if self.forward is None:
            return "none"
        return "text" if self.sentences is None else "full"

    @property
    def _table(self) -> TokenTable | None:
        return None if self.sentences is None else self.sentences.table

    def added(
        self,
        passages: Iterable[Passage],
        embedder: Embedder,
        progress: Progress | None = None,
    ) -> "tuple[HybridIndex, Changes]":
        """An index with more passages; only the new ones are encoded.

        Raises:
            DataError: an id that is already there; otherwise as for ``build``.
        """
        new, report = validate_passages(passages)
        repeated = [each.passage_id for each in new if self._row(each.passage_id) is not None]
        if repeated:
            raise DataError(
                f"{len(repeated)} of {len(new)} passages have the id of one in the index, first "
                f"{repeated[0]!r}; use upsert to replace them"
            )
        encoded = _encode(embedder, new, self._table, progress)
        index = self._changed(new, encoded, (), self._with(report))
        return index, Changes(added=len(new), encoded=len(new))

    def deleted(self, passage_ids: Iterable[str]) -> "tuple[HybridIndex, Changes]":
        """An index without some passages.

        Raises:
            DataError: an id that is not in the index, or nothing would be left.
        """
        gone = set(passage_ids)
        unknown = sorted(each for each in gone if self._row(each) is None)
        if unknown:
            raise DataError(
                f"{len(unknown)} of {len(gone)} passages to delete are not in the index, first "
                f"{unknown[0]!r}; nothing was deleted"
            )
        if len(gone) == len(self.passages):
            raise DataError("deleting every passage would leave nothing to search")
        return self._changed((), self._encoded_before([]), gone, self.report), Changes(
            deleted=len(gone)
        )

    def edited(self) -> "HybridIndex":
        """This index with an edit, if it can have one: its searches take other compiled loops."""
        if self.edits is not None or self.engine != "bm25s" or len(self.passages) == 1:
            return self
        return self.deleted(self.passages.ids[:1])[0]

    def upserted(
        self,
        passages: Iterable[Passage],
        embedder: Embedder,
        progress: Progress | None = None,
        *,
        delete_others: bool = False,
    ) -> "tuple[HybridIndex, Changes]":
        """An index in which passages have been added, or have replaced those of the same ids.

        Only texts that are new are encoded. A passage that is there as given is left as it is.

        Args:
            passages: In any order; each with an id of its own.
            embedder: The one that made the vectors.
            progress: Called with the number of passages encoded so far.
            delete_others: Whether passages of other ids are deleted, so that the index holds
                these passages alone.

        Raises:
            DataError: As for ``build``.
        """
        given, report = validate_passages(passages)
        rows = [self._row(passage.passage_id) for passage in given]
        new = [
            (passage, row)
            for passage, row in zip(given, rows, strict=True)
            if row is None or self.passages.line(row) != passage_line(passage)
        ]
        encoded, n_encoded = self._encoded(new, embedder, progress)
        gone = {passage.passage_id for passage, row in new if row is not None}
        changes = Changes(
            added=sum(row is None for _, row in new),
            changed=len(gone),
            unchanged=len(given) - len(new),
            encoded=n_encoded,
        )
        if delete_others:
            others = set(self.passages.ids).difference(passage.passage_id for passage in given)
            gone |= others
            changes = replace(changes, deleted=len(others))
        if not new and not gone:
            return self, changes
        report = report if delete_others else self._with(report)
        return self._changed([passage for passage, _ in new], encoded, gone, report), changes

    def _encoded(
        self,
        passages: Sequence[tuple[Passage, int | None]],
        embedder: Embedder,
        progress: Progress | None,
    ) -> tuple[Encoded, int]:
        """Passages encoded, where the row's text is another; how many those are."""
        unknown, known, rows = [], [], []
        for at, (passage, row) in enumerate(passages):
            if row is None or searchable_text(self.passages[row]) != searchable_text(passage):
                unknown.append(at)
            else:
                known.append(at)
                rows.append(row)
        new = _encode(embedder, [passages[at][0] for at in unknown], self._table, progress)
        old = self._encoded_before(rows)
        vectors = np.empty((len(passages), self.dense.dimension), np.float32)
        vectors[unknown], vectors[known] = new.vectors, old.vectors
        sentences = None
        if new.sentences is not None and old.sentences is not None:
            sentences = SentenceIndex.joined(
                [new.sentences, old.sentences],
                [np.array(unknown, np.int64), np.array(known, np.int64)],
            )
        return Encoded(vectors, sentences), len(unknown)

    def _encoded_before(self, rows: Sequence[int]) -> Encoded:
        """What a model made of the passages of some rows."""
        at = np.array(rows, np.int64)
        sentences = None if self.sentences is None else self.sentences.taken(at)
        return Encoded(self.dense.vectors_at(at), sentences)

    def _changed(
        self,
        new: Sequence[Passage],
        encoded: Encoded,
        gone: Collection[str],
        report: BuildReport,
    ) -> "HybridIndex":
        """Without the passages ``gone``, and with ``new``, whose ids are not there then.

        The tail is made again, the base only when it has changed much.
        """
        letters = Counter(self.letters)
        letters.update(letters_by_script([searchable_text(passage) for passage in new]))
        rows = [row for row in map(self._row, gone) if row is not None]
        letters.subtract(letters_by_script([searchable_text(self.passages[row]) for row in rows]))
        added = Segment.build(
            new,
            encoded,
            engine=self.engine,
            analyser=self.lexical.analyser,
            exact_limit=len(new),
            signals=self.signals,
        )
        parts = [*self._kept(np.array(rows, np.int64)), (added, np.ones(len(new), np.bool_))]
        (base, in_base), *tail = parts
        deleted = np.flatnonzero(~in_base)
        n_tail = sum(int(keep.sum()) for _, keep in tail)
        edits = None
        if self.engine != "bm25s" or max(n_tail, deleted.size) > MERGE_FROM or not in_base.any():
            base = Segment.joined(parts, self.engine, exact_limit=self.dense.exact_limit)
        elif n_tail or deleted.size:
            edits = Edits.of(base, Segment.joined(tail, self.engine, exact_limit=n_tail), deleted)
        return self._of(
            base,
            edits,
            table=self._table,
            engine=self.engine,
            embedder=self.embedder,
            embedder_weights=self.embedder_weights,
            letters=+letters,
            report=report,
        )

    def _kept(self, gone: RowArray) -> list[tuple[Segment, NDArray[np.bool_]]]:
        """The base and the tail, and which of their rows are there without those ``gone``."""
        in_base = np.ones(len(self.base.passages), np.bool_)
        if self.edits is None:
            in_base[gone] = False
            return [(self.base, in_base)]
        in_tail = np.ones(len(self.edits.tail.passages), np.bool_)
        gone_from_base, gone_from_tail = self.edits.row_map.split(gone)
        in_base[self.edits.deleted] = in_base[gone_from_base] = in_tail[gone_from_tail] = False
        return [(self.base, in_base), (self.edits.tail, in_tail)]

    def _row(self, passage_id: str) -> int | None:
        return self.passages.row_of(passage_id)

    def _with(self, report: BuildReport) -> BuildReport:
        """This index's report with the counts of passages that are added."""
        return replace(
            self.report,
            empty=self.report.empty + report.empty,
            repaired=self.report.repaired + report.repaired,
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
            None where the lexical engine, or an edited index, has no such call.
        """
        lexical, dense, kernels = self.lexical, self.dense, _kernels()
        if not isinstance(lexical, Bm25sIndex) or not isinstance(dense, DenseIndex):
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
        kernels, params = _kernels(), _kernels().kernel_params(fusion)
        fused: FusedCandidates
        if isinstance(self.dense, DenseIndex):
            fused = kernels.fuse_candidates(
                hits.rows, hits.all_scores, dense_rows, self.dense.vectors, vector, k, params
            )
            return fused
        # Of an edited index, the candidates' vectors alone: those of all do not lie in one array.
        rows = np.union1d(hits.rows, dense_rows)
        fused = kernels.fuse_candidates(
            np.searchsorted(rows, hits.rows),
            hits.all_scores[rows],
            np.searchsorted(rows, dense_rows),
            self.dense.vectors_at(rows),
            vector,
            k,
            params,
        )
        return rows[fused[0]], *fused[1:]

    def save(self, folder: Path) -> None:
        """Save as a folder of plain files. What it holds of this index is not written again.

        Raises:
            IndexFolderError: the folder holds something else, or cannot be written.
        """
        content = {
            "passages": len(self.passages),
            "report": asdict(self.report) | {"letters": self.letters},
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
        parts = {_BASE: storage.Part(self.base.segment_id, self.base.save)}
        if self.edits is not None:
            parts[_TAIL] = storage.Part(self.edits.tail.segment_id, self.edits.save)
        if self._table is not None:
            parts[_TOKENS] = storage.Part(self._table.table_id, self._table.save)
        storage.save(folder, content, parts)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        analyser: Analyser | None = None,
        verify: bool | None = None,
        opened: "HybridIndex | None" = None,
        defer: bool = False,
    ) -> "HybridIndex":
        """Read a saved index, the files of a large one memory-mapped.

        Args:
            folder: What ``save`` wrote.
            analyser: The one that the index was built with; None for one that comes with
                ctxguard.
            verify: As for `storage.load`.
            opened: An index whose base is not opened again where the saved one has the same.
            defer: As for `storage.load`.

        Raises:
            IndexFolderError: not a saved index, of another version, incomplete or damaged.
            ConfigurationError: the index was built with another analyser.
        """
        known = None if opened is None else opened.base
        saved = storage.load(
            folder,
            verify=verify,
            opened=() if known is None else (known.segment_id,),
            defer=defer,
        )
        try:
            index = cls._read(saved, analyser, known)
        except ConfigurationError:
            raise
        except Exception as error:
            # What reads arrays and JSON raises any type for a file that is neither.
            raise IndexFolderError(
                f"{folder} is not a usable index ({type(error).__name__}: {error}); build it again "
                "with `ctxguard index`"
            ) from error
        return replace(index, unchecked=saved.unchecked)

    @classmethod
    def _read(
        cls, saved: storage.SavedIndex, analyser: Analyser | None, known: Segment | None
    ) -> "HybridIndex":
        manifest, folder = saved.manifest, saved.files
        lexical, dense, parts = manifest["lexical"], manifest["dense"], manifest["parts"]
        files = {name: PartFiles(folder / name, mapped=saved.is_large) for name in parts}
        load = partial(
            Segment.load,
            engine=lexical["engine"],
            analyser=analyser_of_index(lexical["analyser"], analyser),
            exact_limit=dense["exact_limit"],
        )
        base = known
        if base is None or base.segment_id != parts[_BASE]:
            if dense["codes"]:
                codes = f"{_BASE}/{CODES}"
                storage.check_digest(folder / codes, manifest["files"][codes]["sha256"])
            base = load(files[_BASE], parts[_BASE], with_codes=dense["codes"])
        edits = None
        if _TAIL in parts:
            tail = load(files[_TAIL], parts[_TAIL], with_codes=False)
            deleted = files[_TAIL].array(_DELETED)
            if deleted.dtype != np.int64 or (np.diff(deleted) <= 0).any():
                raise ValueError(f"{_DELETED} is not as it was saved")
            if deleted.size and not 0 <= deleted[0] <= deleted[-1] < len(base.passages):
                raise ValueError(f"{_DELETED} names a row that the base does not have")
            edits = Edits.of(base, tail, deleted)
        table = None
        if _TOKENS in parts:
            table = TokenTable.load(files[_TOKENS], parts[_TOKENS])
        report = dict(manifest["report"])
        letters = report.pop("letters")
        index = cls._of(
            base,
            edits,
            table=table,
            engine=lexical["engine"],
            embedder=dense["embedder"],
            embedder_weights=dense["weights"],
            letters=letters,
            report=BuildReport(**report),
        )
        if len(index.passages) != manifest["passages"]:
            raise ValueError(
                f"it holds {len(index.passages)} passages instead of {manifest['passages']}"
            )
        if index.lexical.fingerprint != lexical["fingerprint"]:
            raise ValueError(
                f"it was analysed as {lexical['fingerprint']!r}, its queries would be as "
                f"{index.lexical.fingerprint!r}"
            )
        return index


def _searched(
    base: Segment, edits: Edits | None
) -> tuple[PassageTable, LexicalIndex, DenseIndex | EditedDenseIndex, ForwardIndex | None]:
    """What a search of a base and its edits reads."""
    if edits is None:
        return base.passages, base.lexical, base.dense, base.forward
    tail, row_map = edits.tail, edits.row_map
    if not isinstance(base.lexical, Bm25sIndex) or not isinstance(tail.lexical, Bm25sIndex):
        raise ValueError(f"an index of {base.lexical.fingerprint} has no tail")
    return (
        EditedPassageTable(base.passages, tail.passages, row_map),
        EditedBm25sIndex(base.lexical, tail.lexical, row_map),
        EditedDenseIndex(base.dense, tail.dense, row_map),
        EditedForwardIndex(base.forward, tail.forward, row_map)
        if base.forward is not None and tail.forward is not None
        else None,
    )


@cache
def _kernels() -> Any:
    return require("ctxguard.retrieval.index.kernels", "embedded")


def _searched_sentences(table: TokenTable, base: Segment, edits: Edits | None) -> SearchedSentences:
    tail, row_map = (None, None) if edits is None else (edits.tail.sentences, edits.row_map)
    if base.sentences is None or (row_map is not None and tail is None):
        raise ValueError("there is a token table, but not every passage has sentences")
    return SearchedSentences(table, base.sentences, tail, row_map)


def _token_encoder(embedder: Embedder) -> TokenEncoder:
    encoder = token_encoder_of(embedder)
    if encoder is None:
        raise ConfigurationError(
            f"the embedder {embedder.name!r} gives no states of word pieces (`token_encoder`), "
            'which the signals "full" need; give another embedder, or build the index with the '
            'signals "text"'
        )
    return encoder


def _encode(
    embedder: Embedder,
    passages: Sequence[Passage],
    table: TokenTable | None,
    progress: Progress | None,
) -> Encoded:
    """Encode passages; their sentences too where there is a token table."""
    texts = [searchable_text(passage) for passage in passages]
    sentences = None
    if table is None:
        vectors = embedder.encode_passages(texts, progress)
    else:
        vectors, found = _token_encoder(embedder).encode_passages(texts, progress)
        sentences = SentenceIndex(found, n_vocabulary=len(table.states))
    if vectors.shape != (len(texts), embedder.dimension):
        raise ConfigurationError(
            f"the embedder {embedder.name!r} returned shape {vectors.shape} for {len(texts)} "
            f"passages; it must be {(len(texts), embedder.dimension)}"
        )
    return Encoded(unit_rows(vectors, [passage.passage_id for passage in passages]), sentences)

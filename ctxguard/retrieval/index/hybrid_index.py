"""The index of a hybrid retriever: segments of passages, and the embedder's identity.

An index never changes: adding and deleting make a new one, which shares segments with the old one.
Its searches and those of one built anew from its passages agree; only codes, if there are any, are
those of its segments.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import token_hex

import numpy as np
from numpy.typing import NDArray

from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError, DataError, IndexFolderError, MissingExtraError
from ctxguard.retrieval.analysers import analyser_of_index
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index import kernels, storage
from ctxguard.retrieval.index.dense import CODES, EXACT_LIMIT, DenseIndex, unit_rows
from ctxguard.retrieval.index.filters import AllowedRows
from ctxguard.retrieval.index.forward import ForwardIndex
from ctxguard.retrieval.index.kernels import FusedCandidates
from ctxguard.retrieval.index.lexical import Bm25sIndex, LexicalEngine
from ctxguard.retrieval.index.part_files import Maps, PartFiles
from ctxguard.retrieval.index.passages import (
    BuildReport,
    PassageTable,
    read_passages,
    searchable_text,
)
from ctxguard.retrieval.index.rows import Rows
from ctxguard.retrieval.index.scripts import letters_by_script, unhandled_letters
from ctxguard.retrieval.index.segment import Encoded, Segment, SignalLevel
from ctxguard.retrieval.index.sentences import SentenceIndex
from ctxguard.retrieval.protocols import (
    Analyser,
    Embedder,
    Float32Array,
    LexicalHits,
    LexicalIndex,
    Progress,
    RowArray,
    Sentences,
    TokenEncoder,
    token_encoder_of,
)

MERGE_FROM = 2_000
"""Passages in later segments, or deleted, above which a change merges all segments into one."""

_Part = tuple[Segment, NDArray[np.bool_]]
"""A segment, and which of its rows are kept."""

_SEGMENT, _ROWS = "segment", "rows"


@dataclass(frozen=True, slots=True)
class Changes:
    """The effect of a change of an index, in passages.

    Attributes:
        added: New ids.
        changed: Ids that had another title, text or metadata.
        deleted: Ids that are no longer there.
        unchanged: Ids that were given as they were.
        encoded: Passages whose vectors were computed: those added or with another title or text.
    """

    added: int = 0
    changed: int = 0
    deleted: int = 0
    unchanged: int = 0
    encoded: int = 0


@dataclass(frozen=True, slots=True)
class HybridIndex:
    """Passages with the data kept for each; row i is the same passage in all of it.

    Attributes:
        segments: The first as it was built or merged last, then passages added since.
        rows: Their rows.
        passages: The passages, in the order of their ids.
        lexical: Their BM25 index.
        dense: Their vectors.
        forward: Their words in order; None if they are not kept.
        sentences: Their sentences; None if they are not kept.
        engine: The lexical engine.
        embedder: The name of the model that made the vectors.
        embedder_weights: The digest of its weights.
        letters: The number of letters of each script in the passages.
        report: The numbers of passages that were indexed, left out and repaired.
        maps: The mapped files. A search asks first whether they are whole.
        unchecked: Its files whose digests are still to be checked.
    """

    segments: tuple[Segment, ...]
    rows: Rows
    passages: PassageTable
    lexical: LexicalIndex
    dense: DenseIndex
    forward: ForwardIndex | None
    sentences: SentenceIndex | None
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
        valid, report = read_passages(passages)
        n_pieces = len(_token_encoder(embedder).token_table()) if signals == "full" else 0
        segment = Segment.build(
            valid,
            _PassageEncoder(embedder, valid, n_pieces > 0, progress).encode,
            engine=engine,
            analyser=analyser,
            exact_limit=exact_limit,
            signals=signals,
            n_pieces=n_pieces,
        )
        return cls._of(
            [segment],
            Rows.whole(len(valid)),
            engine=engine,
            embedder=embedder.name,
            embedder_weights=embedder.fingerprint(),
            letters=letters_by_script(map(searchable_text, valid)),
            report=report,
        )

    @classmethod
    def _of(
        cls,
        segments: Sequence[Segment],
        rows: Rows,
        *,
        engine: LexicalEngine,
        embedder: str,
        embedder_weights: str,
        letters: Mapping[str, int],
        report: BuildReport,
    ) -> "HybridIndex":
        whole = Segment.over(segments, rows, engine)
        unhandled, warning = unhandled_letters(letters, whole.lexical.analyser)
        return cls(
            segments=tuple(segments),
            rows=rows,
            passages=whole.passages,
            lexical=whole.lexical,
            dense=whole.dense,
            forward=whole.forward,
            sentences=whole.sentences,
            engine=engine,
            embedder=embedder,
            embedder_weights=embedder_weights,
            letters=letters,
            maps=whole.maps,
            report=replace(
                report,
                indexed=len(rows),
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
        """The data kept for signals."""
        if self.forward is None:
            return "none"
        return "text" if self.sentences is None else "full"

    def deleted(self, passage_ids: Iterable[str]) -> "tuple[HybridIndex, Changes]":
        """Make an index without some passages.

        Raises:
            DataError: an id that is not in the index, or nothing would be left.
        """
        gone = set(passage_ids)
        unknown = sorted(each for each in gone if self._row(each) < 0)
        if unknown:
            raise DataError(
                f"{len(unknown)} of {len(gone)} passages to delete are not in the index, first "
                f"{unknown[0]!r}; nothing was deleted"
            )
        if len(gone) == len(self.passages):
            raise DataError("deleting every passage would leave nothing to search")
        rows = np.array([self._row(each) for each in gone], np.int64)
        return self._changed(None, None, rows, self.report), Changes(deleted=len(gone))

    def upserted(
        self,
        passages: Iterable[Passage],
        embedder: Embedder,
        progress: Progress | None = None,
        *,
        delete_others: bool = False,
        replaces: bool = True,
    ) -> "tuple[HybridIndex, Changes]":
        """Make an index in which passages are added, or replace those of the same ids.

        Only texts that are new are encoded. A passage that is there as given is left as it is.

        Args:
            passages: In any order; each with an id of its own.
            embedder: The one that made the vectors.
            progress: Called with the number of passages encoded so far.
            delete_others: Whether passages of other ids are deleted, so that the index holds
                these passages alone.
            replaces: Whether a passage of an id that is there replaces the former one.

        Raises:
            DataError: as for ``build``; or an id is there and ``replaces`` is False.
        """
        given, report = read_passages(passages)
        rows = np.fromiter(map(self._row, given.ids), np.int64, len(given))
        repeated = np.flatnonzero(rows >= 0)
        if repeated.size and not replaces:
            raise DataError(
                f"{repeated.size} of {len(given)} passages have the id of one in the index, first "
                f"{given.ids[repeated[0]]!r}; use upsert to replace them"
            )
        is_new = [
            row < 0 or self.passages.line(row) != given.line(at)
            for at, row in enumerate(rows.tolist())
        ]
        new = given if all(is_new) else given.taken(np.flatnonzero(is_new))
        former = rows[is_new]
        encoder = _PassageEncoder(embedder, new, self.sentences is not None, progress, self, former)
        gone = former[former >= 0]
        changes = Changes(
            added=len(new) - gone.size,
            changed=gone.size,
            unchanged=len(given) - len(new),
            encoded=len(new) - int(encoder.is_known.sum()),
        )
        if delete_others:
            others = np.setdiff1d(np.arange(len(self.passages)), rows)
            gone = np.concatenate((gone, others))
            changes = replace(changes, deleted=others.size)
        if not len(new) and not gone.size:
            return self, changes
        report = report if delete_others else self._with(report)
        return self._changed(new, encoder.encode, gone, report), changes

    def _changed(
        self,
        new: PassageTable | None,
        encode: Callable[[RowArray], Encoded] | None,
        gone: RowArray,
        report: BuildReport,
    ) -> "HybridIndex":
        """Drop the rows ``gone``, and add passages, whose ids are not there then.

        Later segments are made one, or all of them if they have changed much.
        """
        letters = Counter(self.letters)
        letters.subtract(
            letters_by_script(searchable_text(self.passages[row]) for row in gone.tolist())
        )
        kept = self.rows.kept_without(gone)
        parts = [part for part in zip(self.segments, kept, strict=True) if part[1].any()]
        if encode is not None and new:
            letters.update(letters_by_script(map(searchable_text, new)))
            added = Segment.build(
                new,
                encode,
                engine=self.engine,
                analyser=self.lexical.analyser,
                exact_limit=len(new),
                signals=self.signals,
                n_pieces=0 if self.sentences is None else self.sentences.n_vocabulary,
            )
            parts.append((added, np.ones(len(new), np.bool_)))
        n_later = sum(int(keep.sum()) for _, keep in parts[1:])
        n_deleted = int((~parts[0][1]).sum())
        if parts[0][0] is not self.segments[0] or max(n_later, n_deleted) > MERGE_FROM:
            parts = [self._merged(parts, self.dense.exact_limit)]
        elif n_later and not (len(parts) == 2 and parts[1][1].all()):
            parts = [parts[0], self._merged(parts[1:], n_later)]
        return self._of(
            [segment for segment, _ in parts],
            _in_order(parts),
            engine=self.engine,
            embedder=self.embedder,
            embedder_weights=self.embedder_weights,
            letters=+letters,
            report=report,
        )

    def _merged(self, parts: Sequence[_Part], exact_limit: int) -> _Part:
        segments = [segment for segment, _ in parts]
        whole = Segment.over(segments, _in_order(parts), self.engine).merged(exact_limit)
        return whole, np.ones(len(whole.passages), np.bool_)

    def _row(self, passage_id: str) -> int:
        """Return the row of a passage; −1 if it is not there."""
        row = self.passages.row_of(passage_id)
        return -1 if row is None else row

    def _with(self, report: BuildReport) -> BuildReport:
        """Add the counts of passages that are added to this index's report."""
        return replace(
            self.report,
            empty=self.report.empty + report.empty,
            repaired=self.report.repaired + report.repaired,
        )

    def check_embedder(self, embedder: Embedder) -> None:
        """Refuse an embedder other than the one that made the vectors; see `check_embedder`."""
        check_embedder(self.embedder, self.embedder_weights, embedder)

    def search_lexical(self, query: str, k: int, allowed: AllowedRows | None) -> LexicalHits:
        """Find the at most ``k`` best rows that share a word with a query.

        Args:
            query: The query's text.
            k: ≥ 1.
            allowed: The only rows to return; None for all. Scores do not depend on it: how rare a
                word is was counted over all passages.
        """
        hits = self.lexical.search(query, k)
        if allowed is None:
            return hits
        scores = hits.all_scores[allowed.rows]
        best = kernels.best_first(scores, k, 0.0)
        return LexicalHits(allowed.rows[best], scores[best].astype(np.float64), hits.all_scores)

    def search_both(
        self, query: str, vector: Float32Array, k: int, fusion: Fusion
    ) -> FusedCandidates | None:
        """Search both legs and fuse them, in one compiled call.

        Concurrent clients wait for the interpreter lock whenever it is released: here once, or
        twice where codes are compared first.

        Args:
            query: The query's text.
            vector: Its unit vector, shape (dimension,).
            k: The most rows of each leg, and of their fusion.
            fusion: The rule by which the legs' scores become one.

        Returns:
            None if the lexical engine, or an index that is not one plain segment, has no such call.
        """
        lexical, dense = self.lexical, self.dense
        if not isinstance(lexical, Bm25sIndex) or lexical.postings is None or dense.vectors is None:
            return None
        return kernels.search_both(
            lexical.words(query),
            lexical.postings,
            dense.vectors,
            vector,
            k,
            None if dense.is_exact else dense.candidate_rows(vector, k),
            fusion,
        )

    def fuse(
        self, hits: LexicalHits, dense_rows: RowArray, vector: Float32Array, k: int, fusion: Fusion
    ) -> FusedCandidates:
        """Fuse the rows that each leg found by itself: the at most ``k`` best, scored in both."""
        if self.dense.vectors is not None:
            return kernels.fuse_candidates(
                hits.rows, hits.all_scores, dense_rows, self.dense.vectors, vector, k, fusion
            )
        # The candidates' vectors alone: those of all rows do not lie in one array.
        rows = np.union1d(hits.rows, dense_rows)
        fused = kernels.fuse_candidates(
            np.searchsorted(rows, hits.rows),
            hits.all_scores[rows],
            np.searchsorted(rows, dense_rows),
            self.dense.vectors_at(rows),
            vector,
            k,
            fusion,
        )
        return rows[fused[0]], *fused[1:]

    def save(self, folder: Path) -> None:
        """Save as a folder of plain files. Segments that it holds already are not written again.

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
            },
        }
        parts = {
            f"{_SEGMENT}_{n}": storage.Part(segment.segment_id, segment.save)
            for n, segment in enumerate(self.segments)
        }
        if not self.rows.is_plain:
            parts[_ROWS] = storage.Part(token_hex(8), self.rows.save)
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
            folder: A saved index.
            analyser: The one that the index was built with; None for one that comes with
                ctxguard.
            verify: As for `storage.load`.
            opened: An index whose segments are not opened again if the saved one has them too.
            defer: As for `storage.load`.

        Raises:
            IndexFolderError: not a saved index, of another version, incomplete or damaged.
            ConfigurationError: the index was built with another analyser.
        """
        known = {} if opened is None else {each.segment_id: each for each in opened.segments}
        saved = storage.load(folder, verify=verify, opened=known, defer=defer)
        try:
            index = cls._read(saved, analyser, known)
        except (ConfigurationError, MissingExtraError):
            raise
        except Exception as error:
            # Readers of arrays and JSON raise any type for a file that is neither.
            raise IndexFolderError(
                f"{folder} is not a usable index ({type(error).__name__}: {error}); build it again "
                "with `ctxguard index`"
            ) from error
        return replace(index, unchecked=saved.unchecked)

    @classmethod
    def _read(
        cls, saved: storage.SavedIndex, analyser: Analyser | None, known: Mapping[str, Segment]
    ) -> "HybridIndex":
        manifest, folder = saved.manifest, saved.files
        lexical, dense, parts = manifest["lexical"], manifest["dense"], manifest["parts"]
        files = {name: PartFiles(folder / name, mapped=saved.is_large) for name in parts}
        segments = []
        for name in [name for name in parts if name.startswith(_SEGMENT)]:
            segment = known.get(parts[name])
            if segment is None:
                codes = f"{name}/{CODES}"
                if codes in manifest["files"]:
                    storage.check_digest(folder / codes, manifest["files"][codes]["sha256"])
                segment = Segment.load(
                    files[name],
                    parts[name],
                    engine=lexical["engine"],
                    analyser=analyser_of_index(lexical["analyser"], analyser),
                    exact_limit=dense["exact_limit"],
                )
            segments.append(segment)
        ids = [segment.passages.ids for segment in segments]
        rows = Rows.load(files[_ROWS], ids) if _ROWS in parts else Rows.whole(len(ids[0]))
        report = dict(manifest["report"])
        letters = report.pop("letters")
        index = cls._of(
            segments,
            rows,
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


def _in_order(parts: Sequence[_Part]) -> Rows:
    return Rows.in_order([segment.passages.ids for segment, _ in parts], [k for _, k in parts])


def _token_encoder(embedder: Embedder) -> TokenEncoder:
    encoder = token_encoder_of(embedder)
    if encoder is None:
        raise ConfigurationError(
            f"the embedder {embedder.name!r} gives no states of word pieces (`token_encoder`), "
            'which the signals "full" need; give another embedder, or build the index with the '
            'signals "text"'
        )
    return encoder


def check_embedder(name: str, weights: str, embedder: Embedder) -> None:
    """Refuse an embedder other than the one that made an index's vectors.

    Args:
        name: The name of that one.
        weights: The digest of its weights.
        embedder: Any.

    Raises:
        ConfigurationError: it has other weights, so that its queries would find the wrong passages
            without any other error.
    """
    given = embedder.fingerprint()
    if given != weights:
        raise ConfigurationError(
            f"the index was built with the embedder {name!r} (weights {weights[:12]}…), not with "
            f"{embedder.name!r} (weights {given[:12]}…); give that embedder, or build the index "
            "again"
        )


class _PassageEncoder:
    """Encodes the rows of a table, but those whose texts an index holds already.

    Args:
        embedder: The model.
        passages: The table.
        with_sentences: Whether sentences are kept.
        progress: Called with the number of passages encoded so far.
        index: The index.
        former: The row in it of each passage, −1 for none.

    Attributes:
        is_known: Whether the index holds each passage's text, shape (n_passages,).
    """

    def __init__(  # noqa: PLR0917
        self,
        embedder: Embedder,
        passages: PassageTable,
        with_sentences: bool,
        progress: Progress | None,
        index: HybridIndex | None = None,
        former: RowArray | None = None,
    ) -> None:
        self._embedder, self._passages, self._with_sentences = embedder, passages, with_sentences
        self._progress, self._done = progress, 0
        self._index, self._former = index, former
        self.is_known = np.zeros(len(passages), np.bool_)
        if index is not None and former is not None:
            for at in np.flatnonzero(former >= 0).tolist():
                old, new = index.passages[former[at]], passages[at]
                self.is_known[at] = searchable_text(old) == searchable_text(new)

    def encode(self, rows: RowArray) -> Encoded:
        """Return the vectors of rows, and their sentences.

        Raises:
            DataError: vectors with NaN or an infinity.
            ConfigurationError: vectors of the wrong shape.
        """
        is_known = self.is_known[rows]
        vectors, sentences = self._new(rows[~is_known])
        if self._index is None or self._former is None or not is_known.any():
            return vectors, sentences
        old = self._former[rows[is_known]]
        order = np.argsort(np.concatenate((np.flatnonzero(~is_known), np.flatnonzero(is_known))))
        vectors = np.concatenate((vectors, self._index.dense.vectors_at(old)))[order]
        if sentences is not None and self._index.sentences is not None:
            sentences = Sentences.of([sentences, self._index.sentences.taken(old)]).at(order)
        return vectors, sentences

    def _new(self, rows: RowArray) -> Encoded:
        progress, before = self._progress, self._done
        passages = [self._passages[row] for row in rows.tolist()]
        total = None if progress is None else lambda done: progress(before + done)
        self._done += len(passages)
        return encode(self._embedder, passages, total, with_sentences=self._with_sentences)


def encode(
    embedder: Embedder,
    passages: Sequence[Passage],
    progress: Progress | None,
    *,
    with_sentences: bool,
) -> Encoded:
    """Encode passages to unit vectors, and to sentences if they are kept.

    Raises:
        DataError: vectors with NaN or an infinity.
        ConfigurationError: vectors of the wrong shape, or the embedder gives no sentences.
    """
    texts, sentences = [searchable_text(passage) for passage in passages], None
    if with_sentences:
        vectors, sentences = _token_encoder(embedder).encode_passages(texts, progress)
    else:
        vectors = embedder.encode_passages(texts, progress)
    if vectors.shape != (len(texts), embedder.dimension):
        raise ConfigurationError(
            f"the embedder {embedder.name!r} returned shape {vectors.shape} for {len(texts)} "
            f"passages; it must be {(len(texts), embedder.dimension)}"
        )
    return unit_rows(vectors, [passage.passage_id for passage in passages]), sentences

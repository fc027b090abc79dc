"""Holds a hybrid retriever's index: one immutable generation, in memory or on disk.

`load` and `save` read and write the index's folder; `build` and `updated` call the embedder. Needs
the extra `embedded`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import lt
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxguard._support.extras import require
from ctxguard.core.types import Passage
from ctxguard.errors import ConfigurationError, IndexFolderError, MissingExtraError
from ctxguard.retrieval.analysers import analyser_of_index
from ctxguard.retrieval.analysers.english import ENGLISH
from ctxguard.retrieval.index import storage
from ctxguard.retrieval.index.dense import EXACT_LIMIT, DenseIndex, unit_rows
from ctxguard.retrieval.index.lexical import (
    LEXICAL_INDEXES,
    Bm25sIndex,
    LexicalEngine,
    SparseRows,
    Terms,
    Weights,
)
from ctxguard.retrieval.index.passages import (
    BuildReport,
    PassageTable,
    read_passages,
    searchable_text,
)
from ctxguard.retrieval.index.pieces import Pieces
from ctxguard.retrieval.index.scripts import unhandled_letters
from ctxguard.retrieval.protocols import (
    Analyser,
    BuildProgress,
    Embedder,
    Float32Array,
    RowArray,
    token_encoder_of,
)

SignalLevel = Literal["none", "full"]

_LINES = "passages.jsonl"
_IDS = "passages.ids.json"
_VOCABULARY = "lexical.vocabulary.json"
_CODES = "vectors.codes"

_BLOCK = 512
"""How many passages are encoded at once."""

_MAPPED_FROM_BYTES = 2**20
_Part = TypeVar("_Part", SparseRows, Weights, Pieces)


@dataclass(frozen=True, slots=True)
class Changes:
    """The effect of an index update, in numbers of passages.

    Attributes:
        added: New ids.
        changed: Ids that had another title, text or metadata.
        deleted: Ids that are no longer there.
        unchanged: Ids whose passages did not change.
        encoded: Passages that were encoded: added ones, and those whose title or text changed.
    """

    added: int = 0
    changed: int = 0
    deleted: int = 0
    unchanged: int = 0
    encoded: int = 0


@dataclass(frozen=True)
class HybridIndex:
    """Passages in the order of their ids, with the data kept for each.

    Row i is the same passage everywhere. ``embedder`` and ``embedder_weights`` are the name and the
    digest of the model that made the vectors; ``pieces`` is None if word pieces are not kept.
    """

    passages: PassageTable
    lexical: Bm25sIndex
    dense: DenseIndex
    pieces: Pieces | None
    signals: SignalLevel
    embedder: str
    embedder_weights: str
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
        progress: BuildProgress | None = None,
        signals: SignalLevel = "full",
    ) -> "HybridIndex":
        """Index passages for both legs; arguments and errors as for ``HybridRetriever.build``."""
        if signals not in ("none", "full"):
            raise ConfigurationError(f"signals {signals!r} must be 'full' or 'none'")
        if engine not in LEXICAL_INDEXES:
            raise ConfigurationError(
                f"lexical engine {engine!r} is unknown; use 'bm25s' or 'rank-bm25'"
            )
        valid, report = read_passages(passages)
        # The texts are read again for each part: all at once, they would take most of the memory.
        vectors = np.empty((len(valid), embedder.dimension), np.float32)
        encode_rows(vectors, np.arange(len(valid)), valid, embedder, progress)
        encoder = None if signals == "none" else token_encoder_of(embedder)
        return cls(
            passages=valid,
            lexical=LEXICAL_INDEXES[engine].build(valid.texts(), analyser),
            dense=DenseIndex(vectors, exact_limit=exact_limit),
            pieces=None if encoder is None else Pieces.read(valid.texts(), encoder),
            signals=signals,
            embedder=embedder.name,
            embedder_weights=embedder.fingerprint(),
            report=_fitted(report, valid.texts(), analyser),
        )

    def updated(
        self, passages: Iterable[Passage], embedder: Embedder, progress: BuildProgress | None = None
    ) -> "tuple[HybridIndex, Changes]":
        """Build the next generation, or return this one if nothing changed; see `update`."""
        given, report = read_passages(passages)
        row_of = {each: row for row, each in enumerate(self.passages.ids)}
        former = np.array([row_of.get(each, -1) for each in given.ids], np.int64)
        same = np.array(
            [
                row >= 0 and self.passages.line(row) == given.line(at)
                for at, row in enumerate(former.tolist())
            ]
        )
        known = same.copy()
        for at in np.flatnonzero(~same & (former >= 0)).tolist():
            known[at] = searchable_text(self.passages[former[at]]) == searchable_text(given[at])
        new = np.flatnonzero(~known)
        changes = Changes(
            added=int((former < 0).sum()),
            changed=int((~same & (former >= 0)).sum()),
            deleted=len(self.passages) - int((former >= 0).sum()),
            unchanged=int(same.sum()),
            encoded=new.size,
        )
        if same.all() and not changes.deleted:
            return self, changes
        # A row of the former generation, or behind its rows one of the new texts.
        rows = former.copy()
        rows[new] = len(self.passages) + np.arange(new.size)
        vectors = np.empty((len(given), self.dense.dimension), np.float32)
        vectors[known] = self.dense.vectors[former[known]]
        encode_rows(vectors, new, given, embedder, progress)
        pieces, encoder = None, None if self.pieces is None else token_encoder_of(embedder)
        if self.pieces is not None and encoder is not None:
            pieces = self.pieces.joined(Pieces.read(given.texts(new.tolist()), encoder), rows)
        analyser = self.lexical.analyser
        terms = Terms.read(given.texts(new.tolist()), analyser)
        index = replace(
            self,
            passages=given,
            lexical=type(self.lexical)(analyser, self.lexical.terms.joined(terms, rows)),
            dense=DenseIndex(vectors, exact_limit=self.dense.exact_limit),
            pieces=pieces,
            report=_fitted(report, given.texts(), analyser),
        )
        return index, changes

    def save(self, folder: Path) -> None:
        """Save as a folder of plain files; see `storage.save`."""
        content = {
            "passages": len(self.passages),
            "report": asdict(self.report),
            "corpus_digest": self.passages.digest,
            "signals": self.signals,
            "lexical": {
                "engine": self.lexical.engine,
                "analyser": self.lexical.analyser.name,
                "fingerprint": self.lexical.fingerprint,
            },
            "dense": {
                "embedder": self.embedder,
                "weights": self.embedder_weights,
                "exact_limit": self.dense.exact_limit,
            },
        }
        storage.save(folder, content, self._write)

    def _write(self, folder: Path) -> None:
        self.passages.lines.tofile(folder / _LINES)
        (folder / _IDS).write_text(json.dumps(self.passages.ids), encoding="utf-8")
        vocabulary = json.dumps(list(self.lexical.terms.vocabulary))
        (folder / _VOCABULARY).write_text(vocabulary, encoding="utf-8")
        for name, array in self._arrays().items():
            np.save(folder / f"{name}.npy", array)
        if self.dense.codes is not None:
            require("faiss", "embedded").write_index(self.dense.codes, str(folder / _CODES))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by the names of their files."""
        arrays: dict[str, NDArray[Any]] = {
            "passages.offsets": self.passages.offsets,
            "passages.digests": self.passages.digests,
            "lexical.lengths": self.lexical.terms.lengths,
            "vectors": self.dense.vectors,
        }
        parts: dict[str, SparseRows | Weights | Pieces] = {
            "lexical": self.lexical.terms.rows,
            "weights": self.lexical.weights,
        }
        if self.pieces is not None:
            parts["pieces"] = self.pieces
        for part, values in parts.items():
            arrays |= {f"{part}.{name}": array for name, array in values._asdict().items()}
        return arrays

    @classmethod
    def load(cls, folder: Path, *, analyser: Analyser | None = None) -> "HybridIndex":
        """Read a saved index after checking every file's digest; large files are mapped.

        Raises:
            IndexFolderError: the folder is not a saved index, is of another version, incomplete or
                damaged.
            ConfigurationError: the index was built with an analyser of its own that is not
                ``analyser``.
        """
        manifest, files = storage.load(folder)
        try:
            return cls._read(manifest, files, analyser)
        except (ConfigurationError, MissingExtraError):
            raise
        except Exception as error:
            # Readers of arrays and JSON raise any type for a file that is neither.
            raise IndexFolderError(
                f"{folder} is not a usable index ({type(error).__name__}: {error}); build it again "
                "with `ctxguard index`"
            ) from error

    @classmethod
    def _read(
        cls, manifest: Mapping[str, Any], files: Path, analyser: Analyser | None
    ) -> "HybridIndex":
        def array(name: str) -> NDArray[Any]:
            """Read an array; map it if it is large."""
            file = files / f"{name}.npy"
            mode: Literal["r"] | None = "r" if file.stat().st_size > _MAPPED_FROM_BYTES else None
            # A plain array: a memmap checks every part that is taken of it.
            found: NDArray[Any] = np.load(file, mmap_mode=mode, allow_pickle=False).view(np.ndarray)
            return found

        def part(kind: type[_Part], name: str) -> _Part:
            return kind(*[array(f"{name}.{field}") for field in kind._fields])

        lexical, dense = manifest["lexical"], manifest["dense"]
        lines = np.memmap(files / _LINES, np.uint8, "r").view(np.ndarray)
        ids = json.loads((files / _IDS).read_bytes())
        table = PassageTable(lines, array("passages.offsets"), ids, array("passages.digests"))
        names = json.loads((files / _VOCABULARY).read_bytes())
        terms = Terms(
            {name: number for number, name in enumerate(names)},
            part(SparseRows, "lexical"),
            array("lexical.lengths"),
        )
        own = LEXICAL_INDEXES[lexical["engine"]](
            analyser_of_index(lexical["analyser"], analyser), terms, part(Weights, "weights")
        )
        if own.fingerprint != lexical["fingerprint"]:
            raise ValueError(
                f"its passages were analysed as {lexical['fingerprint']!r}, but queries "
                f"would be analysed as {own.fingerprint!r}"
            )
        codes, vectors = files / _CODES, array("vectors")
        # Mapped now, row by row: the first search would wait for each page that it needs.
        vectors[:, 0].max(initial=0.0)
        found = cls(
            passages=table,
            lexical=own,
            dense=DenseIndex(
                vectors,
                exact_limit=dense["exact_limit"],
                # The digest was checked: faiss trusts its files.
                codes=require("faiss", "embedded").read_index(str(codes))
                if codes.exists()
                else None,
            ),
            pieces=part(Pieces, "pieces") if (files / "pieces.numbers.npy").exists() else None,
            signals=manifest["signals"],
            embedder=dense["embedder"],
            embedder_weights=dense["weights"],
            report=BuildReport(**manifest["report"]),
        )
        _check_rows(found, manifest["passages"])
        return found


def _check_rows(index: HybridIndex, n: int) -> None:
    """Refuse arrays that do not describe the same n passages.

    A search would find wrong ones, or take memory for the largest number that an array names.
    """
    table, terms, weights = index.passages, index.lexical.terms, index.lexical.weights
    pieces, vectors, codes = index.pieces, index.dense.vectors, index.dense.codes
    n_terms, entries = len(terms.vocabulary), terms.rows.numbers
    sizes = {len(table.ids), table.digests.size, terms.lengths.size, len(vectors)}
    shapes = (table.digests.ndim, terms.lengths.ndim, vectors.ndim)
    texts = all(isinstance(each, str) for each in table.ids)
    each_size = (terms.rows.counts, weights.rows, weights.scores, weights.unit)
    checks = {
        "differ in their numbers of rows": sizes != {n} or shapes != (1, 1, 2),
        "have ids that are not strings in order": not (
            texts and all(map(lt, table.ids, table.ids[1:]))
        ),
        "place passages outside of their lines": not _are_starts(
            table.offsets, n, table.lines.size
        ),
        "place terms outside of their passages": not (
            _are_starts(terms.rows.starts, n, entries.size)
            and _are_starts(weights.starts, n_terms, entries.size)
        ),
        "weigh or count terms that they do not name": any(
            each.shape != entries.shape for each in each_size
        ),
        "have lengths below 0": terms.lengths.min(initial=0) < 0,
        "name terms that do not exist": not _are_below(entries, n_terms),
        "name passages that do not exist": not _are_below(weights.rows, n),
        "have word pieces that the model lacks": pieces is not None
        and not (
            _are_starts(pieces.starts, n, pieces.numbers.size)
            and _are_below(pieces.numbers, pieces.weights.size)
        ),
        "have codes of other vectors": codes is not None
        and (codes.ntotal, codes.d) != vectors.shape,
    }
    for what, is_so in checks.items():
        if is_so:
            raise ValueError(f"its files do not belong together: they {what}")


def _are_starts(starts: NDArray[Any], n: int, end: int) -> bool:
    """Return whether these are the starts of n consecutive rows from 0 to ``end``."""
    ends = starts[[0, -1]].tolist() if starts.shape == (n + 1,) else None
    return ends == [0, end] and bool((np.diff(starts) >= 0).all())


def _are_below(numbers: NDArray[Any], n: int) -> bool:
    return bool(numbers.min(initial=0) >= 0 and numbers.max(initial=-1) < n)


def _fitted(report: BuildReport, texts: Iterable[str], analyser: Analyser) -> BuildReport:
    """Add to a report the share of letters in scripts that the analyser does not support."""
    share, warning = unhandled_letters(texts, analyser)
    return replace(report, unhandled_letters=share, script_warning=warning)


def check_embedder(name: str, weights: str, embedder: Embedder) -> None:
    """Refuse an embedder whose weights differ from those that made an index's vectors.

    Its queries would silently find the wrong passages.
    """
    given = embedder.fingerprint()
    if given != weights:
        raise ConfigurationError(
            f"the index was built with the embedder {name!r} (weights {weights[:12]}…), not with "
            f"{embedder.name!r} (weights {given[:12]}…); give that embedder, or build the index "
            "again"
        )


def encode_rows(
    vectors: Float32Array,
    rows: RowArray,
    passages: PassageTable,
    embedder: Embedder,
    progress: BuildProgress | None = None,
) -> None:
    """Encode some of a table's passages into their rows of ``vectors``, a block at a time."""
    for at in range(0, rows.size, _BLOCK):
        if progress is not None:
            progress(at, rows.size)
        block = rows[at : at + _BLOCK]
        ids = [passages.ids[row] for row in block.tolist()]
        vectors[block] = encode(embedder, list(passages.texts(block.tolist())), ids)
    if progress is not None:
        progress(rows.size, rows.size)


def encode(embedder: Embedder, texts: list[str], passage_ids: Sequence[str]) -> Float32Array:
    """Encode texts to unit vectors; refuse vectors that have another shape or are not finite."""
    vectors = embedder.encode_passages(texts)
    if vectors.shape != (len(texts), embedder.dimension):
        raise ConfigurationError(
            f"the embedder {embedder.name!r} returned shape {vectors.shape} for {len(texts)} "
            f"passages; it must be {(len(texts), embedder.dimension)}"
        )
    return unit_rows(vectors, passage_ids)

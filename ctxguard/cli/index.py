"""``ctxguard index``: build or update an index, in a folder or in an engine.

Reads the corpus, loads the model, and writes the folder or calls the engine. Keeps unfinished work
beside the folder.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator
from rich.console import RenderableType
from rich.filesize import decimal

import ctxguard
from ctxguard._support.settings import SettingsModel, optional, optional_key, setting
from ctxguard._support.words import count
from ctxguard.cli._console import Output, by_total
from ctxguard.cli._tables import facts, remark
from ctxguard.core.passages import text_key
from ctxguard.errors import ConfigurationError

if TYPE_CHECKING:
    from calibration.data.readers import Corpus
    from ctxguard.core.types import Passage
    from ctxguard.integrations.engines.retriever import EngineRetriever
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever
    from ctxguard.retrieval.index.hybrid_index import Changes
    from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
    from ctxguard.retrieval.protocols import Embedder

    _Index = HybridRetriever | EngineRetriever

_READ = 1_000
"""How many passage ids are requested from an engine at once."""
_SHOWN = 10
"""How many of the files left out are named on the screen."""


class IndexCommand(SettingsModel):
    corpus: Path = setting(
        "A folder of documents, or one: Markdown, text, HTML, PDF, Word, PowerPoint, Excel or CSV, "
        "cut at headings and sentences; or passages: a JSONL file, one per line with _id (or id), "
        "text and optionally title and metadata, or a BEIR folder, whose corpus.jsonl is read.",
        "CORPUS",
        argument=True,
    )
    out: Path | None = optional("Index folder to write; an index there is replaced.", "FOLDER")
    engine: str | None = optional(
        "Engine to index in, instead of a folder: postgresql://…, qdrant://… or milvus://…, "
        "with the index's name after #. An index there is never replaced. A key for its API is "
        "taken from the environment variable CTXGUARD_ENGINE_KEY.",
        "URL",
        repr=False,
    )
    update: bool = setting(
        "Bring the index up to date with CORPUS: encode only what is new or has changed, "
        "delete what CORPUS no longer holds. The passages of a document that cannot be read now "
        "stay; the exit code is 1 then.",
        value=False,
    )
    chunk: bool = setting(
        "Split passages that are longer than the model reads. A chunk has its parent's id with "
        "# and a number, and names its parent in the metadata as chunk_of.",
        value=False,
    )
    lexical: Literal["bm25s", "rank-bm25"] | None = optional_key(
        "Lexical engine: bm25s or rank-bm25.", default="bm25s"
    )
    language: str | None = optional(
        "Language of the corpus for lexical search: en, da, de, es, fr, it, nl, no, pt, ru, sv "
        "or tr; cjk for Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese.",
        "CODE",
        default="en",
    )
    model: str | None = optional(
        "Embedding model: a name, or a folder. For other languages than English give a "
        "multilingual one.",
        "MODEL",
        default="all-MiniLM-L6-v2",
    )
    signals: Literal["full", "none"] | None = optional_key(
        "Signals of relevance by which the candidates are ordered: full or none.", default="full"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.out is None) == (self.engine is None):
            raise ConfigurationError("give either --out FOLDER or --engine URL")
        of_build = ("lexical", "language", "model", "signals")
        given = [name for name in of_build if getattr(self, name) is not None]
        if given and self.update:
            raise ConfigurationError(
                f"--{given[0]}: an update keeps the settings of the index; leave this option out, "
                "or build the index again without --update"
            )
        if self.lexical is not None and self.engine is not None:
            raise ConfigurationError("lexical has no effect with --engine: leave it out")
        return self

    def __call__(self, output: Output) -> None:
        """An interrupted run leaves the folder unchanged. The same command goes on from what it has
        encoded, which is kept in a file beside the folder; in an engine, --update adds the rest.
        """
        from calibration.data.readers import read_corpus
        from ctxguard.integrations.engines.retriever import EngineRetriever

        start = perf_counter()
        self._check_destination()
        reader = read_corpus(self.corpus)
        documents, chunk, existing = reader.are_documents, self.chunk, None
        if self.update:
            with output.doing("opening the index"):
                existing = (
                    EngineRetriever.open(str(self.engine))
                    if self.out is None
                    else ctxguard.HybridRetriever.load(self.out)
                )
                chunk = chunk or (not documents and _is_chunked(existing, self.corpus))
        with output.doing("loading the model"):
            embedder = self._embedder(existing)
            chunk |= documents and embedder.passage_window is not None
        if existing is None and self.signals in {None, "full"}:
            # Built before the passages are counted.
            with output.doing("reading the model's word pieces, once on this machine"):
                embedder.piece_table  # noqa: B018  made, and kept
        corpus = _Corpus(reader, embedder, existing, chunk=chunk)
        with self._kept(embedder, output) as encoder:
            retriever, changes = self._made(corpus, encoder, existing, output)
            build_seconds = perf_counter() - corpus.read_at
            where, notes = self._saved(retriever, output)
        n_encoded = corpus.n if changes is None else changes.encoded
        document = {
            "passages": len(retriever),
            "signals": retriever.signals,
            "fingerprint": retriever.fingerprint(),
            "update": changes,
            "window": corpus.window,
            "copies": corpus.copies,
            "passages_per_second": n_encoded / build_seconds,
            "left_out": [{**e._asdict(), "kept": corpus.n_kept(e.path)} for e in reader.left_out],
            **where,
            "seconds": perf_counter() - start,
        }
        notes = [*reader.notes, *corpus.notes, *notes]
        output.result(document, _shown(document), notes, found=bool(corpus.kept))

    def _check_destination(self) -> None:
        """Refuse a bad destination or language before the work; saving checks only at the end."""
        from ctxguard.integrations.engines.address import EngineAddress
        from ctxguard.retrieval.analysers import analyser_for
        from ctxguard.retrieval.index.storage import check_destination

        analyser_for(self.language or "en")
        if self.out is not None:
            check_destination(self.out)
        else:
            EngineAddress.parse(str(self.engine))

    @contextmanager
    def _kept(
        self, embedder: "SentenceTransformerEmbedder", output: Output
    ) -> "Iterator[Embedder]":
        """Keep encoded passages beside the folder, until the index is saved."""
        from ctxguard.retrieval.index.kept_vectors import KeptVectors

        if self.out is None:
            yield embedder  # an engine already holds the encoded passages
            return
        file = self.out.resolve()
        file = file.with_name(f"{file.name}.unfinished")
        with ExitStack() as opened:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                kept = opened.enter_context(KeptVectors(embedder, file))
            except OSError as error:
                output.note(
                    f"an interrupted run could not be continued: {file} cannot be written to "
                    f"({error})"
                )
                yield embedder
                return
            if kept.n_found:
                found = count(kept.n_found, "passage")
                output.note(f"{found} that an interrupted run encoded are taken from {file}")
            try:
                yield kept
            except KeyboardInterrupt:
                output.note(
                    f"interrupted; the same command continues after {count(len(kept), 'passage')}"
                )
                raise
            kept.delete()

    def _made(
        self, corpus: "_Corpus", encoder: "Embedder", existing: "_Index | None", output: Output
    ) -> "tuple[_Index, Changes | None]":
        """Build or update the index, and show progress."""
        from ctxguard.integrations.engines.retriever import EngineRetriever

        with output.passes() as begin:
            encoded = by_total(begin, "encoding passages")
            if isinstance(existing, ctxguard.HybridRetriever):
                existing = ctxguard.HybridRetriever(existing.generation, embedder=encoder)
            if existing is not None:
                return existing, existing.update(corpus, encoded)
            about: Any = {
                "embedder": encoder,
                "analyser": self.language or "en",
                "progress": encoded,
                "signals": self.signals or "full",
            }
            if self.engine is not None:
                return EngineRetriever.build(corpus, self.engine, **about), None
            lexical = self.lexical or "bm25s"
            return ctxguard.HybridRetriever.build(corpus, lexical=lexical, **about), None

    def _embedder(self, existing: "_Index | None") -> "SentenceTransformerEmbedder":
        from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

        if existing is not None:
            return SentenceTransformerEmbedder(existing.embedder)
        # A folder's name must still find it when the index is opened from elsewhere.
        is_folder = self.model is not None and Path(self.model).is_dir()
        model = Path(str(self.model)).resolve() if is_folder else self.model
        return SentenceTransformerEmbedder(model)

    def _saved(self, retriever: "_Index", output: Output) -> tuple[dict[str, object], list[str]]:
        """Save an index; report its location, with a note on its language."""
        from ctxguard.integrations.engines.address import EngineAddress
        from ctxguard.integrations.engines.retriever import EngineRetriever

        if isinstance(retriever, EngineRetriever):
            retriever.close()
            return {"engine": EngineAddress.parse(str(self.engine)).shown}, []
        folder, report = Path(str(self.out)), retriever.report
        with output.doing("saving"):
            retriever.save(folder)
        notes = [] if report.script_warning is None else [report.script_warning]
        if report.empty:
            empty = count(report.empty, "passage")
            notes.append(f"{empty} with neither title nor text left out")
        language = retriever.analyser.name
        if self.model is None and language != "en":
            notes.append(
                "the vectors come from all-MiniLM-L6-v2, which was trained on English, but the "
                f"language is {language}; give --model a multilingual model"
            )
        size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return {"index": str(folder), "empty": report.empty, "size_bytes": size_bytes}, notes


def _shown(made: "dict[str, Any]") -> Iterator[RenderableType]:
    by, changes = made["fingerprint"], made["update"]
    changed = changes and ", ".join(f"{n:,} {what}" for what, n in asdict(changes).items())
    yield facts(
        ("engine", made.get("engine")),
        ("index", f"{made['index']}, {decimal(made['size_bytes'])}" if "index" in made else None),
        ("passages", f"{made['passages']:,}"),
        ("update", changed),
        ("signals", made["signals"]),
        ("embedder", f"{by['embedder']} {by['embedder_weights'][:12]}"),
        ("lexical", by.get("lexical", by.get("analyser"))),
        ("took", f"{made['seconds']:.1f} s, {made['passages_per_second']:,.0f} passages/s"),
    )
    left_out = sorted(made["left_out"], key=lambda each: (not each["kept"], not each["unread"]))
    for each in left_out[:_SHOWN]:
        kept = f"; as indexed before, {count(each['kept'], 'passage')}" if each["kept"] else ""
        yield remark(f"left out: {each['path']} {each['reason']}{kept}")
    if len(left_out) > _SHOWN:
        yield remark(f"left out: {len(left_out) - _SHOWN:,} more, which --json lists")


def _is_chunked(retriever: "_Index", corpus: Path) -> bool:
    """Return whether an index holds chunks of longer passages; for an engine, of these passages."""
    from calibration.data.readers import read_corpus
    from ctxguard.integrations.engines.retriever import EngineRetriever
    from ctxguard.retrieval.index.passages import CHUNK_OF

    if isinstance(retriever, EngineRetriever):
        ids = (each.passage_id for each in read_corpus(corpus))
        while some := list(islice(ids, _READ)):
            if retriever.labelled_ids(some) - retriever.known_ids(some):
                return True
        return False
    rows = retriever.generation.passages.metadata_rows
    rows.prepare([CHUNK_OF])
    return CHUNK_OF in rows.fields


class _Corpus:
    """The passages to index, which are read once and not kept, and how well they fit the model.

    An index to update gives the passages of documents that can no longer be read.

    Attributes:
        n: The number of passages read so far, or of chunks.
        copies: How many repeat the text of another; a context holds one of them.
        kept: How many passages were taken from the index, by the path of their document.
        read_at: When the last passage was read.
    """

    def __init__(
        self,
        reader: "Corpus",
        embedder: "SentenceTransformerEmbedder",
        index: "_Index | None",
        *,
        chunk: bool,
    ) -> None:
        self._reader, self._index, self._chunk = reader, index, chunk
        self._window = embedder.passage_window
        if self._window is None and chunk:
            raise ConfigurationError(
                f"--chunk requires the token limit of {embedder.name}, which is unknown: leave "
                "--chunk out"
            )
        self._longer, self._chunks = 0, 0
        self.n, self.copies, self.read_at = 0, 0, perf_counter()
        self.kept = Counter[str]()

    def __iter__(self) -> "Iterator[Passage]":
        texts: set[bytes] = set()
        for passage in chain(self._fitted(), self._still_indexed()):
            self.n += 1
            if (key := text_key(passage.text)) is not None:
                self.copies += key in texts
                texts.add(key)
            yield passage
        self.read_at = perf_counter()

    def _still_indexed(self) -> "Iterator[Passage]":
        """Yield unreadable documents' indexed passages, known once the corpus is read."""
        unread = {each.path.rstrip("/") for each in self._reader.left_out if each.unread}
        folders = tuple(f"{each}/" for each in unread)
        if self._index is None or not unread:
            return
        for passage in self._index.stored_passages():
            path = str((passage.metadata or {}).get("path", ""))
            if path in unread or path.startswith(folders):
                self.kept[path] += 1
                yield passage

    def n_kept(self, path: str) -> int:
        """Count a document's or a folder's passages that were taken from the index."""
        folder = f"{path.rstrip('/')}/"
        return sum(n for each, n in self.kept.items() if f"{each}/".startswith(folder))

    @property
    def window(self) -> dict[str, int | None]:
        """How well the passages read so far fit the model.

        ``tokens`` that it reads, None for all or if unknown; passages that are ``longer``;
        ``chunks`` made of them, None without splitting.
        """
        return {
            "tokens": None if self._window is None else self._window.tokens,
            "longer": self._longer,
            "chunks": self._chunks if self._chunk else None,
        }

    def _fitted(self) -> "Iterator[Passage]":
        from ctxguard.retrieval.chunks import chunked
        from ctxguard.retrieval.index.passages import (
            document_of,
            searchable_text,
            without_surrogates,
        )

        last = None
        if self._window is None:
            yield from self._reader
        elif self._chunk:
            for passage in chunked(self._reader, self._window):
                document = document_of(passage)
                if document is not None:
                    self._chunks += 1
                    if document != last:
                        self._longer += 1
                last = document
                yield passage
        else:
            for passage in self._reader:
                if self._window.is_longer(without_surrogates(searchable_text(passage))):
                    self._longer += 1
                yield passage

    @property
    def notes(self) -> list[str]:
        """Notes on copies, and on passages that are longer than the model reads."""
        notes = []
        if self.copies:
            copies = count(self.copies, "passage")
            notes.append(f"{copies} with the text of another: a context holds one of them")
        if self._window is not None and self._longer:
            which = f"passages longer than {self._window.tokens:,} tokens: {self._longer:,}"
            if self._chunk:
                notes.append(f"{which}, split into {self._chunks:,} chunks")
            else:
                notes.append(
                    f"{which}; their ends are not searched by vectors, and --chunk splits them"
                )
        return notes

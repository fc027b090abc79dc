"""``ctxguard index``: build the index folder of a corpus."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.filesize import decimal

from ctxguard.cli import _options
from ctxguard.cli._console import Output, print_json
from ctxguard.errors import ConfigurationError

if TYPE_CHECKING:
    from ctxguard.core.types import Passage
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever
    from ctxguard.retrieval.index.hybrid_index import Changes
    from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
    from ctxguard.retrieval.protocols import Progress


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("index")(index)


def index(
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help="Passages: a JSONL file, one passage a line with _id (or id), text and optionally "
            "title and metadata; or a BEIR folder, whose corpus.jsonl is read. Other formats are "
            "not read.",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Index folder to write; an index there is replaced.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Engine to index in, instead of a folder: postgresql://…, qdrant://… or "
            "milvus://…, with the index's name after #. An index there is never replaced. A key "
            "for its API is taken from the environment variable CTXGUARD_ENGINE_KEY.",
            show_default=False,
        ),
    ] = None,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Bring the index up to date with CORPUS: encode only what is new or has "
            "changed, delete what CORPUS no longer holds.",
        ),
    ] = False,
    chunk: Annotated[
        bool,
        typer.Option(
            "--chunk",
            help="Split passages that are longer than the model reads. A chunk has its parent's "
            "id with # and a number, and names its parent in the metadata as chunk_of.",
        ),
    ] = False,
    lexical: Annotated[
        Literal["bm25s", "rank-bm25"] | None,
        typer.Option(
            metavar="ENGINE", help="Lexical engine: bm25s or rank-bm25.", show_default="bm25s"
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="Language of the corpus for lexical search: en, da, de, es, fr, it, nl, no, pt, "
            "ru, sv or tr; cjk for Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese.",
            show_default="en",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Embedding model: a name, or a folder. For other languages than English give a "
            "multilingual one.",
            show_default="all-MiniLM-L6-v2",
        ),
    ] = None,
    exact_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Up to N passages dense search compares the query with every vector; above, with "
            "compressed codes first.",
            show_default="20,000",
        ),
    ] = None,
    signals: Annotated[
        Literal["full", "text", "none"] | None,
        typer.Option(
            metavar="LEVEL",
            help="What is kept to compute signals of relevance from: full; text, for the words of "
            "the passages without vectors of their sentences; or none.",
            show_default="full where the model allows, else text",
        ),
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Index a corpus for lexical and dense search."""
    output = Output(as_json=as_json)
    start = perf_counter()
    given = {
        "--lexical": lexical,
        "--language": language,
        "--model": model,
        "--exact-limit": exact_limit,
        "--signals": signals,
    }
    settings = [name for name, value in given.items() if value is not None]
    if update and settings:
        raise typer.BadParameter(
            "an update keeps what the index was built with; leave this out, or build the index "
            "anew without --update",
            param_hint=settings[0],
        )
    _check_destination(out, engine, settings)
    if out is None:
        _index_in_engine(
            corpus,
            str(engine),
            output,
            update=update,
            chunk=chunk,
            language=language,
            model=model,
            as_json=as_json,
        )
        return
    with output.doing("reading the corpus"):
        from calibration.data.readers import read_corpus
        from ctxguard.retrieval.analysers import analyser_for
        from ctxguard.retrieval.index.storage import check_destination

        # Saving checks it again, but only after the passages are encoded.
        check_destination(out)
        analyser = analyser_for(language or "en")
        reader = read_corpus(corpus)
        passages = list(reader)
    with output.doing("loading the model"):
        from ctxguard.retrieval.hybrid.retriever import HybridRetriever
        from ctxguard.retrieval.index.dense import EXACT_LIMIT
        from ctxguard.retrieval.models.embedder import named_embedder

        retriever = HybridRetriever.load(out) if update else None
        if retriever is not None:
            embedder = named_embedder(retriever.generation.embedder)
            chunk = chunk or _is_chunked(retriever)
        else:
            embedder = _embedder(model)
        dimension = embedder.dimension
    passages, window = _fitted(passages, embedder, output, chunk=chunk)
    if not update and signals in {None, "full"}:
        _prepare_word_pieces(embedder, output)
    build_start, changes = perf_counter(), None
    with _encoding(output, len(passages)) as progress:
        if retriever is not None:
            changes = retriever.upsert(passages, progress, delete_others=True)
        else:
            retriever = HybridRetriever.build(
                passages,
                embedder=embedder,
                lexical=lexical or "bm25s",
                analyser=analyser,
                exact_limit=EXACT_LIMIT if exact_limit is None else exact_limit,
                progress=progress,
                signals=signals,
            )
    n_encoded = retriever.report.indexed if changes is None else changes.encoded
    build_seconds = perf_counter() - build_start
    with output.doing("saving"):
        retriever.save(out)
    with output.doing("compiling the search, once on this machine"):
        retriever.warm_up()
    built = _Built(
        retriever=retriever,
        folder=out,
        changes=changes,
        dimension=dimension,
        search="exact" if retriever.is_exact else "codes",
        window=window,
        seconds=perf_counter() - start,
        passages_per_second=n_encoded / build_seconds,
        notes=(*reader.notes, *window.notes(), *_language_notes(retriever, model)),
    )
    if as_json:
        print_json(built.to_dict())
    else:
        output.facts(built.facts())
    for note in built.notes:
        output.note(note)


def _check_destination(out: Path | None, engine: str | None, settings: list[str]) -> None:
    """Refuse two destinations or none, and settings that an engine does not take.

    Args:
        out: The folder.
        engine: The engine.
        settings: The options of an index that were given.
    """
    if (out is None) == (engine is None):
        raise typer.BadParameter("give --out FOLDER or --engine URL", param_hint="--out, --engine")
    for name in ("--lexical", "--exact-limit", "--signals"):
        if engine is not None and name in settings:
            raise typer.BadParameter("has no effect with --engine", param_hint=name)


def _index_in_engine(
    corpus: Path,
    url: str,
    output: Output,
    *,
    update: bool,
    chunk: bool,
    language: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Index a corpus in an engine, and print what was done."""
    from calibration.data.readers import read_corpus
    from ctxguard.integrations.engines.address import EngineAddress
    from ctxguard.integrations.engines.retriever import EngineRetriever
    from ctxguard.retrieval.models.embedder import named_embedder

    start, address = perf_counter(), EngineAddress.parse(url)
    with output.doing("opening the engine"):
        retriever = EngineRetriever.open(url, signals="none") if update else None
    with output.doing("reading the corpus"):
        reader = read_corpus(corpus)
        passages = list(reader)
    with output.doing("loading the model"):
        embedder = _embedder(model) if retriever is None else named_embedder(retriever.embedder)
    if retriever is not None and not chunk:
        ids = [each.passage_id for each in passages]
        chunk = bool(retriever.labelled_ids(ids) - retriever.known_ids(ids))
    passages, window = _fitted(passages, embedder, output, chunk=chunk)
    changes = None
    with _encoding(output, len(passages)) as progress:
        if retriever is None:
            retriever = EngineRetriever.build(
                passages,
                url,
                embedder=embedder,
                analyser=language or "en",
                progress=progress,
                signals="none",
            )
        else:
            changes = retriever.upsert(passages, progress, delete_others=True)
    with retriever:
        n_passages, fingerprint = len(retriever), retriever.fingerprint()
    notes = [*reader.notes, *window.notes()]
    seconds = perf_counter() - start
    if as_json:
        print_json(
            {
                "engine": address.shown,
                "passages": n_passages,
                **({} if changes is None else {"update": asdict(changes)}),
                "window": asdict(window),
                "seconds": seconds,
                "fingerprint": fingerprint,
                "notes": notes,
            }
        )
    else:
        output.facts(
            [
                ("engine", address.shown),
                ("passages", f"{n_passages:,}"),
                *_changes(changes),
                ("embedder", f"{fingerprint['embedder']} {fingerprint['embedder_weights'][:12]}"),
                ("analyser", fingerprint["analyser"]),
                ("took", f"{seconds:.1f} s"),
            ]
        )
    for note in notes:
        output.note(note)


def _changes(changes: "Changes | None") -> list[tuple[str, str]]:
    """What an update did, as a line of facts; none for a new index."""
    if changes is None:
        return []
    return [("update", ", ".join(f"{n:,} {what}" for what, n in asdict(changes).items()))]


def _prepare_word_pieces(embedder: "SentenceTransformerEmbedder", output: Output) -> None:
    """Have the model's token table made before the passages are counted, where it gives one."""
    with output.doing("reading the model's word pieces, once on this machine"):
        encoder = embedder.token_encoder()
        if encoder is not None:
            encoder.token_table()


def _embedder(model: str | None) -> "SentenceTransformerEmbedder":
    from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

    # A folder's name must still find it when the index is opened from elsewhere.
    is_folder = model is not None and Path(model).is_dir()
    return SentenceTransformerEmbedder(Path(str(model)).resolve() if is_folder else model)


@contextmanager
def _encoding(output: Output, n_passages: int) -> "Iterator[Progress]":
    """A bar of the passages encoded so far, full at the end: what is there is not encoded."""
    with output.passes() as begin:
        advance = begin("encoding passages", n_passages)
        encoded = 0

        def progress(done: int) -> None:
            nonlocal encoded
            advance(done - encoded)
            encoded = done

        yield progress
        advance(n_passages - encoded)


def _is_chunked(retriever: "HybridRetriever") -> bool:
    """Whether an index holds chunks of longer passages."""
    from ctxguard.retrieval.chunks import CHUNK_OF

    rows = retriever.generation.passages.metadata_rows
    rows.prepare([CHUNK_OF])
    return CHUNK_OF in rows.fields


@dataclass(frozen=True)
class _Window:
    """How the passages fit what the model reads.

    Attributes:
        tokens: How many tokens it reads; None for all, or where that is not known.
        longer: Passages that are longer.
        chunks: Chunks that were made of longer passages; None without ``--chunk``.
    """

    tokens: int | None
    longer: int
    chunks: int | None

    def notes(self) -> list[str]:
        if self.longer == 0:
            return []
        which = f"passages longer than {self.tokens:,} tokens: {self.longer:,}"
        if self.chunks is None:
            return [f"{which}; their ends are not searched by vectors, and --chunk splits them"]
        return [f"{which}, split into {self.chunks:,} chunks"]


def _fitted(
    passages: "list[Passage]",
    embedder: "SentenceTransformerEmbedder",
    output: Output,
    *,
    chunk: bool,
) -> "tuple[list[Passage], _Window]":
    """The passages to index, split where that is asked for, and how they fit the model.

    Raises:
        ConfigurationError: chunks are asked for, and how much the model reads is not known.
    """
    from ctxguard.retrieval.chunks import chunked, document_of
    from ctxguard.retrieval.index.passages import searchable_text, without_surrogates

    window = embedder.passage_window
    if window is None:
        if chunk:
            raise ConfigurationError(
                f"--chunk: how many tokens {embedder.name} reads is not known; leave it out"
            )
        return passages, _Window(None, 0, None)
    with output.doing("splitting long passages" if chunk else "counting tokens"):
        if not chunk:
            texts = map(without_surrogates, map(searchable_text, passages))
            return passages, _Window(window.tokens, window.count_longer(texts), None)
        split = list(chunked(passages, window))
    documents = [each for each in map(document_of, split) if each is not None]
    return split, _Window(window.tokens, len(set(documents)), len(documents))


@dataclass(frozen=True)
class _Built:
    """An index that was built or brought up to date, and how long it took.

    Attributes:
        changes: What an update did; None for a new index.
        seconds: In all, with reading the corpus and loading the model.
        passages_per_second: Encoded passages, by the time of encoding and building alone.
    """

    retriever: "HybridRetriever"
    folder: Path
    changes: "Changes | None"
    dimension: int
    search: str
    window: _Window
    seconds: float
    passages_per_second: float
    notes: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def to_dict(self) -> dict[str, object]:
        report = self.retriever.report
        return {
            "index": str(self.folder),
            "passages": report.indexed,
            **({} if self.changes is None else {"update": asdict(self.changes)}),
            "left_out": {"neither title nor text": report.empty},
            "repaired": report.repaired,
            "unhandled_letters": report.unhandled_letters,
            "vectors": {"dimension": self.dimension, "search": self.search},
            "signals": self.retriever.generation.signals,
            "window": asdict(self.window),
            "size_bytes": self.size_bytes,
            "seconds": self.seconds,
            "passages_per_second": self.passages_per_second,
            "fingerprint": self.retriever.fingerprint(),
            "notes": list(self.notes),
        }

    def facts(self) -> list[tuple[str, str]]:
        report, fingerprint = self.retriever.report, self.retriever.fingerprint()
        why = " (neither title nor text)" if report.empty else ""
        return [
            ("index", f"{self.folder}, {decimal(self.size_bytes)}"),
            ("passages", f"{report.indexed:,}"),
            *_changes(self.changes),
            ("left out", f"{report.empty:,}{why}"),
            ("vectors", f"{self.dimension} dimensions, {self.search} search"),
            ("signals", self.retriever.generation.signals),
            ("embedder", f"{fingerprint['embedder']} {fingerprint['embedder_weights'][:12]}"),
            ("lexical", fingerprint["lexical"]),
            ("corpus", f"sha256 {fingerprint['corpus_digest'][:12]}"),
            ("took", f"{self.seconds:.1f} s, {self.passages_per_second:,.0f} passages/s"),
        ]


def _language_notes(retriever: "HybridRetriever", model: str | None) -> list[str]:
    warning, language = retriever.report.script_warning, retriever.analyser.name
    notes = [] if warning is None else [warning]
    if model is None and language != "en":
        notes.append(
            f"the vectors are of all-MiniLM-L6-v2, which was trained on English, and the language "
            f"is {language}; give --model a multilingual model"
        )
    return notes

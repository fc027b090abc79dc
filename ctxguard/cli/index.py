"""``ctxguard index``: build the index folder of a corpus."""

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.filesize import decimal

from ctxguard.cli import _options
from ctxguard.cli._console import Output, print_json

if TYPE_CHECKING:
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("index")(index)


def index(
    corpus: Annotated[
        Path,
        typer.Argument(
            metavar="CORPUS",
            help="Passages: a BEIR folder, or a JSONL file with _id, title and text.",
        ),
    ],
    *,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Index folder to write; an index there is replaced."),
    ],
    lexical: Annotated[
        Literal["bm25s", "rank-bm25"],
        typer.Option(metavar="ENGINE", help="Lexical engine: bm25s or rank-bm25."),
    ] = "bm25s",
    language: Annotated[
        str,
        typer.Option(
            metavar="CODE",
            help="Language of the corpus for lexical search: en, da, de, es, fr, it, nl, no, pt, "
            "ru, sv or tr; cjk for Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese.",
        ),
    ] = "en",
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
    as_json: _options.AsJson = False,
) -> None:
    """Index a corpus for lexical and dense search."""
    output = Output(as_json=as_json)
    start = perf_counter()
    with output.doing("reading the corpus"):
        from calibration.data.readers import read_corpus
        from ctxguard.retrieval.analysers import analyser_for
        from ctxguard.retrieval.index.storage import check_destination

        # Saving checks it again, but only after the passages are encoded.
        check_destination(out)
        analyser = analyser_for(language)
        reader = read_corpus(corpus)
        passages = list(reader)
    with output.doing("loading the model"):
        from ctxguard.retrieval.hybrid.retriever import HybridRetriever
        from ctxguard.retrieval.index.dense import EXACT_LIMIT
        from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder

        # A folder's name must still find it when the index is opened from elsewhere.
        is_folder = model is not None and Path(model).is_dir()
        embedder = SentenceTransformerEmbedder(Path(str(model)).resolve() if is_folder else model)
        dimension = embedder.dimension
    limit = EXACT_LIMIT if exact_limit is None else exact_limit
    build_start = perf_counter()
    with output.passes() as begin:
        advance = begin("encoding passages", len(passages))
        encoded = 0

        def progress(done: int) -> None:
            nonlocal encoded
            advance(done - encoded)
            encoded = done

        retriever = HybridRetriever.build(
            passages,
            embedder=embedder,
            lexical=lexical,
            analyser=analyser,
            exact_limit=limit,
            progress=progress,
        )
        advance(len(passages) - encoded)
    build_seconds = perf_counter() - build_start
    with output.doing("saving"):
        retriever.save(out)
    built = _Built(
        retriever=retriever,
        folder=out,
        dimension=dimension,
        search="exact" if retriever.is_exact else "codes",
        seconds=perf_counter() - start,
        passages_per_second=retriever.report.indexed / build_seconds,
        notes=(*reader.notes, *_language_notes(retriever, model)),
    )
    if as_json:
        print_json(built.to_dict())
    else:
        output.facts(built.facts())
    for note in built.notes:
        output.note(note)


@dataclass(frozen=True)
class _Built:
    """A new index, and how long it took.

    Attributes:
        seconds: In all, with reading the corpus and loading the model.
        passages_per_second: Of encoding and building alone.
    """

    retriever: "HybridRetriever"
    folder: Path
    dimension: int
    search: str
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
            "left_out": {"neither title nor text": report.empty},
            "repaired": report.repaired,
            "unhandled_letters": report.unhandled_letters,
            "vectors": {"dimension": self.dimension, "search": self.search},
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
            ("left out", f"{report.empty:,}{why}"),
            ("vectors", f"{self.dimension} dimensions, {self.search} search"),
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

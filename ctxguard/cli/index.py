"""``ctxguard index``: a corpus becomes a folder that can be searched."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli._console import Output, print_json, size
from ctxguard.errors import IndexFolderError

if TYPE_CHECKING:
    from ctxguard.retrieval.hybrid import HybridRetriever


class Lexical(StrEnum):
    """The lexical engines."""

    BM25S = "bm25s"
    RANK_BM25 = "rank-bm25"


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("index")(index)


def index(
    corpus: Annotated[Path, typer.Argument(help="BEIR folder, or JSONL with _id, title, text.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder for the index; an index there is replaced.")],
    lexical: Annotated[Lexical, typer.Option(help="The lexical engine.")] = Lexical.BM25S,
    model: Annotated[
        str | None,
        typer.Option(help="Embedding model, by name or folder. (default: all-MiniLM-L6-v2)"),
    ] = None,
    exact_limit: Annotated[
        int | None,
        typer.Option(
            min=0, help="Passages above which codes are compared first. (default: 20,000)"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Index a corpus for lexical and dense search."""
    output = Output(as_json=as_json)
    _refuse_other_content(out)
    start = perf_counter()
    with output.doing("reading the corpus"):
        from calibration.labelling.datasets import read_corpus

        reader = read_corpus(corpus)
        passages = list(reader)
    with output.doing("loading the model"):
        from ctxguard.retrieval.dense import EXACT_LIMIT
        from ctxguard.retrieval.embedder import SentenceTransformerEmbedder
        from ctxguard.retrieval.hybrid import HybridRetriever

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
            lexical=lexical.value,
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
        search="exact" if retriever.compares_every_vector else "codes",
        seconds=perf_counter() - start,
        passages_per_second=retriever.report.indexed / build_seconds,
        notes=reader.notes,
    )
    if as_json:
        print_json(built.to_dict())
    else:
        output.facts(built.facts())
    for note in built.notes:
        output.note(note)


@dataclass(frozen=True)
class _Built:
    """What came of an indexing.

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
            "vectors": {"dimension": self.dimension, "search": self.search},
            "size_bytes": self.size_bytes,
            "seconds": round(self.seconds, 3),
            "passages_per_second": round(self.passages_per_second, 1),
            "fingerprint": self.retriever.fingerprint(),
            "notes": list(self.notes),
        }

    def facts(self) -> list[tuple[str, str]]:
        report, fingerprint = self.retriever.report, self.retriever.fingerprint()
        why = " (neither title nor text)" if report.empty else ""
        return [
            ("index", f"{self.folder}, {size(self.size_bytes)}"),
            ("passages", f"{report.indexed:,}"),
            ("left out", f"{report.empty:,}{why}"),
            ("vectors", f"{self.dimension} dimensions, {self.search} search"),
            ("embedder", f"{fingerprint['embedder']} {fingerprint['embedder_weights'][:12]}"),
            ("lexical", fingerprint["lexical"]),
            ("corpus", f"sha256 {fingerprint['corpus_digest'][:12]}"),
            ("took", f"{self.seconds:.1f} s, {self.passages_per_second:,.0f} passages/s"),
        ]


def _refuse_other_content(out: Path) -> None:
    """Refuse what saving would refuse, before the passages are encoded."""
    if not out.exists():
        return
    if not out.is_dir():
        raise IndexFolderError(f"{out} is a file; an index is a folder")
    entries = [entry.name for entry in out.iterdir()]
    if entries and not any(
        name == "manifest.json" or name.startswith("generation-") for name in entries
    ):
        raise IndexFolderError(
            f"{out} holds files that are no part of an index ({min(entries)!r}, {len(entries)} in "
            "all); give a folder of its own"
        )

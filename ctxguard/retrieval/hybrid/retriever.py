"""Builds, loads, updates and searches the embedded hybrid index (DESIGN.md §2 and §5).

Views of a retriever share the index's changes, the threads and the circuit breakers. Reads and
writes the index's folder, and loads and calls the models.
"""

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypedDict, Unpack

from ctxguard._support.fork_safety import OfProcess
from ctxguard._support.regular_file import FileVersion, file_version
from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.types import Passage, Route, id_text
from ctxguard.errors import ConfigurationError, IndexFolderError
from ctxguard.resilience.breaker import Watcher
from ctxguard.resilience.deadlines import Deadlines
from ctxguard.resilience.stage import WORKERS, Stage
from ctxguard.resilience.threads import processors
from ctxguard.retrieval.analysers import LANGUAGES, as_analyser
from ctxguard.retrieval.hybrid.pipeline import Hybrid
from ctxguard.retrieval.hybrid.search import LEG_KINDS, STAGES, Search, SearchSettings
from ctxguard.retrieval.index.dense import EXACT_LIMIT
from ctxguard.retrieval.index.hybrid_index import Changes, HybridIndex, SignalLevel, check_embedder
from ctxguard.retrieval.index.lexical import LexicalEngine
from ctxguard.retrieval.index.passages import (
    BuildReport,
    document_of,
    is_chunk_id,
    searchable_text,
)
from ctxguard.retrieval.index.storage import manifest_file
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
from ctxguard.retrieval.models.files import portable_name
from ctxguard.retrieval.protocols import (
    Analyser,
    BuildProgress,
    Embedder,
    Float32Array,
    QueryStates,
    Reranker,
    token_encoder_of,
)
from ctxguard.retrieval.signals import Ranker

_MAX_OPENINGS = 20


class HybridOptions(TypedDict, total=False):
    """The options of every hybrid retriever; None selects an option's default.

    Attributes:
        fusion: Combines the legs' scores; by default the pooled ranker if the index has signals,
            else reciprocal ranks.
        reranker: Scores the best candidates again; by default nothing does.
        rerank_depth: Number of candidates that the reranker scores, by default 50. A ranking has
            one kind of score, so a reranked one holds at most these.
        max_query_chars: The longest accepted query, by default 10,000 characters.
        deadlines: Time limits on the search and its stages, by default none.
        ranker: The weights by which fusion ``ranker`` orders, by default those of the package.
    """

    fusion: Fusion | None
    reranker: Reranker | None
    rerank_depth: int
    max_query_chars: int
    deadlines: Deadlines | None
    ranker: Ranker | None


class _Shared:
    """The state that all views of one retriever share.

    An index never changes: an update or a reload replaces one reference, which a request reads
    once, so that each request uses a single generation. The legs' threads and circuits stay.
    """

    writing = OfProcess(Lock)  # held while the index is replaced

    def __init__(self, index: HybridIndex) -> None:
        self.index = index
        self.folder: Path | None = None  # that it was opened from
        self.version: FileVersion | None = None  # of the manifest there
        self.legs = {leg: Stage(leg, workers=leg_threads(), spare=WORKERS) for leg in LEG_KINDS}

    def swap(self, index: HybridIndex) -> None:
        """Answer from another index from now on."""
        # The fields in use are read before the index answers, so that no request waits for them.
        index.passages.metadata_rows.prepare(self.index.passages.metadata_rows.fields)
        self.index = index


class HybridRetriever(Hybrid):
    """BM25 and vector search over one set of passages, fused, and optionally reranked.

    Safe to use from several threads at once, also while the index is updated.

    Raises:
        ConfigurationError: the embedder is not the index's, or an option is out of range.
    """

    def __init__(
        self, index: HybridIndex, *, embedder: Embedder, **options: Unpack[HybridOptions]
    ) -> None:
        check_embedder(index.embedder, index.embedder_weights, embedder)
        given: dict[str, Any] = {k: value for k, value in options.items() if value is not None}
        given.setdefault("fusion", Fusion() if index.signals == "none" else Fusion("ranker"))
        route = Route.HYBRID_RERANK if "reranker" in given else Route.HYBRID
        self._settings = SearchSettings(embedder=embedder, stages=STAGES[route], **given)
        self._shared = _Shared(index)
        self._pinned: HybridIndex | None = None

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        *,
        embedder: Embedder | None = None,
        lexical: LexicalEngine = "bm25s",
        analyser: Analyser | str = "en",
        exact_limit: int = EXACT_LIMIT,
        progress: BuildProgress | None = None,
        signals: SignalLevel = "full",
        **options: Unpack[HybridOptions],
    ) -> Self:
        """Index passages for both legs.

        Passages without text and title are left out, and lone surrogates are replaced; ``report``
        counts both.

        Args:
            passages: In any order; each with an id of its own.
            embedder: None for all-MiniLM-L6-v2.
            lexical: ``bm25s``, or ``rank-bm25``, which is far slower on large corpora.
            analyser: A code of `ctxguard.retrieval.analysers.LANGUAGES`, such as ``de``, or ``cjk``
                for scripts without spaces between words; or an analyser of your own.
            exact_limit: Up to this many passages the dense leg compares every vector; above it,
                codes come first.
            progress: Called with the number of passages encoded so far, and of all to encode.
            signals: ``full`` computes the candidates' signals, by which the ranker orders; ``none``
                leaves only the legs' scores.
            options: See `HybridOptions`.

        Raises:
            DataError: an empty corpus, a repeated id, or vectors with NaN or an infinity.
            ConfigurationError: an unknown language or engine, or vectors of the wrong shape.
        """
        embedder = SentenceTransformerEmbedder() if embedder is None else embedder
        index = HybridIndex.build(
            passages,
            embedder=embedder,
            engine=lexical,
            analyser=as_analyser(analyser),
            exact_limit=exact_limit,
            progress=progress,
            signals=signals,
        )
        return cls(index, embedder=embedder, **options)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        embedder: Embedder | None = None,
        analyser: Analyser | str | None = None,
        **options: Unpack[HybridOptions],
    ) -> Self:
        """Open a saved index: check every file by its digest, and map the large ones.

        Args:
            folder: A folder that ``save`` wrote.
            embedder: None for the sentence-transformers model that the index names.
            analyser: The one that the index was built with, if that was an analyser of your own;
                None for the language that the index names.
            options: See `HybridOptions`.

        Raises:
            IndexFolderError: not a saved index, or one that is incomplete or damaged.
            ConfigurationError: another embedder or analyser than the index's.
        """
        given = None if analyser is None else as_analyser(analyser)
        index, version = _opened(Path(folder), given)
        if embedder is None:
            embedder = SentenceTransformerEmbedder(index.embedder)
        loaded = cls(index, embedder=embedder, **options)
        loaded._shared.folder, loaded._shared.version = Path(folder), version
        return loaded

    def reload(self, folder: Path | str | None = None) -> bool:
        """Replace the index with the one now in a folder, for every view at once.

        The new index is opened and checked first. The old one answers meanwhile, and finishes its
        requests even if its files are deleted. An update since the last ``save`` is lost.

        Args:
            folder: None for the folder that this retriever was loaded from.

        Returns:
            Whether the folder held a different index from the one opened last.

        Raises:
            ConfigurationError: no folder is known.
            CtxguardError: As for ``load``; the old index stays in use.
        """
        shared = self._shared
        folder = shared.folder if folder is None else Path(folder)
        if folder is None:
            raise ConfigurationError(
                "this retriever was built in memory, so there is no folder to reload; pass one"
            )
        with shared.writing:
            if folder == shared.folder and _version_of(folder) == shared.version is not None:
                return False
            analyser = shared.index.lexical.analyser
            is_own = analyser.name not in LANGUAGES or analyser is not as_analyser(analyser.name)
            index, version = _opened(folder, analyser if is_own else None)
            check_embedder(index.embedder, index.embedder_weights, self._settings.embedder)
            shared.swap(index)
            shared.folder, shared.version = folder, version
        return True

    @property
    def folder(self) -> Path | None:
        """The folder that the index was loaded from; None if it was built in memory."""
        return self._shared.folder

    @property
    def generation(self) -> HybridIndex:
        """The index in use; a new object after every update or reload."""
        return self._pinned or self._shared.index

    def pinned(self) -> Self:
        """Return a view of this retriever fixed to the current index."""
        view = copy.copy(self)
        view._pinned = self.generation
        return view

    def save(self, folder: Path | str) -> None:
        """Save the index as a folder of plain files, replacing any existing index.

        Raises:
            IndexFolderError: the folder holds something else, or cannot be written.
        """
        self.generation.save(Path(folder))

    def with_deadlines(self, deadlines: Deadlines | None) -> Self:
        """Return a view with different time limits; None disables them."""
        return self._view(deadlines=deadlines)

    def watch_stages(self, watcher: Watcher) -> None:
        """Call ``watcher`` whenever a stage's circuit breaker opens or closes."""
        super().watch_stages(watcher)
        for stage in self._shared.legs.values():
            stage.watch(watcher)

    @property
    def concurrency(self) -> int:
        """The most concurrent calls worth a thread of their own, apart from those of the legs."""
        return processors() + 2 - 2 * leg_threads()

    @property
    def embedder(self) -> str:
        """The name of the model that made the index's vectors."""
        return self.generation.embedder

    @property
    def signals(self) -> SignalLevel:
        """The level of the candidates' signals; see ``Ranking.signals``."""
        return self.generation.signals

    @property
    def report(self) -> BuildReport:
        """The numbers of passages that the build indexed, left out and repaired."""
        return self.generation.report

    @property
    def analyser(self) -> Analyser:
        """Splits passages and queries into the terms that lexical search matches."""
        return self.generation.lexical.analyser

    @property
    def passage_ids(self) -> tuple[str, ...]:
        """Every passage id, ascending."""
        return self.generation.passages.ids

    @property
    def labelled_ids(self) -> frozenset[str]:
        """The ids that labels may name: those of all passages, and of documents in chunks."""
        passages = self.generation.passages
        rows = [row for row, each in enumerate(passages.ids) if is_chunk_id(each)]
        documents = [document_of(passages[row]) for row in rows]
        return frozenset(passages.ids).union(each for each in documents if each is not None)

    def __len__(self) -> int:
        return len(self.generation.passages)

    def passage(self, passage_id: str) -> Passage:
        """Return the passage with this id; raise a ``KeyError`` if there is none."""
        passages = self.generation.passages
        row = passages.row_of(id_text(passage_id))
        if row is None:
            raise KeyError(passage_id)
        return passages[row]

    def stored_passages(self) -> Iterator[Passage]:
        """Return all passages, in the order of their ids."""
        return iter(self.generation.passages)

    def update(self, passages: Iterable[Passage], progress: BuildProgress | None = None) -> Changes:
        """Build the next generation from exactly these passages, and answer from it.

        Only new texts are encoded. Searches continue meanwhile. Afterwards they find what a freshly
        built index would find, and every view of this retriever changes at once. ``save`` makes the
        generation durable. Arguments as for ``build``.

        Raises:
            DataError: passages cannot be indexed; the index is unchanged.
        """
        with self._shared.writing:
            index, changes = self._shared.index.updated(passages, self._settings.embedder, progress)
            self._shared.swap(index)
        return changes

    def fingerprint(self) -> dict[str, str]:
        """Return everything on which the scores depend, by name.

        A profile applies to a retriever with an equal fingerprint, but for the corpus:
        ``corpus_sketch`` tells how much of it has changed.
        """
        index, reranker = self.generation, self._settings.reranker
        return {
            "embedder": portable_name(index.embedder),
            "embedder_weights": index.embedder_weights,
            "lexical": index.lexical.fingerprint,
            "fusion": self._fusion_in_words(),
            "reranker": "none" if reranker is None else reranker.fingerprint,
            "corpus_size": str(len(index.passages)),
            "corpus_digest": index.passages.digest,
        }

    def corpus_sketch(self) -> CorpusSketch:
        """Return a sketch of all passages, which shows how many changed since calibration."""
        return self.generation.passages.sketch

    def warm_up(self, *, filter_fields: Iterable[str] = ()) -> None:
        """Load the models, so that the first query does not wait; no deadline applies.

        Args:
            filter_fields: Names of the metadata that filters will use, read in one pass over all
                passages (0.4 s for 100,000) so that the first filter need not wait; a replacing
                index reads them before it answers. One that no passage has is not an error.

        Raises:
            ConfigurationError: ``filter_fields`` is a single string.
        """
        if isinstance(filter_fields, str):
            raise ConfigurationError(
                f"filter_fields takes a list of names; give [{filter_fields!r}]"
            )
        index, settings = self.generation, self._settings
        index.passages.metadata_rows.prepare(filter_fields)
        query = searchable_text(index.passages[0])[: settings.max_query_chars]
        self.with_deadlines(None).retrieve(query)

    def _search(
        self,
        query: str,
        depth: int,
        query_vector: Float32Array | QueryStates | None = None,
        where: Where | None = None,
    ) -> Search:
        index = self.generation
        pieces, embedder = index.pieces, self._settings.embedder
        return Search(
            settings=self._settings,
            query=query,
            depth=min(depth, len(index.passages.ids)),
            given=query_vector,
            dimension=index.dense.dimension,
            encoder=None if pieces is None else token_encoder_of(embedder),
            passages=index.passages,
            index=index,
            stages=self._shared.legs,
            allowed=None if where is None else index.passages.metadata_rows.allowed(where),
        )


def leg_threads() -> int:
    """Return how many threads each leg with a time limit has.

    With `HybridRetriever.concurrency` that makes two threads more than processors: further numpy
    threads would only delay each other and the event loop.
    """
    return max(1, (processors() + 2) // 4)


def _opened(folder: Path, analyser: Analyser | None) -> tuple[HybridIndex, FileVersion | None]:
    """Open the index in a folder, with its manifest's version; retry if a save replaces it."""
    for _ in range(_MAX_OPENINGS):
        version = _version_of(folder)
        try:
            return HybridIndex.load(folder, analyser=analyser), version
        except IndexFolderError:
            # Saving deletes the previous generation, perhaps while it is being read here.
            if _version_of(folder) == version:
                raise
    raise IndexFolderError(
        f"{folder} was saved again {_MAX_OPENINGS} times while it was being opened; save less often"
    )


def _version_of(folder: Path) -> FileVersion | None:
    return file_version(manifest_file(folder))

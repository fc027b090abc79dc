"""The embedded hybrid retriever: both legs side by side, every candidate scored in both.

DESIGN.md §2 and §5. A leg that fails is left out of the answer and named in it; the route says
which stages answered.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

from ctxguard.errors import (
    ConfigurationError,
    FilterViolationError,
    IndexFolderError,
    QueryError,
)
from ctxguard.forks import start_afresh_in_children
from ctxguard.fusion import Fusion
from ctxguard.retrieval import storage
from ctxguard.retrieval.dense import EXACT_LIMIT
from ctxguard.retrieval.embedder import (
    SentenceTransformerEmbedder,
    named_embedder,
    portable_name,
)
from ctxguard.retrieval.index import HybridIndex
from ctxguard.retrieval.legs import (
    RERANK,
    ROUTES,
    STAGES,
    LegStages,
    rerank,
    rerank_stage,
    search_legs,
)
from ctxguard.retrieval.lexical import LexicalEngine
from ctxguard.retrieval.passages import (
    BuildReport,
    PassageTable,
    searchable_text,
    without_surrogates,
)
from ctxguard.retrieval.protocols import (
    Embedder,
    Float32Array,
    Progress,
    Reranker,
    RowArray,
)
from ctxguard.stages import Deadlines, Watcher
from ctxguard.stamps import Stamp, file_stamp
from ctxguard.types import DEFAULT_DEPTH, Passage, Ranking, Route, StageFailure
from ctxguard.where import Where

DEFAULT_RERANK_DEPTH = 50
DEFAULT_MAX_QUERY_CHARS = 10_000

_MAX_OPENINGS = 20


class _Live:
    """What every view of one retriever shares."""

    def __init__(self, index: HybridIndex) -> None:
        self.index = index
        self.folder: Path | None = None
        self.stamp: Stamp | None = None
        self.legs = LegStages()
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Take a new lock: another thread may have held it when this process was forked."""
        self.writing = Lock()

    def swap(self, index: HybridIndex) -> None:
        """Answer from another index; one reference, so that a request sees one of the two."""
        fields = self.index.passages.metadata_rows.fields
        index.passages.metadata_rows.prepare(fields)
        self.index = index


@dataclass(frozen=True, slots=True)
class _Rows:
    """A ranking's passages, each read from the table when it is asked for."""

    table: PassageTable
    rows: RowArray

    def __getitem__(self, position: int, /) -> Passage:
        return self.table[int(self.rows[position])]


class HybridRetriever:
    """BM25 and vectors over one set of passages, fused, and reranked if asked.

    Safe to use from several threads at once, also while passages are added and deleted.

    Args:
        index: What is searched.
        embedder: The model that made the index's vectors.
        fusion: How the legs' scores become one.
        reranker: Scores the best candidates once more; None for none.
        rerank_depth: How many candidates the reranker scores. A ranking has one kind of score,
            so a reranked one holds these and no others.
        max_query_chars: Longer queries are refused.
        deadlines: Limits of time on the search and its stages; none unless given.

    Raises:
        ConfigurationError: another embedder than the index's, or a setting out of range.
    """

    def __init__(
        self,
        index: HybridIndex,
        *,
        embedder: Embedder,
        fusion: Fusion = Fusion(),  # noqa: B008  frozen
        reranker: Reranker | None = None,
        rerank_depth: int = DEFAULT_RERANK_DEPTH,
        max_query_chars: int = DEFAULT_MAX_QUERY_CHARS,
        deadlines: Deadlines = Deadlines(),  # noqa: B008  frozen
    ) -> None:
        index.check_embedder(embedder)
        _check_positive("rerank_depth", rerank_depth)
        _check_positive("max_query_chars", max_query_chars)
        self._live = _Live(index)
        self._pinned: HybridIndex | None = None
        self._embedder = embedder
        self._fusion = fusion
        self._reranker = reranker
        self._rerank_depth = rerank_depth
        self._max_query_chars = max_query_chars
        self._deadlines = deadlines
        self._rerank_stage = rerank_stage()
        self._stages = STAGES[Route.HYBRID if reranker is None else Route.HYBRID_RERANK]

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        *,
        embedder: Embedder | None = None,
        lexical: LexicalEngine = "bm25s",
        exact_limit: int = EXACT_LIMIT,
        progress: Progress | None = None,
    ) -> Self:
        """Index passages in both legs.

        Passages without text and title are left out and counted, lone surrogates are replaced
        and counted: see ``report``.

        Args:
            passages: In any order; each with an id of its own.
            embedder: None for all-MiniLM-L6-v2.
            lexical: ``bm25s``, or ``rank-bm25``, which is far slower on large corpora.
            exact_limit: Passages above which the dense leg compares vectors by codes first.
            progress: Told how many passages are encoded so far.

        Raises:
            DataError: an empty corpus, a repeated id, or vectors that are no numbers.
        """
        embedder = SentenceTransformerEmbedder() if embedder is None else embedder
        index = HybridIndex.build(
            passages,
            embedder=embedder,
            engine=lexical,
            exact_limit=exact_limit,
            progress=progress,
        )
        return cls(index, embedder=embedder)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        embedder: Embedder | None = None,
        fusion: Fusion = Fusion(),  # noqa: B008  frozen
        reranker: Reranker | None = None,
        rerank_depth: int = DEFAULT_RERANK_DEPTH,
        verify: bool | None = None,
    ) -> Self:
        """Open a saved index, memory-mapped.

        Args:
            folder: What ``save`` wrote.
            embedder: None for the sentence-transformers model that the index names.
            fusion: How the legs' scores become one.
            reranker: See the class.
            rerank_depth: See the class.
            verify: Whether the digest of every file is checked, beside its size, which always
                is. None: for indexes up to 256 MiB.

        Raises:
            IndexFolderError: not a saved index, or one that is incomplete or damaged.
            ConfigurationError: another embedder than the index's.
        """
        index, stamp = _open(Path(folder), verify)
        loaded = cls(
            index,
            embedder=named_embedder(index.embedder) if embedder is None else embedder,
            fusion=fusion,
            reranker=reranker,
            rerank_depth=rerank_depth,
        )
        loaded._live.folder, loaded._live.stamp = Path(folder), stamp
        return loaded

    def reload(self, folder: Path | str | None = None, *, verify: bool | None = None) -> bool:
        """Answer from the generation that a folder holds now, for every view at once.

        The new generation is opened and checked beside the old one, which answers until then and
        finishes the requests that it began; its files may be deleted meanwhile. What was added
        or deleted here and not saved is lost then.

        Args:
            folder: None for the one that this retriever was loaded from.
            verify: As in ``load``.

        Returns:
            Whether there was another generation than the one that was opened last.

        Raises:
            ConfigurationError: no folder is known, or the index was made by another embedder;
                the index that was there before goes on answering.
            IndexFolderError: as ``load``; likewise.
        """
        known = self._live.folder if folder is None else Path(folder)
        if known is None:
            raise ConfigurationError(
                "this retriever was built in memory, so there is no folder to reload; give one"
            )
        live = self._live
        with live.writing:
            if known == live.folder and _stamp(known) == live.stamp is not None:
                return False
            index, stamp = _open(known, verify)
            index.check_embedder(self._embedder)
            live.swap(index)
            live.folder, live.stamp = known, stamp
        return True

    @property
    def folder(self) -> Path | None:
        """Where the passages were loaded from; None for what was built in memory."""
        return self._live.folder

    @property
    def compares_every_vector(self) -> bool:
        """Whether the dense leg is exact; above ``exact_limit`` codes are compared first."""
        return self._index.dense.is_exact

    @property
    def generation(self) -> object:
        """Stands for what is searched: another object after every change of the passages."""
        return self._index

    def pinned(self) -> Self:
        """The same retriever over the passages of this moment, whatever changes later."""
        view = copy.copy(self)
        view._pinned = self._index
        return view

    @property
    def _index(self) -> HybridIndex:
        return self._pinned or self._live.index

    def save(self, folder: Path | str) -> None:
        """Save the index as a folder of plain files, replacing an index that is there.

        Raises:
            IndexFolderError: the folder holds something else, or cannot be written; an index
                that was there before is untouched.
        """
        self._index.save(Path(folder))

    def with_fusion(self, fusion: Fusion) -> Self:
        """The same retriever under another fusion; the index is shared."""
        view = copy.copy(self)
        view._fusion = fusion
        return view

    def with_reranker(
        self, reranker: Reranker, *, rerank_depth: int = DEFAULT_RERANK_DEPTH
    ) -> Self:
        """The same retriever with its best candidates reranked; the index is shared.

        Raises:
            ConfigurationError: a depth below 1.
        """
        _check_positive("rerank_depth", rerank_depth)
        view = copy.copy(self)
        view._reranker = reranker
        view._rerank_depth = rerank_depth
        view._rerank_stage = rerank_stage()
        view._stages = STAGES[Route.HYBRID_RERANK]
        return view

    def with_deadlines(self, deadlines: Deadlines) -> Self:
        """The same retriever under limits of time; the index, pools and breakers are shared."""
        view = copy.copy(self)
        view._deadlines = deadlines
        return view

    def watch_stages(self, watcher: Watcher) -> None:
        """Have ``watcher`` told of every stage whose circuit opens or closes."""
        for stage in (self._live.legs.lexical, self._live.legs.dense, self._rerank_stage):
            stage.watch(watcher)

    def on_route(self, route: Route) -> Self:
        """The same retriever restricted to the stages of a route; the index is shared.

        Raises:
            ConfigurationError: a route that this retriever cannot take.
        """
        stages = STAGES.get(route)
        if stages is None or (RERANK in stages and self._reranker is None):
            raise ConfigurationError(
                f"route {route.value!r} cannot be taken here: "
                + ("it names no stages" if stages is None else "no reranker was given")
            )
        view = copy.copy(self)
        view._stages = stages
        return view

    @property
    def route(self) -> Route:
        """The stages that answer while all is well."""
        return ROUTES[self._stages]

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route that this retriever can take, the fullest first."""
        return tuple(
            [
                route
                for route, stages in STAGES.items()
                if RERANK not in stages or self._reranker is not None
            ]
        )

    def encode_query(self, query: str) -> Float32Array:
        """A query's vector, for callers that retrieve it more than once.

        Raises:
            QueryError: as ``retrieve``.
        """
        return self._embedder.encode_query(self._searchable(query))

    @property
    def fusion(self) -> Fusion:
        """How the legs' scores become one."""
        return self._fusion

    @property
    def report(self) -> BuildReport:
        """What became of the passages given."""
        return self._index.report

    @property
    def passage_ids(self) -> tuple[str, ...]:
        """Every passage id, ascending."""
        return self._index.passages.ids

    def __len__(self) -> int:
        return len(self._index.passages)

    def passage(self, passage_id: str) -> Passage:
        """The passage of an id.

        Raises:
            KeyError: no passage has it.
        """
        passages = self._index.passages
        return passages[passages.row_of[passage_id]]

    def add(self, passages: Iterable[Passage], progress: Progress | None = None) -> None:
        """Add passages, for every view of this retriever at once.

        Only the new passages are encoded. The lexical statistics, and the codes above the exact
        limit, are built anew from all passages: add many at a time.

        Raises:
            DataError: an id that is already there, or passages that cannot be indexed; nothing
                is added then.
        """
        with self._live.writing:
            self._live.swap(self._live.index.added(passages, self._embedder, progress))

    def delete(self, passage_ids: Iterable[str]) -> None:
        """Delete passages, for every view of this retriever at once; costs as ``add`` does.

        Raises:
            DataError: an id that is not there, or no passage would be left; nothing is deleted
                then.
        """
        with self._live.writing:
            self._live.swap(self._live.index.deleted(passage_ids))

    def fingerprint(self) -> dict[str, str]:
        """What the scores depend on, by name; a profile holds for equal fingerprints only."""
        index = self._index
        fusion = self._fusion
        return {
            "embedder": portable_name(index.embedder),
            "embedder_weights": index.embedder_weights,
            "lexical": index.lexical.fingerprint,
            "fusion": f"convex w={fusion.weight!r}"
            if fusion.method == "convex"
            else f"reciprocal_rank c={fusion.constant}",
            "reranker": "none" if self._reranker is None else self._reranker.fingerprint,
            "corpus_size": str(len(index.passages)),
            "corpus_digest": index.corpus_digest,
        }

    def warm_up(self) -> None:
        """Load the models and compile the loops, so that the first query does not wait.

        Takes as long as it takes, whatever the deadlines.
        """
        query = searchable_text(self._index.passages[0])[: self._max_query_chars]
        self.with_deadlines(Deadlines()).retrieve(query)

    def retrieve(
        self,
        query: str,
        *,
        depth: int = DEFAULT_DEPTH,
        query_vector: Float32Array | None = None,
        where: Where | None = None,
    ) -> Ranking:
        """The best candidates for a query, each with the scores of every stage that answered.

        Each leg gives its ``depth`` best; the union is scored in both, fused and cut to
        ``depth``. Ties go by passage id. A passage without a word of the query is no lexical
        hit; a query of unknown words only is answered by the dense leg. Lone surrogates in the
        query are replaced, as in passages.

        Args:
            query: At most ``max_query_chars`` characters.
            depth: The most candidates returned, ≥ 1.
            query_vector: The query's vector where it is known, shape (dimension,).
            where: The passages that may be found, by their metadata; None for all. Both legs
                search among those alone, so ``depth`` of them are found where there are so many.
                How rare a word is, and so a BM25 score, is counted over all passages.

        Returns:
            The ranking. Its kind follows from the stages that answered: BM25 alone ``ratio``,
            vectors alone ``cosine``, fused as the fusion says, reranked ``logit``. Stages that
            failed are in ``failures`` and missing from ``route``.

        Raises:
            QueryError: an empty or over-long query.
            ConfigurationError: a depth below 1, or a filter that is no ``Where``.
            StageUnavailableError: no leg answered, or none in time.
            OverloadedError: no leg had a thread free.
        """
        budget = self._deadlines.start()
        query = self._searchable(query)
        _check_positive("depth", depth)
        if where is not None and not isinstance(where, Where):
            raise ConfigurationError(
                f"where must be a ctxguard.Where or None, not a {type(where).__name__}"
            )
        index = self._index
        allowed = None if where is None else index.passages.metadata_rows.allowed(where)
        reranker = self._reranker if RERANK in self._stages else None
        wanted = depth if reranker is None else max(depth, self._rerank_depth)
        candidates, failures = search_legs(
            index,
            self._live.legs,
            budget,
            self._embedder,
            query,
            query_vector=query_vector,
            depth=wanted,
            stages=self._stages,
            fusion=self._fusion,
            allowed=allowed,
        )
        if allowed is not None and not allowed.hold(candidates.rows):
            raise FilterViolationError("filter", "a leg gave a passage that it forbids")
        if reranker is not None:
            few = candidates.best(self._rerank_depth)
            reranked = rerank(
                index,
                reranker,
                query,
                few,
                stage=self._rerank_stage,
                seconds=budget.rerank_seconds,
            )
            if isinstance(reranked, StageFailure):
                failures.append(reranked)
            else:
                candidates = reranked
        candidates = candidates.best(depth)
        return Ranking(
            passage_ids=index.passages.ids_of(candidates.rows),
            scores=tuple(candidates.scores.tolist()),
            kind=candidates.kind,
            passages=_Rows(index.passages, candidates.rows),
            route=ROUTES[tuple(candidates.legs)],
            legs=candidates.legs,
            failures=tuple(failures),
        )

    def _searchable(self, query: str) -> str:
        if not isinstance(query, str) or not query.strip():
            instead = "" if isinstance(query, str) else f" (a {type(query).__name__}, not a text)"
            raise QueryError(f"the query is empty{instead}: there is nothing to search for")
        if len(query) > self._max_query_chars:
            raise QueryError(
                f"the query has {len(query):,} characters, the limit is "
                f"{self._max_query_chars:,} (max_query_chars)"
            )
        return without_surrogates(query)


def _open(folder: Path, verify: bool | None) -> tuple[HybridIndex, Stamp | None]:
    """The index of a folder, looked for again where another was saved over it meanwhile."""
    for _ in range(_MAX_OPENINGS):
        stamp = _stamp(folder)
        try:
            return HybridIndex.load(folder, verify=verify), stamp
        except IndexFolderError:
            # Saving clears the generation before it away, perhaps while it was being read here.
            if _stamp(folder) == stamp:
                raise
    raise IndexFolderError(
        f"{folder} was saved again {_MAX_OPENINGS} times while it was being opened; save less often"
    )


def _stamp(folder: Path) -> Stamp | None:
    return file_stamp(storage.manifest_file(folder))


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{name} {value!r} must be at least 1")

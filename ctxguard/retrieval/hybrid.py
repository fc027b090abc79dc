"""The embedded hybrid retriever: how it is built, loaded, changed and asked, and its views.

DESIGN.md §2 and §5. A view is a plan, how to search, over the generation that answers now, or over
one that it is pinned to. A leg that fails is left out of the answer and named in it; the route
says which stages answered.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Self

from ctxguard.errors import ConfigurationError
from ctxguard.fusion import Fusion
from ctxguard.retrieval.dense import EXACT_LIMIT
from ctxguard.retrieval.embedder import (
    SentenceTransformerEmbedder,
    named_embedder,
    portable_name,
)
from ctxguard.retrieval.generations import LiveIndex, open_index
from ctxguard.retrieval.index import HybridIndex
from ctxguard.retrieval.legs import STAGES, rerank_stage
from ctxguard.retrieval.lexical import LexicalEngine
from ctxguard.retrieval.passages import BuildReport, searchable_text
from ctxguard.retrieval.plan import SearchPlan
from ctxguard.retrieval.protocols import Embedder, Float32Array, Progress, Reranker
from ctxguard.stages import Deadlines, Watcher
from ctxguard.types import DEFAULT_DEPTH, Passage, Ranking, Route
from ctxguard.where import Where

DEFAULT_RERANK_DEPTH = 50
DEFAULT_MAX_QUERY_CHARS = 10_000


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
        self._plan = SearchPlan(
            embedder=embedder,
            fusion=fusion,
            reranker=reranker,
            rerank_depth=rerank_depth,
            max_query_chars=max_query_chars,
            deadlines=deadlines,
            stages=STAGES[Route.HYBRID if reranker is None else Route.HYBRID_RERANK],
            rerank_stage=rerank_stage(),
        )
        self._live = LiveIndex(index)
        self._pinned: HybridIndex | None = None

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
        index, stamp = open_index(Path(folder), verify)
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
        return self._live.reload(
            None if folder is None else Path(folder),
            embedder=self._plan.embedder,
            verify=verify,
        )

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
        return self._view(replace(self._plan, fusion=fusion))

    def with_reranker(
        self, reranker: Reranker, *, rerank_depth: int = DEFAULT_RERANK_DEPTH
    ) -> Self:
        """The same retriever with its best candidates reranked; the index is shared.

        Raises:
            ConfigurationError: a depth below 1.
        """
        return self._view(self._plan.reranked_by(reranker, rerank_depth))

    def with_deadlines(self, deadlines: Deadlines) -> Self:
        """The same retriever under limits of time; the index, pools and breakers are shared."""
        return self._view(replace(self._plan, deadlines=deadlines))

    def watch_stages(self, watcher: Watcher) -> None:
        """Have ``watcher`` told of every stage whose circuit opens or closes."""
        for stage in (self._live.legs.lexical, self._live.legs.dense, self._plan.rerank_stage):
            stage.watch(watcher)

    def on_route(self, route: Route) -> Self:
        """The same retriever restricted to the stages of a route; the index is shared.

        Raises:
            ConfigurationError: a route that this retriever cannot take.
        """
        return self._view(self._plan.on_route(route))

    def _view(self, plan: SearchPlan) -> Self:
        view = copy.copy(self)
        view._plan = plan
        return view

    @property
    def route(self) -> Route:
        """The stages that answer while all is well."""
        return self._plan.route

    @property
    def routes(self) -> tuple[Route, ...]:
        """Every route that this retriever can take, the fullest first."""
        return self._plan.routes

    def encode_query(self, query: str) -> Float32Array:
        """A query's vector, for callers that retrieve it more than once.

        Raises:
            QueryError: as ``retrieve``.
        """
        return self._plan.embedder.encode_query(self._plan.searchable(query))

    @property
    def fusion(self) -> Fusion:
        """How the legs' scores become one."""
        return self._plan.fusion

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
        embedder = self._plan.embedder
        self._live.change(lambda index: index.added(passages, embedder, progress))

    def delete(self, passage_ids: Iterable[str]) -> None:
        """Delete passages, for every view of this retriever at once; costs as ``add`` does.

        Raises:
            DataError: an id that is not there, or no passage would be left; nothing is deleted
                then.
        """
        self._live.change(lambda index: index.deleted(passage_ids))

    def fingerprint(self) -> dict[str, str]:
        """What the scores depend on, by name; a profile holds for equal fingerprints only."""
        index = self._index
        fusion, reranker = self._plan.fusion, self._plan.reranker
        return {
            "embedder": portable_name(index.embedder),
            "embedder_weights": index.embedder_weights,
            "lexical": index.lexical.fingerprint,
            "fusion": f"convex w={fusion.weight!r}"
            if fusion.method == "convex"
            else f"reciprocal_rank c={fusion.constant}",
            "reranker": "none" if reranker is None else reranker.fingerprint,
            "corpus_size": str(len(index.passages)),
            "corpus_digest": index.corpus_digest,
        }

    def warm_up(self, *, filter_fields: Iterable[str] = ()) -> None:
        """Load the models and compile the loops, so that the first query does not wait.

        Takes as long as it takes, whatever the deadlines.

        Args:
            filter_fields: Names of the metadata that filters will ask for, read in one pass over
                all passages, which the first filter on a field would else wait for (0.4 s for
                100,000 passages). Generations that follow read them before they answer. The
                first 16 count; one that no passage has is no error.

        Raises:
            ConfigurationError: one text instead of several names.
        """
        if isinstance(filter_fields, str):
            raise ConfigurationError(
                f"filter_fields takes several names; give [{filter_fields!r}] for this one"
            )
        index = self._index
        index.passages.metadata_rows.prepare(filter_fields)
        query = searchable_text(index.passages[0])[: self._plan.max_query_chars]
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
        return self._plan.search(
            self._index,
            self._live.legs,
            query,
            depth=depth,
            query_vector=query_vector,
            where=where,
        )

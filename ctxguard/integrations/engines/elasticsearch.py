"""Reads an index in Elasticsearch or OpenSearch that is there: BM25 and vectors, kept apart.

Nothing is built there. Both legs are searches of one ``_msearch``, so that each keeps its scores.
"""

import asyncio
import base64
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from ctxguard._support.error_text import describe_error
from ctxguard._support.extras import require
from ctxguard.core.fusion import Fusion
from ctxguard.core.metadata_filter import Where
from ctxguard.core.scores import is_valid
from ctxguard.core.types import (
    DEFAULT_DEPTH,
    FailureKind,
    Passage,
    Ranking,
    Route,
    ScoreKind,
)
from ctxguard.errors import (
    ConfigurationError,
    CtxguardError,
    OverloadedError,
    StageError,
    StageUnavailableError,
)
from ctxguard.integrations.engines.engine import (
    KINDS,
    EngineDownError,
    LazyClient,
    ranking_of_rows,
)
from ctxguard.integrations.engines.retriever import without_ranker
from ctxguard.integrations.engines.signals import LegsOfRankings
from ctxguard.resilience import UnansweredError
from ctxguard.retrieval.hybrid.candidates import DENSE, LEXICAL, RERANK, STAGES
from ctxguard.retrieval.hybrid.pipeline import DEFAULT_MAX_QUERY_CHARS, Hybrid, SearchSettings
from ctxguard.retrieval.models.files import portable_name
from ctxguard.retrieval.protocols import Embedder, Float32Array, QueryTokens
from ctxguard.retrieval.rerank_client import check_key, server_url

Product = Literal["elasticsearch", "opensearch"]
CosineScore = Literal["halved", "inverse"]

_KINDS = {**KINDS, RERANK: ScoreKind.LOGIT}
_MOST_HITS = 10_000
"""The default of ``index.max_result_window`` and the limit of ``num_candidates``."""
_MAX_ANSWER_BYTES = 2**25
_OK, _BAD_REQUEST, _NOT_FOUND, _TOO_MANY_REQUESTS = 200, 400, 404, 429
_REFUSED = (401, 403)
_ERROR_TYPE = re.compile(r"[a-z_]{1,60}")
_KEYWORD = ".keyword"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of an index's documents that make passages; names may be paths with dots.

    Attributes:
        text: The text, which ``match`` searches.
        vector: The vectors: ``dense_vector`` of similarity ``cosine``, or ``knn_vector`` of space
            ``cosinesimil``.
        title: The title; None without one.
        passage_id: The passage's id; None for the document's ``_id``.
        metadata: The field of each name that filters compare, as ``terms`` compares it: of type
            ``keyword``, a whole number or ``boolean``. Texts that were mapped dynamically have
            theirs under ``.keyword``. A name that is not here is looked up as it is.
    """

    text: str
    vector: str
    title: str | None = None
    passage_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def of_metadata(self, name: str) -> str:
        """Return the field that a filter on a name compares."""
        return self.metadata.get(name, name)


@dataclass(frozen=True, slots=True)
class SemanticRerank:
    """Elasticsearch's ``text_similarity_reranker`` over the best of BM25, as a third leg.

    Attributes:
        inference_id: The endpoint of a cross-encoder whose scores are logits, such as Elastic
            Rerank.
        window: Number of documents that it reads for each query, 1 to 10,000.
    """

    inference_id: str = ".rerank-v1-elasticsearch"
    window: int = 50


class ElasticsearchRetriever(Hybrid):
    """BM25 and vector search in an index of Elasticsearch or OpenSearch, fused here.

    A retriever for ``ContextGuard``. A leg that fails or is answered in part is left out of the
    answer, which then has another route and is flagged ``degraded``. Threads may share it; a forked
    child connects anew.

    Args:
        url: The cluster's base, such as ``https://localhost:9200``.
        index: Name of the index, or an alias.
        fields: The fields of the documents that make passages.
        embedder: The model that made the index's vectors.
        product: The product whose form requests have.
        cosine_score: The cluster's score of a cosine: ``halved``, (1 + cos) / 2, in
            Elasticsearch, in OpenSearch from 2.19 on, and in older ones with the engine lucene;
            ``inverse``, 1 / (2 − cos), in OpenSearch before 2.19 with the engines nmslib and faiss.
        key: An API key of Elasticsearch, sent as ``Authorization: ApiKey`` in the header; with
            OpenSearch ``USER:PASSWORD``, sent as ``Basic``. None without one.
        fusion: Combines the legs' scores; None for reciprocal ranks. ``convex`` is for two legs.
        rerank: A semantic reranker in Elasticsearch as a third leg; None without one.
        timeout_seconds: For a whole answer, and for each wait for the cluster, > 0.
        max_query_chars: Longer queries are refused.

    Raises:
        ConfigurationError: a setting that cannot work.
        MissingExtraError: the extra ``rerank``, which brings the HTTP client, is not installed.
    """

    def __init__(
        self,
        url: str,
        index: str,
        fields: Fields,
        *,
        embedder: Embedder,
        product: Product = "elasticsearch",
        cosine_score: CosineScore = "halved",
        key: str | None = None,
        fusion: Fusion | None = None,
        rerank: SemanticRerank | None = None,
        timeout_seconds: float = 10.0,
        max_query_chars: int = DEFAULT_MAX_QUERY_CHARS,
    ) -> None:
        _check(product, cosine_score, rerank, timeout_seconds)
        self._fields = fields
        self._product: Product = product
        self._cosine_score: CosineScore = cosine_score
        self._rerank = rerank
        self._timeout_seconds = timeout_seconds
        self._settings = SearchSettings(
            embedder=embedder,
            fusion=self._usable(Fusion() if fusion is None else fusion),
            max_query_chars=max_query_chars,
            stages=STAGES[Route.HYBRID if rerank is None else Route.HYBRID_RERANK],
            legs_rerank=rerank is not None,
        )
        self._library: Any = require("httpx2", "elasticsearch")
        self._url = _endpoint(self._library, url, index)
        headers = _headers(product, key)
        self._client = LazyClient(
            lambda: self._library.Client(
                timeout=timeout_seconds, follow_redirects=False, headers=headers
            )
        )

    def _usable(self, fusion: Fusion) -> Fusion:
        if self._rerank is not None and fusion.method == "convex":
            raise ConfigurationError(
                "fusion 'convex' cannot be used with three legs; use 'reciprocal_rank'"
            )
        return without_ranker(fusion)

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that decide which candidates are found, without the address."""
        embedder = self._settings.embedder
        return {
            "engine": self._product,
            "fields": f"{self._fields.text}, {self._fields.vector}",
            "embedder": portable_name(embedder.name),
            "embedder_weights": embedder.fingerprint(),
            "rerank": "none" if self._rerank is None else self._rerank.inference_id,
            "fusion": self.fusion.fingerprint,
        }

    def close(self) -> None:
        """Close the connections; searching again opens new ones."""
        self._client.close()

    async def aretrieve(
        self, query: str, *, depth: int = DEFAULT_DEPTH, where: Where | None = None
    ) -> Ranking:
        """Retrieve on a thread; arguments and errors as for ``retrieve``.

        The cluster compares filters more coarsely, since ``terms`` takes ``1`` for ``"1"`` in a
        field of texts: passages that differ are left out here.
        """
        return await asyncio.to_thread(self.retrieve, query, depth=depth, where=where)

    def _search(
        self,
        query: str,
        depth: int,
        query_vector: Float32Array | QueryTokens | None,
        where: Where | None,
    ) -> LegsOfRankings:
        def ask(vector: Float32Array | None) -> dict[str, Ranking | CtxguardError]:
            if where is not None and not all(allowed for _, allowed in where.conditions):
                return {LEXICAL: Ranking.from_hits([], KINDS[LEXICAL])}
            given = None if vector is None else vector.tolist()
            searches = self.searches(query, given, min(depth, _MOST_HITS), where)
            answers = zip(searches, self._answered(searches), strict=True)
            return {leg: self._ranking(leg, answer, depth, where) for leg, answer in answers}

        return LegsOfRankings(self._settings, query, depth, query_vector, ask)

    def searches(
        self, text: str, vector: Sequence[float] | None, size: int, where: Where | None
    ) -> dict[str, dict[str, Any]]:
        """Build the body of each leg's search.

        Args:
            text: The query.
            vector: Its vector; None for no dense leg.
            size: Maximum number of hits of each.
            where: The filter; None without one.
        """
        fields = self._fields
        filters = [
            {"terms": {fields.of_metadata(name): allowed}}
            for name, allowed in (() if where is None else where.allowed.items())
        ]
        match: dict[str, Any] = {"match": {fields.text: {"query": text}}}
        if filters:
            match = {"bool": {"must": [match], "filter": filters}}
        stages = self._settings.stages
        found: dict[str, dict[str, Any]] = {LEXICAL: {"query": match}} if LEXICAL in stages else {}
        if vector is not None:
            found[DENSE] = self._nearest(vector, size, filters)
        if self._rerank is not None and RERANK in stages:
            found[RERANK] = {
                "retriever": {
                    "text_similarity_reranker": {
                        "retriever": {"standard": {"query": match}},
                        "field": fields.text,
                        "inference_id": self._rerank.inference_id,
                        "inference_text": text,
                        "rank_window_size": self._rerank.window,
                    }
                }
            }
        shared = {
            "_source": self._sources(where),
            "timeout": f"{math.ceil(1e3 * self._timeout_seconds)}ms",
            "track_total_hits": False,
        }
        sizes = {RERANK: min(size, self._rerank.window)} if self._rerank is not None else {}
        return {
            leg: {**search, "size": sizes.get(leg, size), **shared} for leg, search in found.items()
        }

    def _nearest(
        self, vector: Sequence[float], size: int, filters: list[dict[str, Any]]
    ) -> dict[str, Any]:
        allowed = {"filter": {"bool": {"filter": filters}}} if filters else {}
        if self._product == "opensearch":
            return {
                "query": {"knn": {self._fields.vector: {"vector": vector, "k": size, **allowed}}}
            }
        candidates = min(max(2 * size, 200), _MOST_HITS)
        return {
            "knn": {
                "field": self._fields.vector,
                "query_vector": vector,
                "k": size,
                "num_candidates": candidates,
                **allowed,
            }
        }

    def _sources(self, where: Where | None) -> list[str]:
        fields = self._fields
        names = {*fields.metadata, *(() if where is None else where.fields)}
        others = [each for each in (fields.title, fields.passage_id) if each is not None]
        paths = [fields.of_metadata(name).removesuffix(_KEYWORD) for name in sorted(names)]
        return list(dict.fromkeys([fields.text, *others, *paths]))

    def _answered(self, searches: Mapping[str, Mapping[str, Any]]) -> list[Any]:
        """Return the response to each search, in their order."""
        lines = [line for search in searches.values() for line in ({}, search)]
        body = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        try:
            answer = json.loads(self._post(body))
        except ValueError:
            raise StageError(self._product, "its answer is not JSON") from None
        responses = answer.get("responses") if isinstance(answer, dict) else None
        if not isinstance(responses, list) or len(responses) != len(searches):
            raise StageError(self._product, f"it did not answer the {len(searches)} searches")
        return responses

    def _post(self, body: bytes) -> bytes:
        client = self._client.get()
        deadline = time.monotonic() + self._timeout_seconds
        answer = bytearray()
        try:
            with client.stream("POST", self._url, content=body) as response:
                if response.status_code != _OK:
                    raise self._refused(response.status_code, "")
                for piece in response.iter_raw():
                    answer += piece
                    if len(answer) > _MAX_ANSWER_BYTES:
                        raise StageError(
                            self._product, f"its answer has more than {_MAX_ANSWER_BYTES:,} bytes"
                        )
                    if time.monotonic() > deadline:
                        raise self._late()
        except self._library.TimeoutException:
            raise self._late() from None
        except self._library.HTTPError as error:
            raise EngineDownError(
                self._product, f"it cannot be reached ({describe_error(error)})"
            ) from error
        return bytes(answer)

    def _late(self) -> UnansweredError:
        return UnansweredError(
            self._product, FailureKind.TIMEOUT, f"no whole answer in {self._timeout_seconds:g} s"
        )

    def _refused(self, status: int, kind: str) -> Exception:
        """Build the error of a refusal, without its reason, which may quote the query."""
        said = f"it answered {status}{f' ({kind})' if kind else ''}"
        if status == _NOT_FOUND:
            return ConfigurationError(f"{self._product}: {said}: there is no such index")
        if status == _BAD_REQUEST:
            return ConfigurationError(
                f"{self._product}: {said}: check that the index has the fields "
                f"{self._fields.text!r} and {self._fields.vector!r}, and vectors of "
                f"{self._settings.embedder.dimension} numbers as the embedder gives"
            )
        if status in _REFUSED:
            return StageUnavailableError(self._product, f"{said}: it does not accept the key")
        if status == _TOO_MANY_REQUESTS:
            return OverloadedError(self._product, f"{said}: its queues are full; ask it less often")
        return StageUnavailableError(self._product, said)

    def _ranking(
        self, leg: str, response: Any, depth: int, where: Where | None
    ) -> Ranking | CtxguardError:
        """Build the ranking of a leg; the error if it failed or was answered in part."""
        try:
            rows = [self._row(leg, hit) for hit in self._hits(leg, response)[:depth]]
        except StageError as error:
            return error
        if where is not None:
            rows = [row for row in rows if row[0] and where.allows(row[0].metadata)]
        return ranking_of_rows(leg, rows, _KINDS[leg], depth)

    def _hits(self, leg: str, response: Any) -> list[Any]:
        """Return the hits of a response.

        Raises:
            StageError: the leg failed, was answered in part, or has another form.
        """
        if not isinstance(response, dict):
            raise StageError(leg, "its answer is no object")
        status, error = response.get("status", _OK), response.get("error")
        if error is not None or status != _OK:
            kind = error.get("type") if isinstance(error, dict) else None
            known = kind if isinstance(kind, str) and _ERROR_TYPE.fullmatch(kind) else ""
            raise self._refused(status if isinstance(status, int) else 500, known)
        shards = response.get("_shards")
        failed = shards.get("failed") if isinstance(shards, dict) else 0
        if response.get("timed_out") or failed:
            raise UnansweredError(
                leg,
                FailureKind.TIMEOUT if response.get("timed_out") else FailureKind.ERROR,
                f"it was answered in part (timed out: {bool(response.get('timed_out'))}, "
                f"shards failed: {failed})",
            )
        hits = response.get("hits")
        found = hits.get("hits") if isinstance(hits, dict) else None
        if not isinstance(found, list):
            raise StageError(leg, "its answer holds no list of hits")
        return found

    def _row(self, leg: str, hit: Any) -> tuple[Passage | None, float | None]:
        if not isinstance(hit, dict):
            return None, None
        score: Any = hit.get("_score")
        if not is_valid(score) or isinstance(score, bool):
            return self._passage(hit), None
        if leg == DENSE:
            score = cosine_of(score, self._cosine_score)
        elif leg == RERANK:
            score = logit_of(score)
        return self._passage(hit), score

    def _passage(self, hit: Mapping[str, Any]) -> Passage | None:
        fields, source = self._fields, hit.get("_source")
        own_id = hit.get("_id") if fields.passage_id is None else _at(source, fields.passage_id)
        text = _at(source, fields.text)
        title = "" if fields.title is None else _at(source, fields.title)
        if not isinstance(own_id, str) or not own_id or not isinstance(text, str):
            return None
        return Passage(
            own_id, text, title if isinstance(title, str) else "", self._metadata(source)
        )

    def _metadata(self, source: Any) -> dict[str, object]:
        """Return the metadata by the names that filters use, else by the field's name."""
        named = {
            name: _at(source, path.removesuffix(_KEYWORD))
            for name, path in self._fields.metadata.items()
        }
        held = {self._fields.text, self._fields.title, self._fields.passage_id}
        others = {
            name: value
            for name, value in (source if isinstance(source, dict) else {}).items()
            if name not in held and not isinstance(value, dict)
        }
        return {**others, **named}


def cosine_of(score: float, form: CosineScore) -> float | None:
    """Compute the cosine from a cluster's score.

    >>> cosine_of(0.75, "halved"), cosine_of(0.5, "inverse"), cosine_of(0.0, "inverse")
    (0.5, 0.0, None)
    """
    if form == "halved":
        return 2.0 * score - 1.0
    return 2.0 - 1.0 / score if score > 0.0 else None


def logit_of(score: float) -> float | None:
    """Compute the reranker's own score s from Elasticsearch's max(s, 0) + min(exp(s), 1).

    >>> logit_of(3.5), round(logit_of(0.1), 3), logit_of(0.0)
    (2.5, -2.303, None)
    """
    if score >= 1.0:
        return score - 1.0
    return math.log(score) if score > 0.0 else None


def _at(source: Any, path: str) -> Any:
    """Return the value at a path, whose dots lead into objects unless a name has them."""
    if not isinstance(source, Mapping):
        return None
    if path in source:
        return source[path]
    first, dot, rest = path.partition(".")
    return _at(source.get(first), rest) if dot else None


def _check(
    product: str, cosine_score: str, rerank: SemanticRerank | None, timeout_seconds: float
) -> None:
    if product not in ("elasticsearch", "opensearch"):
        raise ConfigurationError(f"product {product!r} is neither elasticsearch nor opensearch")
    if cosine_score not in ("halved", "inverse"):
        raise ConfigurationError(f"cosine_score {cosine_score!r} is neither halved nor inverse")
    if rerank is not None and product != "elasticsearch":
        raise ConfigurationError("text_similarity_reranker is Elasticsearch's: leave rerank out")
    if rerank is not None and not 1 <= rerank.window <= _MOST_HITS:
        raise ConfigurationError(f"the window {rerank.window!r} must be 1 to {_MOST_HITS:,}")
    if not 0.0 < timeout_seconds < math.inf:
        raise ConfigurationError(f"timeout_seconds {timeout_seconds!r} must be finite and > 0")


def _endpoint(library: Any, url: str, index: str) -> Any:
    parsed = server_url(url, "cluster's")
    if not index or index.startswith("_"):
        raise ConfigurationError(f"the index's name {index!r} is empty or begins with _")
    path = f"{parsed.path.rstrip('/')}/{quote(index, safe='')}/_msearch"
    return library.URL(parsed._replace(path=path, fragment="").geturl())


def _headers(product: Product, key: str | None) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/x-ndjson"}
    if key is None:
        return headers
    check_key(key, "cluster's")
    if product == "elasticsearch":
        return headers | {"Authorization": f"ApiKey {key}"}
    basic = base64.b64encode(key.encode()).decode()
    return headers | {"Authorization": f"Basic {basic}"}

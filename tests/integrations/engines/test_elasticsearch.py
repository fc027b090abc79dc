"""A retriever over Elasticsearch and OpenSearch, against a local server that speaks `_msearch`.

No cluster is run: request bodies are compared with the documented form, and answers have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httpx2")

from prometheus_client import CollectorRegistry
from search_cluster import EMBEDDER, Answered, Cluster, refusal, response

from ctxguard import ContextGuard, Flag, Passage, Ranking, ScoreKind, Where
from ctxguard.errors import ConfigurationError, StageError, StageUnavailableError
from ctxguard.integrations.engines.elasticsearch import (
    ElasticsearchRetriever,
    Fields,
    SemanticRerank,
)
from ctxguard.request.telemetry import Telemetry
from ctxguard.resilience import UnansweredError
from ctxguard.testing import RetrieverContract

FIELDS = Fields("text", "vector", title="title", metadata={"groups": "groups.keyword"})


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    started = Cluster()
    yield started
    started.close()


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    running.documents.clear()
    running.requests.clear()
    running.paths.clear()
    running.headers.clear()
    running.answer, running.status, running.body = running.search, 200, None
    running.hangs.set()
    return running


def over(cluster: Cluster, **options: Any) -> ElasticsearchRetriever:
    return ElasticsearchRetriever(
        cluster.url, "docs", FIELDS, embedder=EMBEDDER, **{"timeout_seconds": 5.0, **options}
    )


class TestRetriever(RetrieverContract):
    @pytest.fixture(autouse=True)
    def _with_cluster(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def retriever(self, passages: Sequence[Passage]) -> ElasticsearchRetriever:
        self.cluster.documents.clear()
        self.cluster.index(passages)
        return over(self.cluster)

    def unreachable_retriever(self) -> ElasticsearchRetriever:
        return ElasticsearchRetriever(
            "http://127.0.0.1:9", "docs", FIELDS, embedder=EMBEDDER, timeout_seconds=1.0
        )


def lexical(cluster: Cluster, hits: Sequence[tuple[str, Any, Any]]) -> Ranking:
    """What the retriever makes of BM25's hits, each an id, a score and a text."""
    found = [
        {"_id": name, "_score": score, "_source": {"text": text}} for name, score, text in hits
    ]
    cluster.answer = lambda body: response([] if "knn" in body else found)
    return over(cluster).retrieve("fox", depth=100)


@pytest.mark.parametrize(
    ("hits", "expected"),
    [
        (
            [(f"d{n}", 10_000.0 - n, "A fox.") for n in range(10_000)],
            [f"d{n}" for n in range(100)],
        ),
        ([("a", 3.0, "A fox."), ("a", 2.0, "A fox."), ("b", 1.0, "Foxes.")], ["a", "b"]),
        ([("blank", 3.0, None), ("number", 2.0, 7), ("a", 1.0, "A fox.")], ["a"]),
    ],
    ids=["too many", "twice", "without text"],
)
def test_a_candidate_is_one_of_the_depths_best_that_has_a_text_and_comes_once(
    cluster: Cluster, hits: Any, expected: Sequence[str]
) -> None:
    assert list(lexical(cluster, hits).passage_ids) == expected


@pytest.mark.parametrize(
    "scores", [(None, None), ("0.9", "0.8"), (float("nan"),) * 2, (-1.0, -2.0)]
)
def test_scores_that_bm25_cannot_give_leave_the_order_alone(
    cluster: Cluster, scores: Sequence[Any]
) -> None:
    found = lexical(cluster, [(f"d{n}", score, "A fox.") for n, score in enumerate(scores)])
    assert found.passage_ids == ("d0", "d1")
    assert found.kind is ScoreKind.RANK
    assert "lexical" not in found.legs


def test_the_bodies_are_those_of_the_documented_forms(cluster: Cluster) -> None:
    over(cluster, key="secret").retrieve(
        "red fox", depth=7, where=Where(tenant="a", groups=["x", "y"])
    )
    (lines,) = cluster.requests
    terms = [{"terms": {"groups.keyword": ["x", "y"]}}, {"terms": {"tenant": ["a"]}}]
    shared = {
        "size": 7,
        "_source": ["text", "title", "groups", "tenant"],
        "timeout": "5000ms",
        "track_total_hits": False,
    }
    vector = lines[3]["knn"].pop("query_vector")
    assert vector == pytest.approx(EMBEDDER.encode_query("red fox").tolist())
    assert lines == [
        {},
        {
            "query": {
                "bool": {"must": [{"match": {"text": {"query": "red fox"}}}], "filter": terms}
            },
            **shared,
        },
        {},
        {
            "knn": {
                "field": "vector",
                "k": 7,
                "num_candidates": 200,
                "filter": {"bool": {"filter": terms}},
            },
            **shared,
        },
    ]
    assert cluster.paths == ["/docs/_msearch"]
    assert cluster.headers[0]["Content-Type"] == "application/x-ndjson"
    assert cluster.headers[0]["Authorization"] == "ApiKey secret"


def test_opensearch_has_its_own_form(cluster: Cluster) -> None:
    cluster.answer = lambda body: response([])
    over(cluster, product="opensearch", key="user:word").retrieve("fox", depth=3)
    ((_, _, _, dense),) = cluster.requests
    assert dense["query"]["knn"]["vector"].keys() == {"vector", "k"}
    assert dense["query"]["knn"]["vector"]["k"] == 3
    assert cluster.headers[0]["Authorization"] == "Basic dXNlcjp3b3Jk"


def test_the_reranker_is_a_third_leg_whose_scores_are_logits_again(cluster: Cluster) -> None:
    def answer(body: Mapping[str, Any]) -> Mapping[str, Any]:
        if "retriever" not in body:
            return response([])
        hits = [
            {"_id": name, "_score": score, "_source": {"text": name}}
            for name, score in (("a", 3.5), ("b", 0.1))
        ]
        return response(hits)

    cluster.answer = answer
    found = over(cluster, rerank=SemanticRerank("mine", window=20)).retrieve("fox", depth=50)
    asked = cluster.requests[0][5]
    assert asked["size"] == 20
    assert asked["retriever"] == {
        "text_similarity_reranker": {
            "retriever": {"standard": {"query": {"match": {"text": {"query": "fox"}}}}},
            "field": "text",
            "inference_id": "mine",
            "inference_text": "fox",
            "rank_window_size": 20,
        }
    }
    assert found.passage_ids == ("a", "b")
    assert found.legs["rerank"].kind.value == "logit"
    assert found.legs["rerank"].scores.tolist() == pytest.approx([2.5, np.log(0.1)])


def only(leg: str, other: Any) -> Answered:
    """One leg answers with one hit, the other with what is given."""
    hit = {"_id": "a", "_score": 0.9, "_source": {"text": "A fox."}}

    def answer(body: Mapping[str, Any]) -> Any:
        return response([hit]) if ("knn" in body) == (leg == "dense") else other

    return answer


@pytest.mark.parametrize(
    "other",
    [
        refusal(500, "search_phase_execution_exception"),
        refusal(429, "es_rejected_execution_exception"),
        response([], timed_out=True),
        response([], _shards={"total": 2, "successful": 1, "failed": 1}),
        {"status": 200},
        {"status": 200, "hits": {"hits": "none"}},
        {"status": 200, "hits": {"hits": [None, {"_id": "b"}]}},
        "text",
    ],
)
@pytest.mark.parametrize("leg", ["dense", "lexical"])
def test_a_leg_that_fails_or_answers_in_part_is_left_out_and_said(
    cluster: Cluster, leg: str, other: Any
) -> None:
    cluster.answer = only(leg, other)
    guard = ContextGuard(over(cluster), telemetry=Telemetry(CollectorRegistry()))
    context = guard.retrieve("fox")
    assert context.kept_ids == ("a",)
    assert Flag.DEGRADED in context.flags
    assert "secret" not in repr(context.decision.ranking.failures)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (refusal(404, "index_not_found_exception"), "no such index"),
        (refusal(400, "search_phase_execution_exception"), "64 numbers"),
    ],
)
def test_what_no_retry_mends_is_said_as_a_setting(
    cluster: Cluster, other: Any, message: str
) -> None:
    cluster.answer = only("lexical", other)
    with pytest.raises(ConfigurationError, match=message) as caught:
        over(cluster).retrieve("fox")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "message"), [(401, "accept the key"), (403, "accept the key"), (503, "503")]
)
def test_a_refusal_of_the_whole_is_an_outage(cluster: Cluster, status: int, message: str) -> None:
    cluster.status, cluster.body = status, b'{"error": {"reason": "secret"}}'
    with pytest.raises(StageUnavailableError, match=message) as caught:
        over(cluster, key="hidden").retrieve("fox")
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"responses": []}', b'{"responses": {}}'])
def test_an_answer_of_another_form_is_an_outage(cluster: Cluster, body: bytes) -> None:
    cluster.body = body
    with pytest.raises(StageError, match="elasticsearch"):
        over(cluster).retrieve("fox")


def test_an_answer_that_stops_in_the_middle_ends_in_time(cluster: Cluster) -> None:
    cluster.hangs.clear()
    with pytest.raises(UnansweredError, match="no whole answer"):
        over(cluster, timeout_seconds=0.3).retrieve("fox")
    cluster.hangs.set()


def test_a_coarser_comparison_of_the_cluster_lets_nothing_through(cluster: Cluster) -> None:
    cluster.index(
        [
            Passage("number", "A fox.", metadata={"level": 1}),
            Passage("text", "A fox.", metadata={"level": "1"}),
        ]
    )
    assert over(cluster).retrieve("fox", where=Where(level=1)).passage_ids == ("number",)


def test_documents_may_keep_their_fields_in_objects(cluster: Cluster) -> None:
    source = {"body": {"text": "A fox."}, "id": "own", "metadata": {"tenant": "a"}}
    cluster.answer = lambda body: response([{"_id": "x", "_score": 0.9, "_source": source}])
    fields = Fields(
        "body.text", "v", passage_id="id", metadata={"tenant": "metadata.tenant.keyword"}
    )
    retriever = ElasticsearchRetriever(cluster.url, "docs", fields, embedder=EMBEDDER)
    found = retriever.retrieve("fox", where=Where(tenant="a"))
    assert found.passages[0] == Passage("own", "A fox.", metadata={"tenant": "a"})
    assert cluster.requests[0][1]["_source"] == ["body.text", "id", "metadata.tenant"]


@pytest.mark.parametrize(
    "options",
    [
        {"product": "solr"},
        {"cosine_score": "cosine"},
        {"timeout_seconds": 0.0},
        {"product": "opensearch", "rerank": SemanticRerank()},
        {"rerank": SemanticRerank(window=0)},
        {"key": "line\nbreak"},
    ],
)
def test_a_setting_that_cannot_work_is_refused(cluster: Cluster, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        over(cluster, **options)


@pytest.mark.parametrize(
    ("url", "index"),
    [("localhost:9200", "a"), ("http://u:p@h", "a"), ("http://h", ""), ("http://h", "_all")],
)
def test_an_address_that_cannot_work_is_refused(url: str, index: str) -> None:
    with pytest.raises(ConfigurationError):
        ElasticsearchRetriever(url, index, FIELDS, embedder=EMBEDDER)

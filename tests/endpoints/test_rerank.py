"""The client of the rerank protocol against a local server, with the server's faults."""

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.types import FailureKind
from ctxguard.endpoints.forms import FORMS, RerankProtocol
from ctxguard.endpoints.rerank import RerankClient, read_scores
from ctxguard.errors import (
    ConfigurationError,
    OverloadedError,
    StageError,
    StageRefusedError,
    StageUnavailableError,
)
from ctxguard.resilience.stage import Stage, failure_of
from tests.raw_server import sending
from tests.rerank_endpoint import Answer, RerankEndpoint
from tests.timing import NEVER, SOON

QUERY = "red fox"
DOCUMENTS = ["A blue fox.", "a red fox runs", "nothing"]
EXPECTED = [0.0, 1.0, 0.0]
KEY = "secret-key"

Make = Callable[..., RerankClient]


STAND_IN = RerankEndpoint


@pytest.fixture
def make(endpoint: RerankEndpoint) -> Iterator[Make]:
    with ExitStack() as made:

        def make_client(url: str = endpoint.url, **settings: Any) -> RerankClient:
            client = RerankClient(url, **({"timeout_seconds": NEVER} | settings))
            return made.enter_context(closing(client))

        yield make_client


def failure(client: RerankClient, documents: list[str] = DOCUMENTS) -> StageError:
    with pytest.raises(StageError) as raised:
        client.score(QUERY, documents)
    return raised.value


def kind(error: StageError) -> FailureKind:
    return failure_of("rerank", error).kind


OF_TEI = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "truncate": True}


@pytest.mark.parametrize(
    ("protocol", "path", "body"),
    [
        ("cohere", "/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 3, "model": "m"}),
        ("voyage", "/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_k": 3, "model": "m"}),
        ("tei", "/rerank", OF_TEI),
        ("score", "/score", {"text_1": QUERY, "text_2": DOCUMENTS, "model": "m"}),
    ],
)
def test_request_has_form_and_order(
    endpoint: RerankEndpoint, make: Make, protocol: RerankProtocol, path: str, body: object
) -> None:
    """A request has its protocol's form and scores the order of the documents."""
    client = make(f"{endpoint.url}/v1", protocol=protocol, key=KEY, model="m")
    scores = client.score(QUERY, DOCUMENTS)
    assert (scores.tolist(), scores.dtype) == (EXPECTED, np.float64)
    assert (endpoint.requests, endpoint.paths) == ([body], [f"/v1{path}"])
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert make().score(QUERY, DOCUMENTS).tolist() == EXPECTED
    assert endpoint.headers[1]["Authorization"] is None


@pytest.mark.parametrize(
    ("path", "requested"),
    [
        ("", "/rerank"),
        ("/", "/rerank"),
        ("/v1", "/v1/rerank"),
        ("/v2/", "/v2/rerank"),
        ("/v1/rerank", "/v1/rerank"),
        ("/v1/rerank/", "/v1/rerank"),
        ("/v1?version=2", "/v1/rerank?version=2"),
    ],
)
def test_url_is_base_or_endpoint(
    endpoint: RerankEndpoint, make: Make, path: str, requested: str
) -> None:
    make(endpoint.url + path).score(QUERY, DOCUMENTS)
    assert endpoint.paths == [requested]


def test_loops_and_threads_share_client(endpoint: RerankEndpoint, make: Make) -> None:
    client = make(model="own")

    async def twice() -> list[list[float]]:
        try:
            scores = await asyncio.gather(
                client.ascore(QUERY, DOCUMENTS, model="other", max_tokens_per_doc=9),
                client.ascore(QUERY, DOCUMENTS[::-1]),
                asyncio.to_thread(client.score, QUERY, DOCUMENTS),
            )
            return [each.tolist() for each in scores]
        finally:
            await client.aclose()

    for _ in range(2):
        assert asyncio.run(twice()) == [EXPECTED, EXPECTED[::-1], EXPECTED]
    asked = {(each.get("model"), each.get("max_tokens_per_doc")) for each in endpoint.requests}
    assert asked == {("other", 9), ("own", None)}


def test_a_closed_client_scores_again(make: Make) -> None:
    client = make()
    for _ in range(2):
        assert client.score(QUERY, DOCUMENTS).tolist() == EXPECTED
        client.close()
    client.close()


def test_clients_share_one_thread(make: Make) -> None:
    for _ in range(3):
        make().score(QUERY, DOCUMENTS)
    assert sum(thread.name == "ctxguard-endpoints" for thread in threading.enumerate()) == 1


def test_no_documents_are_no_request(endpoint: RerankEndpoint, make: Make) -> None:
    client = make()
    assert client.score(QUERY, []).shape == (0,)
    assert (asyncio.run(client.ascore(QUERY, [])).shape, endpoint.requests) == ((0,), [])


def test_lone_surrogates_are_replaced(endpoint: RerankEndpoint, make: Make) -> None:
    make().score("red\ud800 fox", ["a\udfffb", "é 🦊"])
    (sent,) = endpoint.requests
    assert (sent["query"], sent["documents"]) == ("red� fox", ["a�b", "é 🦊"])


@pytest.mark.parametrize("text", ["é" * 500_000, "🦊" * 300_000, "\n" * 500_000 + "."])
def test_server_may_return_documents(endpoint: RerankEndpoint, make: Make, text: str) -> None:
    endpoint.sends_documents = True
    assert make().score(QUERY, [text, "red fox"]).tolist() == [0.0, 1.0]


@given(
    scores=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1),
    data=st.data(),
    protocol=st.sampled_from(list(FORMS)),
)
def test_score_belongs_to_its_index(
    scores: list[float], data: st.DataObject, protocol: RerankProtocol
) -> None:
    order = data.draw(st.permutations(range(len(scores))))
    n_given = data.draw(st.integers(1, len(scores)))
    form = FORMS[protocol]
    rows = [{"index": place, form.score: scores[place]} for place in order[:n_given]]
    answer = json.dumps(rows if form.results is None else {form.results: rows, "meta": None})
    read = read_scores(json.loads(answer), len(scores), protocol)
    expected = np.full(len(scores), np.nan)
    expected[order[:n_given]] = [scores[place] for place in order[:n_given]]
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    "score", ["null", "NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400]
)
def test_document_without_score_has_none(score: str) -> None:
    answer = f'{{"results": [{{"index": 0, "relevance_score": {score}}}, '
    answer += '{"index": 1, "relevance_score": 0.5}, {"index": 2}]}'
    np.testing.assert_array_equal(
        read_scores(json.loads(answer), 4, "cohere"), [np.nan, 0.5] + [np.nan] * 2
    )


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[" + "[]," * 100_000 + "[]]", "has more than 100,000 values"),
        ("null", "does not have the cohere form"),
        ('{"results": {"0": 1}}', "does not have the cohere form"),
        ('[{"index": 0, "score": 1}]', "does not have the cohere form: check the protocol"),
        ('{"results": []}', "has no finite relevance_score"),
        ('{"results": [{"index": 0, "relevance_score": NaN}]}', "has no finite relevance_score"),
        ('{"results": [{"index": 0, "score": 1}]}', "has no finite relevance_score"),
        *[
            (f'{{"results": [{{"index": {index}, "relevance_score": 1}}]}}', "that was not sent")
            for index in ("2", "-1", "0.0", '"0"', "true", "null")
        ],
        ('{"results": [1]}', "a document that was not sent"),
        (
            '{"results": [{"index": 0, "relevance_score": 1}, {"index": 0, "relevance_score": 1}]}',
            "two results for one document",
        ),
        *[
            (f'{{"results": [{{"index": 0, "relevance_score": {score}}}]}}', "is not a number")
            for score in ('"1"', "true", "[1]")
        ],
    ],
)
def test_answer_to_another_is_garbage(
    endpoint: RerankEndpoint, make: Make, answer: str, says: str
) -> None:
    endpoint.script.append(Answer(answer.encode()))
    error = failure(make(), ["a", "b"])
    assert (kind(error), says in str(error)) == (FailureKind.GARBAGE, True), error


def test_other_form_is_garbage_to_tei() -> None:
    with pytest.raises(StageError, match="does not have the tei form: check the protocol"):
        read_scores({"results": []}, 1, "tei")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        *[(status, "a redirect, which is not followed") for status in (301, 302, 303, 307, 308)],
        (400, "check the model's name"),
        (401, "does not accept the key"),
        (403, "does not accept the key"),
        (404, "does not know that path"),
        (413, "--max-client-batch-size"),
        (422, "--max-client-batch-size"),
        (429, "its rate limit is reached"),
        (204, "answered 204"),
        (500, "answered 500"),
        (503, "answered 503"),
    ],
)
def test_refusal_says_mend_quotes_nothing(
    endpoint: RerankEndpoint, make: Make, status: int, says: str
) -> None:
    body, elsewhere = b"" if status == 204 else b"you sent: nothing", f"{endpoint.url}/elsewhere"
    refusal = Answer(body, status=status, headers={"Location": elsewhere})
    endpoint.script.extend([refusal] * 30)
    error = failure(make(key=KEY))
    of_status = {429: OverloadedError} | dict.fromkeys((400, 413, 422), StageRefusedError)
    assert type(error) is of_status.get(status, StageUnavailableError)
    assert kind(error) is (FailureKind.SATURATED if status == 429 else FailureKind.ERROR)
    assert says in str(error)
    assert "nothing" not in str(error)
    assert KEY not in str(error)
    assert set(endpoint.paths) == {"/rerank"}


@pytest.mark.parametrize(
    "answer",
    [
        Answer(hang=True),
        Answer(b'{"results": []}' * 9, drip="headers"),
        Answer(b'{"results": []}' * 9, drip="body"),
    ],
    ids=["hangs", "drips headers", "drips its body"],
)
def test_whole_call_has_a_limit(endpoint: RerankEndpoint, make: Make, answer: Answer) -> None:
    endpoint.script.append(answer)
    error = failure(make(timeout_seconds=SOON))
    assert kind(error) is FailureKind.TIMEOUT
    assert "within 0.05 s" in str(error)


def test_callers_limit_ends_the_call(endpoint: RerankEndpoint, make: Make) -> None:
    endpoint.script.append(Answer(hang=True))
    client, stage = make(), Stage("rerank")

    async def call() -> None:
        try:
            await stage.await_within(lambda: client.ascore(QUERY, DOCUMENTS), SOON)
        finally:
            await client.aclose()

    with pytest.raises(StageError) as raised:
        asyncio.run(call())
    assert kind(raised.value) is FailureKind.TIMEOUT


def test_packed_answer_is_not_unpacked(endpoint: RerankEndpoint, make: Make) -> None:
    packed = gzip.compress(b" " * 100_000_000, compresslevel=1)
    endpoint.script.append(Answer(packed, headers={"Content-Encoding": "gzip"}))
    error = failure(make())
    assert (kind(error), "is not JSON" in str(error)) == (FailureKind.GARBAGE, True)
    assert endpoint.headers[0]["Accept-Encoding"] == "identity"


ANSWER = b'[{"index": 0, "score": 0.5}]'
ANSWERED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)


def test_few_interim_answers_are_skipped(make: Make) -> None:
    few = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    whole = few + ANSWERED
    for cut in (0, 5, 12, 24, 30, 70, len(few) + 3, len(whole) - 2):
        with sending(whole[:cut], whole[cut:], stays_open=True) as url:
            client = make(url, protocol="tei")
            # Also over a connection that is open already.
            for _ in range(2):
                assert client.score(QUERY, ["a"]).tolist() == [0.5]
            client.close()


def test_broken_connection_is_an_outage(endpoint: RerankEndpoint, make: Make) -> None:
    """The next call may do; so is a server without TLS."""
    endpoint.script.append(Answer(b'{"results": []}', cut=True))
    client, plain = make(), make(endpoint.url.replace("http:", "https:"))
    assert isinstance(failure(client), StageUnavailableError)
    assert client.score(QUERY, DOCUMENTS).tolist() == EXPECTED
    assert "does not speak TLS there" in str(failure(plain))


def test_environments_proxy_is_asked(
    endpoint: RerankEndpoint, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", endpoint.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert make("http://reranker.invalid").score(QUERY, DOCUMENTS).tolist() == EXPECTED
    assert make().score(QUERY, DOCUMENTS).tolist() == EXPECTED
    assert endpoint.paths == ["http://reranker.invalid/rerank", "/rerank"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        *[
            ({"url": url}, "the rerank URL is not http://HOST")
            for url in ("", "localhost:80", "ftp://host/v1", "http://", "http://[::1", "/v1/rerank")
        ],
        ({"url": f"http://user:{KEY}@host"}, "holds a user name or password"),
        ({"protocol": "grpc"}, "'grpc' is unknown; use one of cohere, voyage, tei, score"),
        ({"timeout_seconds": 0.0}, "must be finite and > 0"),
        ({"timeout_seconds": float("inf")}, "must be finite and > 0"),
        ({"key": ""}, "printable ASCII"),
    ],
)
def test_unworkable_setting_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as raised:
        RerankClient(**({"url": "http://host"} | settings))
    assert KEY not in str(raised.value)


def test_identity_names_protocol_and_model() -> None:
    made = [RerankClient(url, model="m") for url in ("http://one", "http://other/v1")]
    assert [client.fingerprint for client in made] == ["cohere m"] * 2
    assert RerankClient("http://one", protocol="tei").fingerprint == "tei (default model)"

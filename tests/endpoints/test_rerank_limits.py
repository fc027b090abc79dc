"""What a reranker refuses of one request is sent otherwise, and costs nobody else the guard."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ctxguard.endpoints.rerank import MOST_CALLS, RerankClient
from ctxguard.errors import StageRefusedError
from ctxguard.guard.telemetry import Telemetry
from ctxguard.server.scoring import BoundedScorer
from tests.rerank_endpoint import Answer, RerankEndpoint
from tests.timing import NEVER

QUERY = "red fox"
Refuse = Callable[[list[str]], "tuple[int, str] | None"]


class PickyReranker(RerankEndpoint):
    """Refuses documents by ``refuse``, which returns a status and a message."""

    refuse: Refuse = staticmethod(lambda _: None)

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
        refused = self.refuse(request.get("texts") or request["documents"])
        if refused is None:
            return super().answer(path, request)
        status, message = refused
        body = {"error": message, "error_type": "Validation"}
        return Answer(json.dumps(body).encode(), status=status)

    @property
    def sizes(self) -> list[int]:
        """How many documents each call had."""
        return [len(each.get("texts") or each["documents"]) for each in self.requests]


STAND_IN = PickyReranker


@pytest.fixture
def client(endpoint: PickyReranker) -> Iterator[RerankClient]:
    with closing(RerankClient(endpoint.url, timeout_seconds=NEVER)) as made:
        yield made


def documents(n: int) -> list[str]:
    return [f"red fox {at}" if at % 2 else f"cat {at}" for at in range(n)]


def expected(n: int) -> list[float]:
    return [float(at % 2) for at in range(n)]


def at_most(most: int, status: int, message: str) -> Refuse:
    return lambda texts: (status, message.format(len(texts), most)) if len(texts) > most else None


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (422, "batch size {} > maximum allowed batch size {}"),
        (413, "batch size {} > maximum allowed batch size {}"),
        (400, "too many documents: max number of documents is {1}, got {0}"),
        (422, "List should have at most {1} items after validation, not {0}"),
        (400, "The number of documents exceeds the limit of {1}."),
        (400, "You provided {} documents but the limit is {}"),
        (400, "too many documents"),
        (422, "Request has {} inputs, max {}"),
    ],
)
def test_many_documents_are_sent_in_parts(
    endpoint: PickyReranker, client: RerankClient, status: int, message: str
) -> None:
    """The limit is learned from the first answer, and kept."""
    endpoint.refuse = at_most(32, status, message)
    assert client.score(QUERY, documents(100)).tolist() == expected(100)
    endpoint.requests.clear()
    assert client.score(QUERY, documents(100)).tolist() == expected(100)
    assert len(endpoint.sizes) <= 5
    assert max(endpoint.sizes) <= 32


def test_a_key_sets_the_limit(endpoint: PickyReranker) -> None:
    client = RerankClient(endpoint.url, timeout_seconds=NEVER, most_documents=40)
    assert client.score(QUERY, documents(100)).tolist() == expected(100)
    assert sorted(endpoint.sizes) == [20, 40, 40]
    client.close()


LONG = "cat " * 5_000


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (413, "`inputs` must have less than 512 tokens. Given: 5003"),
        (400, "This model's maximum context length is 512 tokens. However, you requested 5003"),
        (500, "input (5003 tokens) is too large to process. increase the batch size (now 512)"),
        (400, "the request exceeds the available context size (512 tokens), try increasing it"),
        (400, "too many tokens: size limit exceeded by 4491 tokens. Try using shorter inputs"),
        (422, "String should have at most 2048 characters"),
        (400, "document too long"),
        (413, ""),
    ],
)
def test_long_documents_are_cut(
    endpoint: PickyReranker, client: RerankClient, status: int, message: str
) -> None:
    """One long document is cut; the others keep their words and scores."""
    endpoint.refuse = lambda texts: (status, message) if max(map(len, texts)) > 2_048 else None
    texts = ["red fox", LONG, "a red fox", "cat"]
    for _ in range(2):
        assert client.score(QUERY, texts).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert len(endpoint.requests) <= 24
    if "512 tokens." in message:  # learned
        assert len(endpoint.requests) <= 3
    short = [text for each in endpoint.requests for text in each["documents"] if text != LONG]
    assert {"red fox", "a red fox", "cat"} <= set(short)


@pytest.mark.parametrize("blank", ["", " ", "\n\t ", "\u3000"])
def test_blank_documents_are_not_sent(
    endpoint: PickyReranker, client: RerankClient, blank: str
) -> None:
    scores = client.score(QUERY, [blank, "red fox", blank])
    np.testing.assert_array_equal(scores, [np.nan, 1.0, np.nan])
    assert endpoint.requests[0]["documents"] == ["red fox"]
    assert np.isnan(client.score(QUERY, [blank, blank])).all()
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize("bad", [{3}, {0, 19}, {2, 7, 11}])
def test_refused_document_alone_lacks_score(
    endpoint: PickyReranker, client: RerankClient, status: int, bad: set[int]
) -> None:
    texts = documents(20)
    for at in bad:
        texts[at] = f"poison {at}"
    endpoint.refuse = lambda sent: (
        (status, "Bad Request") if any("poison" in text for text in sent) else None
    )
    scores = client.score(QUERY, texts)
    assert np.flatnonzero(np.isnan(scores)).tolist() == sorted(bad)
    good = [at for at in range(20) if at not in bad]
    assert scores[good].tolist() == [float(at % 2) for at in good]


@pytest.mark.parametrize("message", ["model not found", "Bad Request", "too long", "batch size"])
def test_a_refusal_of_everything_is_bounded(
    endpoint: PickyReranker, client: RerankClient, message: str
) -> None:
    """Where the query or a setting is refused, few calls are made in vain."""
    endpoint.refuse = lambda _: (400, message)
    with pytest.raises(StageRefusedError):
        client.score(QUERY, documents(1_000))
    assert len(endpoint.requests) <= MOST_CALLS


def test_a_tiny_limit_bounds_the_calls(endpoint: PickyReranker, client: RerankClient) -> None:
    endpoint.refuse = at_most(1, 422, "batch size {} > maximum allowed batch size {}")
    scores = client.score(QUERY, documents(1_000))
    assert len(endpoint.requests) <= MOST_CALLS
    assert 100 <= np.isfinite(scores).sum() <= MOST_CALLS


def test_scored_in_time_is_kept(endpoint: PickyReranker) -> None:
    """Parts that come too late have no score, and the others theirs."""
    client = RerankClient(endpoint.url, timeout_seconds=0.5, most_documents=1)
    client.score(QUERY, ["warm"])

    def hang(texts: list[str]) -> None:
        if "slow" in texts:
            endpoint.released.wait()

    endpoint.refuse = hang
    scores = client.score(QUERY, ["red fox", "slow"])
    np.testing.assert_array_equal(scores, [1.0, np.nan])
    client.close()


async def outcomes(client: RerankClient, requests: list[list[str]]) -> list[str]:
    scorer = BoundedScorer(client, None, 10, Telemetry(CollectorRegistry()))
    found = []
    for texts in requests:
        try:
            await scorer.scores(QUERY, texts, None, None)
            found.append("scored")
        except Exception as error:
            found.append(type(error).__name__)
    assert not scorer.is_open or "UnansweredError" in found
    await client.aclose()
    return found


@pytest.mark.parametrize("bad", [["poison"], [" ", ""], ["poison"] * 8])
def test_one_clients_input_opens_no_circuit(endpoint: PickyReranker, bad: list[str]) -> None:
    endpoint.refuse = lambda texts: (400, "no") if "poison" in texts else None
    client = RerankClient(endpoint.url, timeout_seconds=NEVER)
    found = asyncio.run(outcomes(client, [bad] * 5 + [["red fox"]]))
    assert found == ["StageRefusedError"] * 5 + ["scored"]


def test_an_outage_still_opens_the_circuit(endpoint: PickyReranker) -> None:
    endpoint.refuse = lambda _: (503, "down")
    client = RerankClient(endpoint.url, timeout_seconds=NEVER)
    found = asyncio.run(outcomes(client, [["red fox"]] * 5))
    assert found == ["StageUnavailableError"] * 3 + ["UnansweredError"] * 2

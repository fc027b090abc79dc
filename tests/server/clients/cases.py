"""What every client of the rerank protocol is asked, and what must hold of its answers."""

import json
import random
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.timing import PATIENCE_SECONDS

QUERY = "how do I keep a kettle clean — čajník, 水壺?"
MIN_RATIO = 0.05
DEFAULT = -1
"""Stands for whatever number of results a client asks for by itself."""

Ask = Callable[[str, Sequence[str], int], list[tuple[int, float]]]
"""Asks a server (URL, documents, number of results): each result's document and its score."""


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: In words.
        documents: Each ends with its relevance in parentheses, which the reranker reads.
        top_n: How many results the client asks for.
    """

    name: str
    documents: tuple[str, ...]
    top_n: int


def relevance(query: str, documents: Sequence[str]) -> list[float]:
    """The figure at the end of each document."""
    return [float(re.findall(r"\(([\d.]+)\)$", document)[0]) for document in documents]


def _documents(n: int, seed: int = 0) -> tuple[str, ...]:
    figures = [round((at + 1) / (n + 1), 6) for at in range(n)]
    random.Random(seed).shuffle(figures)
    return tuple(f"document {at} ({figure})" for at, figure in enumerate(figures))


_MANY = _documents(12)
_SCRIPTS = ("水壺", "čajník", "غلاية", "🫖👩🏽‍🔬", "ﬁ \u202eabc", "a\x00b\n\t\"'\\", " ", "ڪ" * 500)

CASES = [
    Case("as many as there are", _MANY, 12),
    Case("fewer", _MANY, 3),
    Case("fewer, and more than are kept", _MANY, 10),
    Case("one", _MANY, 1),
    Case("more", _MANY, 50),
    Case("the client's own number", _MANY, DEFAULT),
    Case("no document", (), 5),
    Case("one document", ("document (0.4)",), 5),
    Case("one document that is worth nothing", ("document (0)",), 5),
    Case("equal scores", tuple(f"document {at} (0.5)" for at in range(8)), 8),
    Case("fewer of equal scores", tuple(f"document {at} (0.5)" for at in range(8)), 3),
    Case("equal texts", ("document (0.5)",) * 6, 6),
    Case("only one is relevant", ("x (0.001)", "y (0.9)", "z (0.002)"), 3),
    Case(
        "many scripts",
        tuple(f"{text} ({(at * 5) % 8 / 10 + 0.1:.1f})" for at, text in enumerate(_SCRIPTS)),
        8,
    ),
    Case("a thousand", _documents(1_000), 1_000),
    Case("fewer of a thousand", _documents(1_000), 20),
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def post(url: str, **body: object) -> Any:
    """The answer to a request, as JSON."""
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.netloc, timeout=PATIENCE_SECONDS)) as connection:
        content_type = {"Content-Type": "application/json"}
        connection.request("POST", parts.path, json.dumps(body), content_type)
        answer = connection.getresponse()
        content = answer.read()
    assert answer.status == HTTPStatus.OK, content
    return json.loads(content)


@cache
def truth(guarded: str, documents: tuple[str, ...]) -> list[float]:
    """The score of each document, as the service says it to a client that asks for all."""
    results = post(f"{guarded}/v2/rerank", query=QUERY, documents=documents)["results"]
    scores = [-1.0] * len(documents)
    for result in results:
        scores[result["index"]] = result["relevance_score"]
    return scores


def check(ask: Ask, case: Case, plain: str, guarded: str) -> None:
    """A client pairs no score with another's document, and gets on as with plain reranking.

    Args:
        ask: Asks through the client.
        case: What is asked.
        plain: URL of the reranker.
        guarded: URL of the service in front of it.
    """
    try:
        expected = ask(plain, case.documents, case.top_n)
    except Exception as error:
        pytest.skip(f"the client cannot do this with any reranker ({type(error).__name__})")
    found = ask(guarded, case.documents, case.top_n)
    scores = truth(guarded, case.documents)
    assert found == [(at, pytest.approx(scores[at], rel=1e-6)) for at, _ in found]
    assert len({at for at, _ in found}) == len(found)
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    n_kept = sum(score > 0.0 for score in scores)
    whole = len(expected) == len(case.documents)
    assert len(found) == (len(expected) if whole else min(len(expected), n_kept))
    assert sum(score > 0.0 for _, score in found) == min(len(found), n_kept)

"""A local server that speaks Elasticsearch's `_msearch`, for tests without a cluster."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from ctxguard import Passage
from ctxguard.retrieval.analysers.english import ENGLISH
from tests.doubles import WordHashEmbedder

EMBEDDER = WordHashEmbedder()

Answered = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def response(hits: Sequence[Any], **others: Any) -> dict[str, Any]:
    return {
        "took": 1,
        "timed_out": False,
        "_shards": {"total": 1, "successful": 1, "skipped": 0, "failed": 0},
        "hits": {"max_score": None, "hits": list(hits)},
        "status": 200,
        **others,
    }


def refusal(status: int, kind: str) -> dict[str, Any]:
    return {"error": {"type": kind, "reason": "secret query"}, "status": status}


class Cluster:
    """Searches documents as its requests ask, or answers what a test says."""

    def __init__(self) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.answer: Answered = self.search
        self.status = 200
        self.body: bytes | None = None
        self.requests: list[list[Any]] = []
        self.paths: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        self.hangs.set()
        self._server.shutdown()
        self._server.server_close()

    def index(self, passages: Sequence[Passage]) -> None:
        vectors = EMBEDDER.encode_passages([f"{each.title} {each.text}" for each in passages])
        for passage, vector in zip(passages, vectors, strict=True):
            self.documents[passage.passage_id] = {
                **(passage.metadata or {}),
                "title": passage.title,
                "text": passage.text,
                "vector": vector,
            }

    def search(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if "knn" in body:
            knn = body["knn"]
            filters = knn.get("filter", {}).get("bool", {}).get("filter", [])
            asked = np.array(knn["query_vector"])

            def score(document: Mapping[str, Any]) -> float:
                return (1.0 + float(document["vector"] @ asked)) / 2.0

        else:
            boolean = body["query"].get("bool", {"must": [body["query"]], "filter": []})
            filters = boolean["filter"]
            words = set(ENGLISH.analyse(boolean["must"][0]["match"]["text"]["query"]))

            def score(document: Mapping[str, Any]) -> float:
                own = ENGLISH.analyse(f"{document['title']} {document['text']}")
                return float(len(words & set(own)))

        found = [
            (score(doc), name, doc)
            for name, doc in self.documents.items()
            if all(_matches(doc, each["terms"]) for each in filters)
        ]
        best = sorted([each for each in found if each[0] > 0.0], key=lambda one: (-one[0], one[1]))
        return response(
            [
                {
                    "_id": name,
                    "_score": points,
                    "_source": {each: doc[each] for each in body["_source"] if each in doc},
                }
                for points, name, doc in best[: body["size"]]
            ]
        )


def _matches(document: Mapping[str, Any], terms: Mapping[str, Sequence[Any]]) -> bool:
    ((path, allowed),) = terms.items()
    own = document.get(path.removesuffix(".keyword"), [])
    values = own if isinstance(own, list) else [own]
    return bool({str(each) for each in values} & {str(each) for each in allowed})  # as terms does


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            lines = [json.loads(line) for line in sent.splitlines()]
            cluster.requests.append(lines)
            cluster.paths.append(self.path)
            cluster.headers.append(dict(self.headers))
            answers = [cluster.answer(each) for each in lines[1::2]]
            body = cluster.body or json.dumps({"took": 1, "responses": answers}).encode()
            self.send_response(cluster.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            cluster.hangs.wait(10)
            self.wfile.write(body[half:])

        do_GET = do_POST  # noqa: N815  other engines' clients ask so

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    return Handler

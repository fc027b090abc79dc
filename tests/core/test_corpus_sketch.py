"""The sketch of a corpus says how much of it has changed, with the error that it claims."""

import base64

import numpy as np
import pytest

from ctxguard.core.corpus_sketch import SKETCH_SIZE, CorpusSketch, passage_digest
from ctxguard.core.types import Passage

REPEATS = 400


def two_corpora(
    rng: np.random.Generator, n: int, n_other: int, common: int
) -> tuple[CorpusSketch, CorpusSketch]:
    """Sketches of two corpora of random digests with so many in common."""
    digests = rng.integers(0, 2**64, size=n + n_other - common, dtype=np.uint64)
    return CorpusSketch.of(digests[:n]), CorpusSketch.of(digests[n - common :])


class TestDigest:
    PASSAGE = Passage("a", "some text", "a title", {"tenant": "x"})

    @pytest.mark.parametrize(
        "edited",
        [
            Passage("b", "some text", "a title"),
            Passage("a", "some text.", "a title"),
            Passage("a", "some text", ""),
            Passage("a", "", "some text"),
        ],
    )
    def test_depends_on_id_title_and_text(self, edited: Passage) -> None:
        assert passage_digest(edited) != passage_digest(self.PASSAGE)

    def test_does_not_depend_on_metadata(self) -> None:
        assert passage_digest(Passage("a", "some text", "a title")) == passage_digest(self.PASSAGE)

    def test_same_in_every_process_and_release(self) -> None:
        assert passage_digest(Passage("é", "𝕏", "t")) == 0xE75941022F776D7E
        assert 0 <= passage_digest(self.PASSAGE) < 2**64


class TestSketch:
    def test_order_of_the_corpus_is_irrelevant(self) -> None:
        digests = np.random.default_rng(0).integers(0, 2**64, size=5000, dtype=np.uint64)
        assert CorpusSketch.of(digests) == CorpusSketch.of(digests[::-1].tolist())

    def test_holds_smallest_digests_and_passage_count(self) -> None:
        sketch = CorpusSketch.of(range(3000, 0, -1))
        held = np.frombuffer(base64.b64decode(sketch.digests), "<u8")
        assert (sketch.passages, held.tolist()) == (3000, list(range(1, SKETCH_SIZE + 1)))

    @pytest.mark.parametrize(
        ("passages", "digests"),
        [
            (1, ""),
            (2, base64.b64encode(np.arange(3, dtype="<u8").tobytes()).decode()),
            (2, base64.b64encode(np.array([2, 1], "<u8").tobytes()).decode()),
            (1, "not base64"),
            (1, base64.b64encode(b"seven..").decode()),
            (-1, ""),
        ],
    )
    def test_refuses_what_is_no_sketch(self, passages: int, digests: str) -> None:
        with pytest.raises(ValueError, match="sketch"):
            CorpusSketch(passages, digests)


class TestChangedShare:
    @pytest.mark.parametrize(
        ("n", "n_other", "common"),
        [
            *[(0, 0, 0), (0, 7, 0), (7, 7, 7), (10, 10, 9), (10, 30, 10), (1000, 900, 450)],
            # The same, others, and one passage more are told exactly of larger corpora too.
            *[(n, n, n) for n in (1, 1000, 1024, 1025, 20_000)],
            *[(1025, 512, 0), (20_000, 10_000, 0), (20_000, 20_001, 20_000)],
        ],
    )
    def test_plain_changes_are_told_exactly(self, n: int, n_other: int, common: int) -> None:
        one, other = two_corpora(np.random.default_rng(1), n, n_other, common)
        truth = 1.0 - common / max(n, n_other) if n_other else 0.0
        assert one.changed_share(other) == pytest.approx(truth, abs=1e-12)

    @pytest.mark.parametrize(
        ("n", "n_other", "common"),
        [
            (10_000, 10_000, 7_000),  # edited, or as many deleted as added
            (10_000, 10_000, 3_000),
            (5_000, 10_000, 5_000),  # only added
            (10_000, 8_000, 8_000),  # only deleted
            (6_000, 10_000, 4_000),
            (500, 10_000, 400),  # one of them is held whole
        ],
    )
    def test_standard_error_is_as_documented(self, n: int, n_other: int, common: int) -> None:
        rng = np.random.default_rng(n + n_other + common)
        truth = 1.0 - common / max(n, n_other)
        jaccard = common / (n + n_other - common)
        # Of the union at least as many digests are compared as one sketch holds.
        error = (n + n_other) / max(n, n_other) / (1 + jaccard) ** 2
        error *= np.sqrt(jaccard * (1 - jaccard) / SKETCH_SIZE)
        pairs = [two_corpora(rng, n, n_other, common) for _ in range(REPEATS)]
        estimates = np.array([one.changed_share(other) for one, other in pairs])
        assert [other.changed_share(one) for one, other in pairs] == estimates.tolist()
        assert abs(estimates.mean() - truth) < 0.005
        assert estimates.std() < 1.15 * error
        assert (np.abs(estimates - truth) <= 1.96 * error).mean() >= 0.93
        assert np.abs(estimates - truth).max() < 0.06
        assert (np.abs(estimates - truth) <= 0.03).mean() >= 0.95

"""The traffic that live figures are held against."""

from benchmarks._live_traffic import _answer


def test_passages_are_no_copies() -> None:
    """Copies share one grade, and a dropped relevant passage would be none."""
    decision, _ = _answer(0)
    ranking = decision.ranking
    texts = [ranking.passages[place].text for place in range(len(ranking))]
    assert len({*texts}) == len(texts)

"""Hard negatives: which passages count as one, and the triplets that come of them."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.data.dataset import Dataset, Query
from calibration.data.hard_negatives import (
    Mining,
    Triplet,
    mine,
    triplets,
    write_triplets,
)
from calibration.replay import Pools
from ctxguard.core.types import Route, ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError


def pools_of(*ids: str, scores: tuple[float, ...] = (), kind: ScoreKind = ScoreKind.RATIO) -> Pools:
    """One query, ``q``, whose candidates are single letters."""
    values = scores or tuple(1.0 - 0.1 * n for n in range(len(ids[0])))
    return Pools(
        route=Route.HYBRID,
        kind=kind,
        query_ids=tuple(f"q{n}" if n else "q" for n in range(len(ids))),
        passage_ids=tuple(tuple(row) for row in ids),
        scores=np.array([values] * len(ids)),
        legs={},
        leg_kinds={},
    )


def labels(relevant: str, irrelevant: str = "", hard: str = "", distractors: str = "") -> Dataset:
    return Dataset(
        "d",
        (Query("q", "why?"),),
        {"q": {**dict.fromkeys(relevant, 1), **dict.fromkeys(irrelevant, 0)}},
        {
            "q": {
                **dict.fromkeys(hard, "hard_negative"),
                **dict.fromkeys(distractors, "distractor"),
            }
        },
    )


def found(mining: Mining) -> list[tuple[str, str, int]]:
    return [(n.passage_id, n.kind, n.rank) for n in mining.negatives]


class TestMining:
    def test_only_labelled_passages_count(self) -> None:
        mining = mine(pools_of("xirhd"), labels("r", irrelevant="i", hard="h", distractors="d"))
        assert found(mining) == [
            ("i", "irrelevant", 2),
            ("h", "hard_negative", 4),
            ("d", "distractor", 5),
        ]

    def test_far_below_the_first_relevant_is_not_hard(self) -> None:
        dataset = labels("r", irrelevant="abc")
        assert [n[0] for n in found(mine(pools_of("arbc"), dataset, near=1))] == ["a", "b"]
        assert [n[0] for n in found(mine(pools_of("arbc"), dataset, near=0))] == ["a"]

    def test_where_no_relevant_one_was_retrieved_all_that_is_judged_is_hard(self) -> None:
        mining = mine(pools_of("xxxab"), labels("r", irrelevant="ab"), near=0)
        assert [n[0] for n in found(mining)] == ["a", "b"]

    def test_a_query_without_a_relevant_passage_teaches_nothing(self) -> None:
        mining = mine(pools_of("ab"), labels("", irrelevant="ab"))
        assert (mining.negatives, mining.answerable) == ((), 0)

    def test_queries_that_give_none_are_counted(self) -> None:
        mining = mine(pools_of("rx"), labels("r"))
        assert (mining.answerable, mining.without_negative) == (1, 1)

    def test_unjudged_ones_must_miss_the_positive_by_the_margin(self) -> None:
        pools = pools_of("xryz", scores=(1.0, 0.9, 0.86, 0.85))
        mining = mine(pools, labels("r"), unjudged_margin=0.05)
        assert found(mining) == [("z", "unjudged", 4)]

    def test_a_margin_of_zero_takes_those_above_as_well(self) -> None:
        mining = mine(pools_of("xry"), labels("r"), unjudged_margin=0.0)
        assert [n[0] for n in found(mining)] == ["x", "y"]

    def test_judged_ones_come_first_and_the_rest_fill_up(self) -> None:
        mining = mine(
            pools_of("rxyi"), labels("r", irrelevant="i"), per_query=2, unjudged_margin=0.05
        )
        assert [n[0] for n in found(mining)] == ["i", "x"]

    def test_those_that_score_furthest_above_the_relevant_one_mislead_most(self) -> None:
        pools = pools_of("abry", scores=(1.0, 0.9, 0.5, 0.4))
        mining = mine(pools, labels("r", irrelevant="aby"))
        assert [each.lead for each in mining.negatives] == pytest.approx([0.5, 0.4, -0.1])
        assert [each.passage_id for each in mining.most_misleading(5)] == ["a", "b"]
        assert [each.passage_id for each in mining.most_misleading(1)] == ["a"]
        assert mine(pools_of("ab"), labels("r", irrelevant="ab")).most_misleading(5) == ()

    def test_without_a_relevant_one_in_sight_unjudged_ones_have_no_measure(self) -> None:
        assert mine(pools_of("xy"), labels("r"), unjudged_margin=0.05).negatives == ()

    def test_a_positive_that_scores_zero_has_nothing_below_it(self) -> None:
        pools = pools_of("rx", scores=(0.0, 0.0))
        assert mine(pools, labels("r"), unjudged_margin=0.05).negatives == ()

    def test_scores_that_carry_rank_only_have_no_margin(self) -> None:
        pools = pools_of("rx", kind=ScoreKind.RANK)
        with pytest.raises(ConfigurationError, match="use convex fusion"):
            mine(pools, labels("r"), unjudged_margin=0.05)
        assert mine(pools, labels("r"), unjudged_margin=None).answerable == 1

    @pytest.mark.parametrize(
        ("setting", "fault"),
        [
            ({"per_query": 0}, "per_query 0"),
            ({"near": -1}, "near -1"),
            ({"unjudged_margin": 1.0}, "margin 1.0"),
        ],
    )
    def test_a_setting_out_of_range_is_refused(self, setting: dict[str, int], fault: str) -> None:
        with pytest.raises(ConfigurationError, match=fault):
            mine(pools_of("rx"), labels("r"), **setting)

    @given(
        pool=st.text("abcdefgh", min_size=1, max_size=8).filter(lambda t: len(set(t)) == len(t)),
        relevant=st.sets(st.sampled_from("abcdefgh")),
        judged=st.sets(st.sampled_from("abcdefgh")),
        margin=st.none() | st.sampled_from([0.0, 0.05, 0.5]),
        per_query=st.integers(1, 5),
        near=st.integers(0, 5),
    )
    def test_no_relevant_passage_is_ever_a_negative(  # noqa: PLR0917
        self,
        pool: str,
        relevant: set[str],
        judged: set[str],
        margin: float | None,
        per_query: int,
        near: int,
    ) -> None:
        dataset = labels("".join(relevant), irrelevant="".join(judged - relevant))
        mining = mine(
            pools_of(pool), dataset, per_query=per_query, near=near, unjudged_margin=margin
        )
        ids = [n.passage_id for n in mining.negatives]
        assert not relevant & set(ids)
        assert len(ids) == len(set(ids)) <= per_query
        assert set(ids) <= set(pool)
        if margin is None:
            assert set(ids) <= judged


class TestTriplets:
    def made(self, dataset: Dataset, pool: str, absent: str = "") -> tuple[list[str], Counter[str]]:
        counts: Counter[str] = Counter()
        rows = triplets(
            mine(pools_of(pool), dataset),
            dataset,
            lambda passage_id: None if passage_id in absent else f"text of {passage_id}",
            counts,
        )
        return [row.positive_id + row.negative_id for row in rows], +counts

    def test_every_positive_and_every_negative_is_there(self) -> None:
        rows, _ = self.made(labels("rs", irrelevant="abc"), "abcrs")
        assert rows == ["ra", "sb", "rc"]
        rows, _ = self.made(labels("rst", irrelevant="a"), "arst")
        assert rows == ["ra", "sa", "ta"]

    def test_a_positive_without_text_is_left_out_and_counted(self) -> None:
        rows, counts = self.made(labels("rs", irrelevant="a"), "ar", absent="s")
        assert rows == ["ra"]
        assert counts == {"relevant passages are not in the index and are left out": 1}
        assert self.made(labels("r", irrelevant="a"), "a", absent="r")[0] == []

    def test_the_file_holds_one_triplet_a_line(self, tmp_path: Path) -> None:
        dataset = labels("rs", irrelevant="abc")
        mining = mine(pools_of("abcrs"), dataset)
        rows = tuple(triplets(mining, dataset, lambda i: f"text\nof {i} ü", Counter()))
        file = tmp_path / "new" / "t.jsonl"
        assert write_triplets(file, rows) == 3
        lines = file.read_text(encoding="utf-8").splitlines()
        assert [Triplet(**json.loads(line)) for line in lines] == list(rows)

    def test_nothing_found_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(CalibrationError, match="--unjudged-margin"):
            write_triplets(tmp_path / "t.jsonl", ())
        assert list(tmp_path.iterdir()) == []

"""Hard negatives: which passages count as one, and the triplets that come of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_pools import pools_of

from calibration.data.dataset import Dataset, Query
from calibration.hard_negatives import mine, triplets, write_triplets
from calibration.pools import Pools
from ctxguard.core.types import ScoreKind
from ctxguard.errors import CalibrationError, ConfigurationError


def labels(relevant: str, irrelevant: str = "", hard: str = "", distractors: str = "") -> Dataset:
    return Dataset(
        "d",
        (Query("q", "why?"),),
        {"q": {**dict.fromkeys(relevant, 1), **dict.fromkeys(irrelevant, 0)}},
        {"q": {**dict.fromkeys(hard, "hard_negative"), **dict.fromkeys(distractors, "distractor")}},
    )


RANKED, BELOW_ZERO = pools_of("rx", kind=ScoreKind.RANK), pools_of("rx", scores=(0.0, 0.0))
CLOSE = pools_of("xryz", scores=(1.0, 0.9, 0.86, 0.85))


class TestMining:
    @pytest.mark.parametrize(
        ("pools", "dataset", "settings", "expected"),
        [
            (pools_of("arbc"), labels("r", "abc"), {"near": 1}, "ab"),
            (pools_of("arbc"), labels("r", "abc"), {"near": 0}, "a"),
            # Without a relevant passage in sight the rank does not matter.
            (pools_of("xxxab"), labels("r", "ab"), {"near": 0}, "ab"),
            (pools_of("ab"), labels("", "ab"), {}, ""),
            # Unlabelled passages must miss the positive by the margin, or none is asked for.
            (CLOSE, labels("r"), {"unjudged_margin": 0.05}, "z"),
            (pools_of("xry"), labels("r"), {"unjudged_margin": 0.0}, "xy"),
            (pools_of("rxyi"), labels("r", "i"), {"per_query": 2, "unjudged_margin": 0.05}, "ix"),
            (pools_of("xy"), labels("r"), {"unjudged_margin": 0.05}, ""),
            (BELOW_ZERO, labels("r"), {"unjudged_margin": 0.05}, ""),
            (RANKED, labels("r"), {"unjudged_margin": None}, ""),
        ],
    )
    def test_negatives_are_labelled_or_far(
        self, pools: Pools, dataset: Dataset, settings: dict[str, Any], expected: str
    ) -> None:
        mined = mine(pools, dataset, **settings)
        assert tuple(mined) == dataset.answerable
        assert "".join(each.passage_id for each in mined.get("q", ())) == expected

    def test_each_has_kind_and_rank(self) -> None:
        mined = mine(pools_of("xirhd"), labels("r", irrelevant="i", hard="h", distractors="d"))
        assert mined["q"] == [
            ("i", "irrelevant", 2),
            ("h", "hard_negative", 4),
            ("d", "distractor", 5),
        ]

    def test_rank_only_has_no_margin(self) -> None:
        with pytest.raises(ConfigurationError, match="use convex fusion"):
            mine(RANKED, labels("r"), unjudged_margin=0.05)

    @pytest.mark.parametrize(
        ("setting", "fault"),
        [
            ({"per_query": 0}, "per_query 0"),
            ({"near": -1}, "near -1"),
            ({"unjudged_margin": 1.0}, "margin 1.0"),
        ],
    )
    def test_setting_out_of_range_is_refused(self, setting: dict[str, int], fault: str) -> None:
        with pytest.raises(ConfigurationError, match=fault):
            mine(pools_of("rx"), labels("r"), **setting)

    @given(
        pool=st.text("abcdefgh", min_size=1, max_size=8).filter(lambda t: len(set(t)) == len(t)),
        relevant=st.sets(st.sampled_from("abcdefgh")),
        judged=st.sets(st.sampled_from("abcdefgh")),
        settings=st.fixed_dictionaries(
            {
                "unjudged_margin": st.none() | st.sampled_from([0.0, 0.05, 0.5]),
                "per_query": st.integers(1, 5),
                "near": st.integers(0, 5),
            }
        ),
    )
    def test_relevant_is_never_negative(
        self, pool: str, relevant: set[str], judged: set[str], settings: dict[str, Any]
    ) -> None:
        dataset = labels("".join(relevant), irrelevant="".join(judged - relevant))
        ids = [n.passage_id for n in mine(pools_of(pool), dataset, **settings).get("q", ())]
        assert not relevant & set(ids)
        assert len(ids) == len(set(ids)) <= settings["per_query"]
        assert set(ids) <= set(pool)
        if settings["unjudged_margin"] is None:
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
        return [row["positive_id"] + row["negative_id"] for row in rows], +counts

    def test_all_positives_and_negatives_there(self) -> None:
        rows, _ = self.made(labels("rs", irrelevant="abc"), "abcrs")
        assert rows == ["ra", "sb", "rc"]
        rows, _ = self.made(labels("rst", irrelevant="a"), "arst")
        assert rows == ["ra", "sa", "ta"]

    def test_textless_positive_is_counted_out(self) -> None:
        rows, counts = self.made(labels("rs", irrelevant="a"), "ar", absent="s")
        assert rows == ["ra"]
        assert counts == {"relevant passages are not in the index and are left out": 1}
        assert self.made(labels("r", irrelevant="a"), "a", absent="r")[0] == []

    def test_file_holds_triplet_per_line(self, tmp_path: Path) -> None:
        dataset = labels("rs", irrelevant="abc")
        mining = mine(pools_of("abcrs"), dataset)
        rows = tuple(triplets(mining, dataset, lambda i: f"text\nof {i} ü", Counter()))
        file = tmp_path / "new" / "t.jsonl"
        assert write_triplets(file, rows) == 3
        lines = file.read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == list(rows)

    def test_nothing_found_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(CalibrationError, match="the key unjudged-margin"):
            write_triplets(tmp_path / "t.jsonl", ())
        assert list(tmp_path.iterdir()) == []

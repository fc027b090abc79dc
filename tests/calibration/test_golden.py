"""Golden sets: provenance, the rule for labels that disagree, frozen sets, coverage."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pools import pools_of

from calibration.data.coverage import coverage, unjudged
from calibration.data.dataset import Dataset, Query
from calibration.data.frozen_sets import changes, freeze, read_snapshot
from calibration.data.golden import Annotation, GoldenSet, adjudicate
from calibration.data.golden_sources import read_sources
from calibration.data.readers import read_beir
from ctxguard.errors import CalibrationError, ConfigurationError, DataError


def write(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def label(value: object = 1, **more: object) -> dict[str, object]:
    name = "distractor" if isinstance(value, str) else "grade"
    return {"query": "Why?", "passage_id": "p", name: value, "source": "human", **more}


def annotation(value: int | str, **more: object) -> Annotation:
    fields = {"source": "human", "annotator": None, "date": None, **more}
    return Annotation("q", "p", value, **fields)  # type: ignore[arg-type]


class TestAdjudication:
    @pytest.mark.parametrize(
        ("annotations", "value"),
        [
            ([annotation(2), annotation(0, date="2020-01-01")], 0),
            # The latest of two ways to mislead, then the worst.
            (
                [
                    annotation("distractor", date="2026-01-01T00:00:00+05:00"),
                    annotation("hard_negative", date="2026-01-01"),
                ],
                "hard_negative",
            ),
            ([annotation("distractor"), annotation("hard_negative")], "distractor"),
            # An annotator who labels again counts once.
            (
                [
                    annotation(0, annotator="ann", date="2026-01-01"),
                    annotation(2, annotator="ann", date="2026-01-02"),
                ],
                2,
            ),
            # People outweigh any number of machines.
            (
                [
                    annotation(0, source="authored"),
                    annotation(2, source="llm", annotator="judge-1", date="2026-09-01"),
                    annotation(2, source="llm", annotator="judge-2", date="2026-09-01"),
                    annotation(1, source="traffic"),
                ],
                0,
            ),
        ],
    )
    def test_labels_that_differ_give_one_value_in_any_order(
        self, annotations: list[Annotation], value: int | str
    ) -> None:
        for order in permutations(annotations):
            label = adjudicate(order)
            assert label.value == value
            assert len(label.annotations) == len(annotations)
            assert label.disputed == (len({given.value for given in annotations}) > 1)
            relevant = {given.grade > 0 for given in annotations}
            assert label.relevance_disputed == (len(relevant) > 1)

    @given(
        st.lists(
            st.builds(
                Annotation,
                st.just("q"),
                st.just("p"),
                st.sampled_from([0, 1, 2, "hard_negative", "distractor"]),
                st.sampled_from(["human", "authored", "traffic", "llm"]),
                st.sampled_from([None, "ann", "ben"]),
                st.sampled_from([None, "2026-01-01", "2026-01-02T10:00:00Z"]),
            ),
            min_size=1,
            max_size=6,
            unique=True,
        ),
        st.randoms(use_true_random=False),
    )
    def test_the_value_is_one_that_was_given_whatever_the_order(
        self, annotations: list[Annotation], random: object
    ) -> None:
        label = adjudicate(tuple(annotations))
        assert label.value in {given.value for given in annotations}
        shuffled = list(annotations)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        assert adjudicate(tuple(shuffled)).value == label.value


class TestImport:
    def test_jsonl_and_csv_say_the_same(self, tmp_path: Path) -> None:
        rows = write(
            tmp_path / "a.jsonl",
            label(2, query_id="q1", annotator="ann", date="2026-03-01", note="clear"),
        )
        table = write(
            tmp_path / "a.csv",
            "query_id,query,passage,grade,distractor,who,when,source,note",
            "q1,Why?,p,2,,ann,2026-03-01,human,clear",
        )
        assert read_sources([rows]) == read_sources([table])

    def test_a_query_without_an_id_joins_the_one_of_its_text(self, tmp_path: Path) -> None:
        golden = read_sources(
            [write(tmp_path / "a.jsonl", label(), label(query="  why?", query_id="q1"))]
        )
        assert golden.queries == (Query("q1", "  why?"),)
        assert len(golden.annotations) == 1
        assert golden.notes == ("1 labels are identical to another",)

    def test_a_made_id_depends_on_the_text_alone(self, tmp_path: Path) -> None:
        first = read_sources([write(tmp_path / "a.jsonl", label())])
        second = read_sources([write(tmp_path / "b.jsonl", label(query="WHY?", passage_id="x"))])
        assert first.queries[0].query_id == second.queries[0].query_id

    def test_a_log_of_queries_adds_up(self, tmp_path: Path) -> None:
        asked = {"query": "Why?", "source": "traffic"}
        log = write(tmp_path / "log.jsonl", asked, asked, {**asked, "count": 5})
        golden = read_sources([log])
        query_id = golden.queries[0].query_id
        assert golden.annotations == (Annotation(query_id, None, 0, "traffic", count=7),)
        assert golden.times_asked == {query_id: 7}

    def test_questions_with_answers_come_as_authored(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "questions.jsonl",
            {"query_id": "q", "text": "Why?", "relevant": {"a": 2}, "distractors": ["b"]},
            {"query_id": "r", "text": "Who?", "relevant": []},
        )
        golden = read_sources([path], source="authored")
        assert [(given.passage_id, given.value, given.source) for given in golden.annotations] == [
            ("a", 2, "authored"),
            ("b", "distractor", "authored"),
            (None, 0, "authored"),
        ]

    def test_a_row_that_waits_for_its_label_is_counted(self, tmp_path: Path) -> None:
        golden = read_sources([write(tmp_path / "a.jsonl", label(), label(None, passage_id="x"))])
        assert len(golden.annotations) == 1
        assert "1 rows for a passage have an empty grade" in golden.notes[0]

    def test_metadata_of_a_query_is_kept(self, tmp_path: Path) -> None:
        golden = read_sources([write(tmp_path / "a.jsonl", label(metadata={"topic": "x"}))])
        assert golden.queries[0].metadata == {"topic": "x"}

    @pytest.mark.parametrize(
        ("rows", "line", "fault"),
        [
            ([label(source=None)], 1, "give source"),
            ([label(source="guess")], 1, "source is 'guess'"),
            ([label(date="yesterday")], 1, "date 'yesterday' is not ISO 8601"),
            ([label(grade=1.5)], 1, "grade 1.5 is not a whole number"),
            ([label("decoy")], 1, "kind 'decoy' is unknown"),
            ([label(2, distractor="distractor")], 1, "grade 2 and a distractor"),
            ([{"query": "Why?", "passage_id": "p", "source": "human"}], 1, "without a label"),
            ([{"query": "Why?", "grade": 1, "source": "human"}], 1, "without a passage"),
            ([{"passage_id": "p", "grade": 1, "source": "human"}], 1, "names no query"),
            ([{"query": "Why?", "source": "traffic", "count": 0}], 1, "count is 0"),
            ([label(), label(query=None, query_id="q9")], 2, "no row gives the text of query 'q9'"),
            ([label(query_id="q"), label(query="Who?", query_id="q")], 2, r"is 'Who\?' here"),
            (
                [label(query_id="a"), label(query_id="b"), label()],
                3,
                "is that of a and of b; give query_id",
            ),
            (
                [label(metadata={"topic": "x"}), label(metadata={"topic": "y"})],
                2,
                "has other metadata in",
            ),
        ],
    )
    def test_a_fault_names_its_line(
        self, tmp_path: Path, rows: list[object], line: int, fault: str
    ) -> None:
        with pytest.raises(DataError, match=fault) as caught:
            read_sources([write(tmp_path / "a.jsonl", *rows)])
        assert caught.value.line == line

    @pytest.mark.parametrize("mark", [";", "\t"])
    def test_a_table_of_another_separator_is_read(self, tmp_path: Path, mark: str) -> None:
        lines = ["query,passage_id,grade,source", '"Why, then?",p,1,human']
        rows = [line.replace(",", mark).replace(f"Why{mark}", "Why,") for line in lines]
        plain = read_sources([write(tmp_path / "a.csv", *lines)])
        assert read_sources([write(tmp_path / "b.csv", *rows)]) == plain

    def test_other_columns_are_named(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", "frage;antwort", "Why?;p")
        with pytest.raises(DataError, match="it has frage, antwort"):
            read_sources([path], source="traffic")

    def test_a_short_row_of_a_csv_names_its_line(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.csv", "query,passage_id,grade,source", "Why?,p,1,human", "Who?")
        with pytest.raises(DataError, match="has 1 cells, the header has 4") as caught:
            read_sources([path])
        assert caught.value.line == 3

    def test_a_source_named_twice_is_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", label())
        with pytest.raises(ConfigurationError, match="named twice"):
            read_sources([path, tmp_path / "." / "a.jsonl"])


class TestFrozenSets:
    @pytest.fixture
    def golden(self, tmp_path: Path) -> GoldenSet:
        return read_sources(
            [
                write(
                    tmp_path / "people.jsonl",
                    label(2, query_id="q1", annotator="ann", date="2026-01-01"),
                    label(0, query_id="q1", annotator="ben", date="2026-02-01"),
                    label("distractor", query_id="q1", passage_id="x"),
                    label(1, query="Who?", query_id="q2", metadata={"topic": "t"}),
                ),
                write(tmp_path / "log.jsonl", {"query": "When?", "source": "traffic", "count": 3}),
            ]
        )

    def test_a_frozen_set_is_a_beir_folder_with_one_label_per_passage(
        self, golden: GoldenSet, tmp_path: Path
    ) -> None:
        snapshot = freeze(golden, tmp_path / "frozen", "dev")
        dataset = read_beir(tmp_path / "frozen", "dev")
        assert dataset.qrels == {"q1": {"p": 0, "x": 0}, "q2": {"p": 1}}
        assert dataset.distractors == {"q1": {"x": "distractor"}}
        assert snapshot.counts["disagreements"] == 1
        assert snapshot.counts["times_asked_in_traffic"] == 3
        assert (snapshot.counts["queries"], snapshot.counts["labelled_queries"]) == (3, 2)

    def test_it_reads_back_with_every_label_and_question(
        self, golden: GoldenSet, tmp_path: Path
    ) -> None:
        freeze(golden, tmp_path / "frozen")
        again = read_sources([tmp_path / "frozen"])
        assert again == golden
        assert freeze(again, tmp_path / "again") == read_snapshot(tmp_path / "frozen")

    def test_the_digest_does_not_depend_on_how_the_labels_came(self, tmp_path: Path) -> None:
        rows = [label(2, annotator="ann"), label(1, query="Who?"), label(0, annotator="ben")]
        one = write(tmp_path / "one.jsonl", *rows)
        parts = [write(tmp_path / f"{9 - n}.jsonl", row) for n, row in enumerate(rows)]
        first = freeze(read_sources([one]), tmp_path / "first")
        second = freeze(read_sources(parts), tmp_path / "second")
        assert first.digest == second.digest
        noted = write(tmp_path / "noted.jsonl", *rows[1:], {**rows[0], "note": "seen again"})
        assert freeze(read_sources([noted]), tmp_path / "third").digest != first.digest

    def test_what_was_changed_is_named(self, golden: GoldenSet, tmp_path: Path) -> None:
        folder = tmp_path / "frozen"
        freeze(golden, folder)
        assert changes(folder) == ()
        qrels = folder / "qrels" / "train.tsv"
        qrels.write_text(qrels.read_text().replace("q2\tp\t1", "q2\tp\t0"))
        (folder / "distractors.tsv").unlink()
        write(folder / "pools.jsonl", "{}")
        file = folder / "snapshot.json"
        file.write_text(file.read_text().replace('"disagreements": 1', '"disagreements": 0'))
        assert changes(folder) == (
            "distractors.tsv is gone",
            "pools.jsonl was added",
            "qrels/train.tsv was changed",
            "snapshot.json was changed: its digest does not match its content",
        )

    @pytest.mark.parametrize(
        ("text", "fault"),
        [
            (None, "there is no such file"),
            ("{", "not the snapshot of a golden set .*Invalid JSON"),
            ("[]", "not the snapshot of a golden set"),
            ('{"format": "ctxguard golden set", "schema_version": 9}', "schema_version: .*be 1"),
            ('{"format": "ctxguard golden set", "schema_version": 1}', "digest: Field required"),
        ],
    )
    def test_a_broken_snapshot_is_refused(
        self, tmp_path: Path, text: str | None, fault: str
    ) -> None:
        if text is not None:
            write(tmp_path / "snapshot.json", text)
        with pytest.raises(DataError, match=fault):
            read_snapshot(tmp_path)


class TestCoverage:
    DATASET = Dataset(
        "d",
        (Query("q1", "one"), Query("q2", "two"), Query("q3", "three")),
        {"q1": {"a": 1, "b": 0}, "q2": {"a": 1}},
        {"q1": {"c": "distractor"}},
    )

    def test_it_is_the_mean_share_of_the_first_k_that_has_a_label(self) -> None:
        pools = pools_of({"q1": "abxc", "q2": "axyz", "q3": "wxyz"})
        rows = {row.k: row for row in coverage(pools, self.DATASET, (4, 1))}
        assert list(rows) == [1, 4]
        assert (rows[1].judged.value, rows[1].fully_judged, rows[1].unjudged) == (1.0, 1.0, 0)
        assert rows[4].judged.value == pytest.approx((3 / 4 + 1 / 4) / 2)
        assert (rows[4].judged.n, rows[4].fully_judged, rows[4].unjudged) == (2, 0.0, 4)

    def test_a_short_ranking_counts_as_far_as_it_goes(self) -> None:
        (row,) = coverage(pools_of({"q1": "ab", "q2": "axyz"}), self.DATASET, (4,))
        assert row.judged.value == pytest.approx((1 + 1 / 4) / 2)

    def test_unjudged_passages_come_by_what_their_label_can_move(self) -> None:
        pools = pools_of({"q1": "xab", "q2": "awx", "q3": "yza"})
        found = unjudged(pools, self.DATASET, 2, {"q3": 10})
        assert [(u.query_id, u.passage_id, u.rank) for u in found] == [
            ("q3", "y", 1),
            ("q3", "z", 2),
            ("q1", "x", 1),
            ("q2", "w", 2),
        ]

    @pytest.mark.parametrize("ks", [(), (0,), (5,)])
    def test_a_cutoff_outside_the_replay_is_refused(self, ks: tuple[int, ...]) -> None:
        with pytest.raises(ConfigurationError, match="from 1 to the depth, 4"):
            coverage(pools_of({"q1": "abxc"}), self.DATASET, ks)

    def test_without_labels_there_is_no_coverage(self) -> None:
        with pytest.raises(CalibrationError, match="no query has a label"):
            coverage(pools_of({"q3": "abxc"}), self.DATASET, (1,))


ids = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=6
).filter(lambda text: text == text.strip() and "\t" not in text and "\n" not in text)
json_values = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


@st.composite
def golden_sets(draw: st.DrawFn) -> GoldenSet:
    """Sets in which every query has a label."""
    text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(
        lambda text: bool(text.strip())
    )
    queries, annotations = [], []
    for query_id in sorted(draw(st.lists(ids, min_size=1, max_size=4, unique=True))):
        metadata = draw(st.none() | st.dictionaries(st.text(max_size=4), json_values, max_size=2))
        queries.append(Query(query_id, draw(text), metadata))
        for passage_id in sorted(draw(st.lists(ids, min_size=1, max_size=5, unique=True))):
            value = draw(st.sampled_from([0, 1, 3, "hard_negative", "distractor"]))
            annotations.append(Annotation(query_id, passage_id, value, "human"))
    return GoldenSet(tuple(queries), tuple(annotations))


class TestWriting:
    @given(golden=golden_sets())
    @settings(max_examples=60, deadline=None)
    def test_what_is_written_reads_back_equal(
        self, golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("golden") / "set"
        freeze(golden, folder, "dev")
        dataset = golden.dataset()
        again = read_beir(folder, "dev")
        assert replace(again, name=dataset.name, notes=()) == dataset
        assert again.notes == ()
        assert again.digest() == dataset.digest()

    @pytest.mark.parametrize(
        ("query", "passage_id", "fault"),
        [
            (Query("a b\t", "?"), "p", "cannot stand in a table"),
            (Query("q", "?"), "", "cannot stand in a table"),
            (Query("q", "\ud800"), "p", "lone surrogate"),
            (Query("q", "?", {"x": float("nan")}), "p", "written as JSON"),
        ],
    )
    def test_what_the_format_cannot_hold_is_refused_and_leaves_nothing(
        self, tmp_path: Path, query: Query, passage_id: str, fault: str
    ) -> None:
        golden = GoldenSet((query,), (Annotation(query.query_id, passage_id, 1, "human"),))
        with pytest.raises(DataError, match=fault):
            freeze(golden, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_holds_something_is_left_alone(self, tmp_path: Path) -> None:
        write(tmp_path / "mine.txt", "mine")
        with pytest.raises(ConfigurationError, match="is there already"):
            freeze(GoldenSet((), ()), tmp_path)

    def test_a_split_must_be_a_file_name(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="name of a file"):
            freeze(GoldenSet((), ()), tmp_path / "out", "../test")

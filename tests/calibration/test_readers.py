"""Reading labelled data: what is accepted, what is counted, and what each refusal says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.data.dataset import Dataset, Query, same_text, split_by_query, unknown_passages
from calibration.data.readers import (
    read_beir,
    read_corpus,
    read_jsonl,
    read_trec_run,
    splits,
    write_trec_run,
)
from ctxguard.core.types import Hit
from ctxguard.errors import CalibrationError, ConfigurationError, DataError
from tests.documents import write_lines

ID_NAMES = (b"_id", b"id", b"passage_id")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small BEIR folder: q1 and q2 in test, q2 unanswerable, q3 in train."""
    write_lines(
        tmp_path / "corpus.jsonl",
        {"_id": "a", "title": "A", "text": "first"},
        {"_id": "b", "text": "second", "metadata": {"lang": "en"}},
    )
    write_lines(
        tmp_path / "queries.jsonl",
        {"_id": "q1", "text": "one?", "metadata": {"topic": "x"}},
        {"_id": "q2", "text": "two?"},
        {"_id": "q3", "text": "three?"},
    )
    header = "query-id corpus-id score"
    write_lines(tmp_path / "qrels" / "test.tsv", header, "q1 a 2", "q1 b 0", "q2 a 0")
    write_lines(tmp_path / "qrels" / "train.tsv", header, "q3 b 1")
    write_lines(
        tmp_path / "distractors.tsv",
        "query-id corpus-id kind",
        "q1 b hard_negative",
        "q3 a distractor",
    )
    return tmp_path


def make(n: int, **metadata: object) -> Dataset:
    queries = tuple(Query(f"q{i}", f"question {i}", metadata or None) for i in range(n))
    return Dataset("made", queries, {f"q{i}": {f"p{i}": 1} for i in range(n)})


def test_split_holds_qrels_queries(folder: Path) -> None:
    data = read_beir(folder, "test")
    assert [query.query_id for query in data.queries] == ["q1", "q2"]
    assert data.queries[0] == Query("q1", "one?", {"topic": "x"})
    assert data.qrels == {"q1": {"a": 2, "b": 0}, "q2": {"a": 0}}
    assert data.distractors == {"q1": {"b": "hard_negative"}}
    assert data.notes == ()
    assert splits(folder) == ("test", "train")


def test_unanswered_query_takes_part(folder: Path) -> None:
    data = read_beir(folder)
    assert data.answerable == ("q1",)
    assert data.relevant("q1") == {"a": 2}
    assert data.relevant("q2") == {}
    assert data.max_grade == 2
    assert data.subset(["q2"]).max_grade is None


def test_distractor_only_query_joins_lone_split(folder: Path) -> None:
    assert {query.query_id for query in read_beir(folder).queries} == {"q1", "q2"}
    (folder / "qrels" / "train.tsv").unlink()
    assert {query.query_id for query in read_beir(folder).queries} == {"q1", "q2", "q3"}


def test_corpus_is_folder_or_file(folder: Path) -> None:
    passages = list(read_corpus(folder))
    assert [(p.passage_id, p.title, p.text) for p in passages] == [
        ("a", "A", "first"),
        ("b", "", "second"),
    ]
    assert passages[1].metadata == {"lang": "en"}
    assert list(read_corpus(folder / "corpus.jsonl")) == passages


@pytest.mark.parametrize(
    ("content", "passages", "notes"),
    [
        *[(b'{"%s": 7, "text": "t", "title": null}' % n, [("7", "t", "")], ()) for n in ID_NAMES],
        (
            b'\xef\xbb\xbf{"_id": "a", "text": "x"}\r\n\r\n  \n{"_id": "b", "text": "y"}',
            [("a", "x", ""), ("b", "y", "")],
            (),
        ),
        (
            rb'{"_id": "a", "text": "x\ud800y\udc00", "title": "\ud83d\ude00"}',
            [("a", "x\ufffdy\ufffd", "😀")],
            ("2 lone surrogates replaced by U+FFFD",),
        ),
        (
            b'{"_id": "a", "text": " "}',
            [("a", " ", "")],
            ("1 passages have neither title nor text",),
        ),
    ],
)
def test_odd_corpus_is_read(
    tmp_path: Path, content: bytes, passages: list[tuple[str, ...]], notes: tuple[str, ...]
) -> None:
    """With any name of the id, which may be a number; marks, blanks and CRLF; half a pair."""
    (tmp_path / "c.jsonl").write_bytes(content)
    corpus = read_corpus(tmp_path / "c.jsonl")
    assert [(each.passage_id, each.text, each.title) for each in corpus] == passages
    assert corpus.notes == notes


def test_queries_lone_surrogates_are_replaced(folder: Path) -> None:
    write_lines(folder / "queries.jsonl", {"_id": "q1", "text": "\ud83d?"})
    data = read_beir(folder)
    assert data.queries[0].text == "\ufffd?"
    assert any("surrogates" in note for note in data.notes)


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        (b'{"_id": "a", "text": "x"}\n{"_id": "b", ', 2, "broken JSON at column"),
        (b'{"_id": "a", "text": "x"}\n["b"]\n', 2, "not a JSON object"),
        (b"[" * 100_000, 1, "JSON"),
        (b'{"text": "x"}\n', 1, "field _id (or id, passage_id) is missing; the object has text"),
        (b'{"_id": "a"}\n', 1, "field text is missing; the object has _id"),
        (b'{"_id": "a", "text": 5}\n', 1, "text is 5"),
        (b'{"_id": "a", "text": null}\n', 1, "text is None"),
        (b'{"_id": "a", "text": "x", "title": ["t"]}\n', 1, "title is ['t']"),
        (b'{"_id": "a", "text": "x", "metadata": "m"}\n', 1, "metadata is 'm'"),
        (b'{"_id": true, "text": "x"}\n', 1, "_id is True"),
        (b'{"_id": " ", "text": "x"}\n', 1, "_id is ' '"),
        (b'{"_id": "a", "text": "x"}\n\n{"_id": "a", "text": "y"}\n', 3, "already on line 1"),
        (b'\xff\xfe{\x00"\x00', 1, "byte 0xff (byte 1 of the line) is not UTF-8"),
        (b'{"_id": "a", "text": "x"}\n{"_id": "\xe9"}\n', 2, "byte 0xe9 (byte 10 of the line)"),
    ],
)
def test_broken_corpus_names_the_place(
    tmp_path: Path, content: bytes, line: int, says: str
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_corpus(path))
    assert (caught.value.path, caught.value.line) == (path, line)
    assert says in str(caught.value)


def test_missing_files_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*no such file"):
        read_corpus(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"nowhere.*no such folder"):
        read_beir(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no such file"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match="contains no queries"):
        read_jsonl(empty)
    with pytest.raises(DataError, match="contains no passages"):
        list(read_corpus(empty))
    with pytest.raises(DataError, match="cannot be read"):
        read_trec_run(folder)
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DataError, match=r"queries\.jsonl: there is no such file"):
        read_beir(folder)


def test_unknown_split_lists_the_known(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no split 'dev'; the folder has test, train"):
        read_beir(folder, "dev")
    empty = folder / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match="contains no splits"):
        read_beir(empty)


QRELS, KINDS, QUESTIONS = "qrels/test.tsv", "distractors.tsv", "queries.jsonl"


@pytest.mark.parametrize(
    ("file", "rows", "says"),
    [
        (QRELS, ["query-id corpus-id score", "q1 a high"], "line 2: grade 'high' is not a whole"),
        (QRELS, ["q1 a 0.5"], "line 1: grade '0.5' is not a whole number"),
        (QRELS, ["q1 a nan"], "line 1: grade 'nan' is not a whole number"),
        (QRELS, ["q1 a"], "line 1: .* has 2 columns"),
        (QRELS, ["q1 a b 2"], "line 1: 'a' is not a TREC iteration"),
        (QRELS, ["q1 0 a b 2"], "line 1: .* has 5 columns"),
        (QRELS, ["q1 a 1", "q1 b 0", "q1 a 2"], "line 3: .* is labelled 2 here and 1 on line 1"),
        (QRELS, ["query-id corpus-id score"], "contains no labels"),
        (QRELS, ["q8 a 2"], "names no query"),
        (KINDS, ["q1 b nasty"], "line 1: kind 'nasty' is unknown; use hard_negative or"),
        (KINDS, ["q1 a distractor"], r"line 1: .*grade 2 in .*test\.tsv, line 2"),
        (QUESTIONS, ['{"_id":"q1","text":"a"}'] * 2, "line 2: query id 'q1' is already on line 1"),
        (QUESTIONS, ['{"_id":"q1","text":"\\n"}'], "line 1: query 'q1' has no text"),
    ],
)
def test_broken_folder_names_the_place(folder: Path, file: str, rows: list[str], says: str) -> None:
    path = write_lines(folder / file, *rows)
    with pytest.raises(DataError, match=says) as caught:
        read_beir(folder)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("rows", "relevant_from", "qrels", "notes"),
    [
        (
            ["q1 a 2", "q1 a 2.0", "q2 a -1"],
            1,
            {"q1": {"a": 2}, "q2": {"a": 0}},
            [
                "1 negative grades read as 0, judged not relevant",
                "1 rows of test.tsv repeat another",
            ],
        ),
        (
            ["q1 a 2", "q8 a 1", "q9 a 1"],
            1,
            {"q1": {"a": 2}},
            ["2 labelled queries are not in queries.jsonl and are left out, such as 'q8'"],
        ),
        # Scales whose lower grades say that a passage is not relevant: TREC's, stars.
        (
            ["q1 a 2", "q1 b 1", "q2 a 3", "q2 b 0"],
            2,
            {"q1": {"a": 2, "b": 0}, "q2": {"a": 3, "b": 0}},
            ["1 grades below relevant-from = 2 count as not relevant"],
        ),
    ],
)
def test_odd_labels_are_counted(
    folder: Path,
    rows: list[str],
    relevant_from: int,
    qrels: dict[str, dict[str, int]],
    notes: list[str],
) -> None:
    write_lines(folder / "qrels" / "test.tsv", *rows)
    data = read_beir(folder, relevant_from=relevant_from)
    assert data.qrels == qrels
    assert sorted(data.notes) == notes


def test_labels_outside_corpus_are_named(folder: Path) -> None:
    write_lines(folder / "distractors.tsv", "q1 b hard_negative", "q1 z distractor")
    data = read_beir(folder)
    assert unknown_passages(data, ["a", "b"]) == ("z",)
    assert unknown_passages(data, ["a", "b", "z"]) == ()
    assert unknown_passages(data, ["z"]) == ("a", "b")


def test_jsonl_can_hold_everything(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"query_id": "q1", "text": "one?", "relevant": {"a": 2, "b": 1}, "distractors": ["c"]},
        {"id": 2, "query": "two?", "relevant": ["a"], "distractors": {"b": "hard_negative"}},
        {"_id": "q3", "text": "three?", "relevant": []},
    )
    data = read_jsonl(path)
    assert data.name == "mine"
    assert data.qrels == {"q1": {"a": 2, "b": 1}, "2": {"a": 1}, "q3": {}}
    assert data.distractors == {"q1": {"c": "distractor"}, "2": {"b": "hard_negative"}}
    assert data.answerable == ("q1", "2")


def test_keywords_are_labels_too(tmp_path: Path) -> None:
    kettle = {"_id": "q1", "text": "one?", "keywords": ["kettle", "hot water"]}
    data = read_jsonl(write_lines(tmp_path / "q.jsonl", kettle, {**kettle, "_id": "q2"}))
    assert data.keywords == dict.fromkeys(("q1", "q2"), ("kettle", "hot water"))
    assert data.qrels == {}
    assert data.subset(["q1"]).keywords == {"q1": ("kettle", "hot water")}
    assert data.digest() != replace(data, keywords={}).digest()
    both = read_jsonl(write_lines(tmp_path / "both.jsonl", {**kettle, "relevant": ["a"]}))
    assert (both.keywords, both.qrels) == ({"q1": ("kettle", "hot water")}, {"q1": {"a": 1}})


def test_trec_run_is_sorted_ranked(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    path.write_text("1 Q0 b 1 0.5 t\n1 Q0 a 0 0.9 t\n1 Q0 d 3 0.1 t\n1 Q0 c 2 0.1 t\n2 Q0 a 0 3\n")
    run = read_trec_run(path)
    assert [(hit.passage_id, hit.score, hit.rank) for hit in run["1"]] == [
        *(("a", 0.9, 1), ("b", 0.5, 2), ("c", 0.1, 3), ("d", 0.1, 4))
    ]
    assert run["2"][0].rank == 1


TWICE = r"line 1: .*the key '\w+' occurs twice"


@pytest.mark.parametrize(
    ("read", "content", "says"),
    [
        (read_trec_run, "1 Q0 a 1\n", "line 1: .*4 columns"),
        (read_trec_run, "1 Q0 a 1 nan t\n", "line 1: score 'nan' is not a finite number"),
        (read_trec_run, "1 Q0 a 1 x t\n", "line 1: score 'x'"),
        (read_trec_run, "1 Q0 a first 1.0 t\n", "line 1: rank 'first'"),
        (read_trec_run, "1 Q0 a 1 2 t\n1 Q0 a 2 1 t\n", "line 2: .*already on line 1"),
        (read_trec_run, "\n", "contains no line of a run"),
        (read_jsonl, {}, "relevant and keywords are missing; write relevant: "),
        (read_jsonl, {"keywords": "kettle"}, "keywords is 'kettle'; write a list of strings"),
        (read_jsonl, {"keywords": ["kettle", " "]}, "write a list of strings"),
        (read_jsonl, {"relevant": "a"}, "relevant is 'a'; write a list"),
        (read_jsonl, {"relevant": {"a": "good"}}, "grade 'good' is not a whole number"),
        (read_jsonl, {"relevant": {"a": True}}, "grade True is not a whole number"),
        (read_jsonl, {"relevant": None}, "relevant and keywords are missing"),
        (read_jsonl, {"keywords": []}, "relevant and keywords are missing"),
        (
            read_jsonl,
            {"relevant": [None]},
            "relevant is None; an id must be a string or a whole number",
        ),
        (read_jsonl, {"relevant": ["a"], "distractors": {"b": 1}}, "kind 1 is unknown"),
        (
            read_jsonl,
            {"relevant": ["a"], "distractors": ["a"]},
            "'a' is both relevant and a distractor",
        ),
        (
            read_jsonl,
            '{"id": 1, "text": "?", "relevant": []}\n{"id": 2, "text": "?", "keywords": ["a"]}',
            "line 2: query '2' has only keywords, but others",
        ),
        # Of a repeated key the last would count, in silence.
        (read_jsonl, '{"id": 1, "text": "?", "relevant": {"a": 1, "a": 0}}', TWICE),
        (read_jsonl, '{"id": 1, "text": "?", "relevant": ["a"], "relevant": ["b"]}', TWICE),
        (read_jsonl, '{"id": 1, "id": 2, "text": "?", "relevant": ["a"]}', TWICE),
    ],
)
def test_broken_run_says_whats_wrong(
    tmp_path: Path, read: Callable[[Path], object], content: str | dict[str, object], says: str
) -> None:
    path = tmp_path / "broken"
    is_row = isinstance(content, dict)
    write_lines(path, {"query_id": "q", "text": "?", **content} if is_row else content)
    with pytest.raises(DataError, match=says):
        read(path)


def test_digest_is_of_content() -> None:
    data = make(3)
    shuffled = Dataset("other", data.queries[::-1], dict(reversed(data.qrels.items())))
    assert shuffled.digest() == data.digest()
    assert data.subset(["q0", "q1"]).digest() != data.digest()
    graded = Dataset("made", data.queries, {**data.qrels, "q0": {"p0": 2}})
    assert graded.digest() != data.digest()


@given(n=st.integers(4, 60), seed=st.integers(0, 2**40), first=st.floats(0.3, 0.7))
def test_parts_partition_by_shares(n: int, seed: int, first: float) -> None:
    data = make(n)
    parts = split_by_query(data, (first, 1.0 - first), seed)
    ids = [query.query_id for part in parts for query in part.queries]
    assert sorted(ids) == sorted(query.query_id for query in data.queries)
    assert abs(len(parts[0]) - first * n) <= 1
    assert [set(part.qrels) for part in parts] == [{q.query_id for q in p.queries} for p in parts]


def test_split_is_reproducible_anywhere() -> None:
    data = make(10)
    first = split_by_query(data, (0.5, 0.5), seed=7)[0]
    assert {query.query_id for query in first.queries} == {"q1", "q2", "q3", "q6", "q7"}
    turned = Dataset("made", data.queries[::-1], data.qrels)
    assert split_by_query(turned, (0.5, 0.5), seed=7)[0].digest() == first.digest()
    assert split_by_query(data, (0.5, 0.5), seed=8)[0].digest() != first.digest()


@given(seed=st.integers(0, 1000))
def test_repeated_question_stays_in_part(seed: int) -> None:
    queries = tuple(Query(f"q{i}", f"Question  {i % 10}" + "  ?" * (i > 9)) for i in range(20))
    twins = (Query("t1", "WHAT is it?"), Query("t2", "what  is it?\n"), Query("t3", "What is it?"))
    parts = split_by_query(Dataset("t", queries + twins, {}), (0.5, 0.5), seed)
    ids = [{query.query_id for query in part.queries} for part in parts]
    assert {"t1", "t2", "t3"} <= ids[0] or {"t1", "t2", "t3"} <= ids[1]
    assert parts[0].notes == ("2 queries with the same text as another: kept in the same part",)
    assert same_text(*parts) == ()
    twin = Dataset("a", (Query("x", "what  IS it?"),), {})
    first = Dataset("b", (Query("q1", "What is it?"), Query("q2", "Who?")), {})
    assert same_text(first, twin) == (("q1", "x"),)


@pytest.mark.parametrize("shares", [(), (0.5, 0.6), (1.5, -0.5), (1.0, 0.0)])
def test_impossible_parts_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigurationError, match="sum to 1"):
        split_by_query(make(4), shares)
    with pytest.raises(CalibrationError, match="1 queries in 1 groups cannot fill 2 parts"):
        split_by_query(make(1), (0.5, 0.5))
    with pytest.raises(ConfigurationError, match="no query 'zz'"):
        make(2).subset(["q0", "zz"])


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "split", "counts"),
    [
        ("scifact", "train", (5183, 809, 505, 355)),
        ("scifact", "test", (5183, 300, 188, 130)),
        ("musique", "test", (1890, 100, 100, 1763)),
        ("medquad_nih", "test", (446, 86, 39, 117)),
        ("noveleval", "test", (420, 21, 21, 0)),
        ("anthropic_docs", "test", (232, 100, 100, 0)),
    ],
)
def test_shared_collections_match_their_description(
    shared_data: Path, name: str, split: str, counts: tuple[int, ...]
) -> None:
    corpus = read_corpus(shared_data / name)
    ids = [passage.passage_id for passage in corpus]
    data = read_beir(shared_data / name, split)
    distractors = sum(map(len, data.distractors.values()))
    assert (len(ids), len(data), len(data.answerable), distractors) == counts
    assert data.max_grade == 2
    assert unknown_passages(data, set(ids)) == ()
    assert data.notes == corpus.notes == ()


class TestWritingRuns:
    def test_run_reads_back_as_written(self, tmp_path: Path) -> None:
        run = {
            "q2": (
                Hit("b", 1 / 3, rank=1),
                Hit("größe/東京", 1 / 3, rank=2),
                Hit("c", -2e-9, rank=3),
            ),
            "q1": (Hit("b", 1e12, rank=1),),
        }
        file = tmp_path / "new" / "out.run"
        write_trec_run(file, {**run, "empty": ()})
        assert read_trec_run(file) == run
        assert file.read_text(encoding="utf-8").splitlines()[-1] == (
            "q1 Q0 b 1 1000000000000.0 ctxguard"
        )

    @pytest.mark.parametrize(("query", "passage"), [("a query", "p"), ("q", "p 1"), ("q", "")])
    def test_uncarried_id_is_refused(self, tmp_path: Path, query: str, passage: str) -> None:
        with pytest.raises(DataError, match="cannot be written to a TREC run"):
            write_trec_run(tmp_path / "out.run", {query: (Hit(passage, 1.0, rank=1),)})
        assert list(tmp_path.iterdir()) == []


QRELS_AS_SAVED = {
    "semicolons": b"query-id;corpus-id;score\nq1;a;2\nq1;b;0\nq2;a;0\n",
    "commas": b"q1,a,2\nq1,b,0\nq2,a,0\n",
    "quotes": b'"query-id"\t"corpus-id"\t"score"\n"q1"\t"a"\t"2"\n"q1"\t"b"\t"0"\n"q2"\t"a"\t0\n',
    "a mark and CRLF": b"\xef\xbb\xbfquery\tcorpus-id\tscore\r\nq1\ta\t2\r\nq1\tb\t0\r\nq2\ta\t0",
    "decimals": b"q1;a;2,0\nq1;b;0,0\nq2;a;0,0\n",
    "floats": b"q1\ta\t2.0\nq1\tb\t0.0\nq2\ta\t0.0\n",
    "TREC": b"q1 0 a 2\nq1 0 b 0\nq2 Q0 a 0\n",
    "another header": b"topic\tdoc\tJudgment\nq1\ta\t2\nq1\tb\t0\nq2\ta\t0\n",
    "UTF-16": "query-id\tcorpus-id\tscore\nq1\ta\t2\nq1\tb\t0\nq2\ta\t0\n".encode("utf-16"),
    "Windows-1252": "q1;a;2\nq1;b;0\nq2;a;0\nq3;café;2\n".encode("cp1252"),
}


@pytest.mark.parametrize("form", QRELS_AS_SAVED)
def test_spreadsheet_tables_are_read(folder: Path, form: str) -> None:
    (folder / "distractors.tsv").unlink()
    (folder / "qrels/test.tsv").write_bytes(QRELS_AS_SAVED[form])
    cafe = {"q3": {"café": 2}} if form == "Windows-1252" else {}
    assert read_beir(folder).qrels == {"q1": {"a": 2, "b": 0}, "q2": {"a": 0}, **cafe}


def test_id_lists_suit_any_scale(tmp_path: Path) -> None:
    rows = [
        {"query_id": "q", "text": "?", "relevant": {"a": 5, "b": 3}},
        {"query_id": "r", "text": "!", "relevant": ["a"]},
    ]
    data = read_jsonl(write_lines(tmp_path / "d.jsonl", *rows), relevant_from=4)
    assert data.answerable == ("q", "r")
    assert data.relevant("q") == {"a": 5}


def test_labelless_grade_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"relevant-from = 7: the highest is 2"):
        read_beir(folder, relevant_from=7)
    with pytest.raises(ConfigurationError, match="must be at least 1"):
        read_beir(folder, relevant_from=0)

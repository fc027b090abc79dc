"""Label: the page asks for what a file of `ctxguard label` asks for, and writes where it writes."""

from collections.abc import Iterator
from pathlib import Path
from re import findall

import pytest
from httpx2 import Response
from judged_store import HOSTILE, REQUEST, SHOWN, filled, hostile, visitor
from starlette.testclient import TestClient

from ctxguard.core.metadata_filter import Where
from ctxguard.measure.metrics import Metric
from ctxguard.monitor.estimation.live import Window
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.judges import PeopleAlone
from ctxguard.monitor.labels.human import ALWAYS
from ctxguard.monitor.service import Monitor
from ctxguard.monitor.store import LabelRow, PickKind, SampleStore
from tests.stored import request_of

SERIES = "words 1"
ANN = {"annotator": "ann", "judge": SERIES, "tenant": ""}
WHOLE = {"whole": "yes"}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    filled(folder, 6)
    return folder / "samples.db"


@pytest.fixture
def store(judged: Path, tmp_path: Path) -> Iterator[SampleStore]:
    """Six judged requests; each test has a copy of its own."""
    (tmp_path / "samples.db").write_bytes(judged.read_bytes())
    with SampleStore.open(f"sqlite:///{tmp_path / 'samples.db'}") as opened:
        yield opened


@pytest.fixture
def client(store: SampleStore) -> TestClient:
    return visitor(store)


def pick(client: TestClient, n: object = 3, **task: str) -> Response:
    return client.post("/console/label/pick", data={**ANN, **task, "n": str(n)})


def page(client: TestClient, **more: str | int) -> str:
    return client.get("/console/label", params={**ANN, **more}).text


def shown(text: str) -> list[str]:
    return findall(r'data-passage="([^"]*)"', text)


def sample_on(text: str) -> int:
    return int(findall(r'name="sample" value="(\d+)"', text)[0])


def give(
    client: TestClient, grade: str, passage: str, sample: int, *, follows: bool = True, **task: str
) -> Response:
    form = {**ANN, **task, "sample": str(sample), "passage": passage, "grade": grade}
    return client.post("/console/label/grade", data=form, follow_redirects=follows)


def grade_all(client: TestClient, grade: str = "0") -> tuple[int, list[str]]:
    """Grade what the page asks for, whatever it is, until it asks for no more."""
    text = page(client)
    sample, graded = sample_on(text), []
    while still := findall(r'card open"[^>]*data-passage="([^"]*)"', page(client, sample=sample)):
        graded.append(still[0])
        assert give(client, grade, still[0], sample).status_code == 200
    return sample, graded


def labels(store: SampleStore) -> list[tuple[str, int | None, str | None]]:
    return [(row.passage_id, row.grade, row.negative) for _, row in store.labels()]


def test_page_and_file_are_one_sample(store: SampleStore, client: TestClient) -> None:
    pick(client, 20)
    for sample in to_label(store, SERIES, 20):
        rows = sample.rows()
        assert shown(page(client)) == [row.passage_id for row in rows if row.when == ALWAYS]
        grade_all(client, "1")
    assert "All that was picked is graded" in page(client)


def test_looking_picks_nothing(store: SampleStore, client: TestClient) -> None:
    assert "Nothing is picked yet" in page(client)
    assert store.picked(SERIES) == {}


@pytest.mark.parametrize(
    ("grade", "stored"),
    [("3", (3, None)), ("0", (0, None)), ("d", (0, "distractor")), ("h", (0, "hard_negative"))],
)
def test_a_grade_is_stored_at_once(
    store: SampleStore, client: TestClient, grade: str, stored: tuple[int, str | None]
) -> None:
    text = pick(client).text
    passage = shown(text)[1]
    after = give(client, grade, passage, sample_on(text)).text
    assert labels(store) == [(passage, *stored)]
    assert f'data-own="{grade}"' in after
    assert [row.annotator for _, row in store.labels()] == ["ann"]


def test_withdrawn_grade_leaves_no_trace(store: SampleStore, client: TestClient) -> None:
    """A grade that is taken back leaves no trace in what counts."""
    text = pick(client).text
    sample, passage = sample_on(text), shown(text)[0]
    give(client, "2", passage, sample)
    after = give(client, "", passage, sample).text
    assert 'data-own=""' in after
    assert "graded by somebody else" not in after
    (found,) = to_label(store, SERIES, 1)
    assert found.people == {}
    give(client, "1", passage, sample)
    (found,) = to_label(store, SERIES, 1)
    assert found.people[passage].grade == 1


def test_last_grade_counts_despite_clock(store: SampleStore, client: TestClient) -> None:
    text = pick(client).text
    sample, passage = sample_on(text), shown(text)[0]
    request_id = request_of(store, sample)
    store.add_labels([LabelRow(request_id, passage, 3, None, "ann", 9e9)])
    give(client, "1", passage, sample)
    (found,) = to_label(store, SERIES, 1)
    assert found.people[passage].grade == 1


def test_others_grades_show_without_value(store: SampleStore, client: TestClient) -> None:
    text = pick(client).text
    sample, passage = sample_on(text), shown(text)[0]
    give(client, "3", passage, sample)
    theirs = page(client, annotator="bob", sample=sample)
    assert "graded by somebody else" in theirs
    assert 'data-own="3"' not in theirs
    assert 'aria-pressed="true"' not in theirs


def test_run_ends_at_first_relevant(tmp_path: Path) -> None:
    with SampleStore.open(filled(tmp_path, 6)) as store:
        client = visitor(store)
        pick(client, 6)
        picked = store.picked(SERIES).items()
        sample = next(each for each, [one, *_] in picked if one.kind is PickKind.RUN)
        [first, *coins] = shown(page(client, sample=sample))
        for passage in (first, *coins):
            after = give(client, "0", passage, sample).text
        assert "Looking further: nothing above is relevant" in after
        [further] = set(shown(after)) - {first, *coins}
        assert "This query is graded" in give(client, "1", further, sample).text


def test_id_with_line_breaks_returns(tmp_path: Path) -> None:
    with SampleStore.open(filled(tmp_path, 1, ids="d{}\n-{}".format)) as store:
        client = visitor(store)
        text = pick(client, 1).text
        passage = shown(text)[0].replace("\n", "\r\n")
        assert give(client, "1", passage, sample_on(text)).status_code == 200
        assert [row.passage_id for _, row in store.labels()] == [shown(text)[0]]


def test_whole_requests_grade_dropped_passages(store: SampleStore, client: TestClient) -> None:
    assert len(shown(pick(client, 24, **WHOLE).text)) == 12


def test_tenants_page_holds_own_requests(tmp_path: Path) -> None:
    url = filled(tmp_path, 6, filters=[Where(tenant="a"), Where(tenant="b"), None])
    with SampleStore.open(url) as store:
        client = visitor(store)
        text = pick(client, 72, tenant="a", **WHOLE).text
        assert "0 of 2 requests graded" in text
        sample = sample_on(text)
        assert request_of(store, sample) in (REQUEST(0), REQUEST(3))
        foreign = store.find([REQUEST(1)])[0]
        refused = client.get("/console/label", params={**ANN, "tenant": "a", "sample": foreign})
    assert refused.status_code == 404


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"grade": "4"}, 400),
        ({"grade": "-1"}, 400),
        ({"grade": "relevant"}, 400),
        ({"passage": "no such"}, 404),
        ({"sample": "10000"}, 404),
        ({"sample": "x"}, 400),
        ({"sample": "9" * 40}, 400),
        ({"annotator": " \u200b "}, 400),
        ({"annotator": "a" * 101}, 400),
        ({"judge": "another"}, 404),
    ],
)
def test_invalid_grade_is_refused_in_words(
    store: SampleStore, client: TestClient, changes: dict[str, str], status: int
) -> None:
    text = pick(client).text
    form = {**ANN, "sample": str(sample_on(text)), "passage": shown(text)[0], "grade": "1"}
    answer = client.post("/console/label/grade", data={**form, **changes})
    assert answer.status_code == status
    assert "<h1>" in answer.text
    assert store.labels() == []


def test_only_what_was_picked_is_graded(store: SampleStore, client: TestClient) -> None:
    pick(client, 1)
    (picked,) = store.picked(SERIES)
    other = next(one for n in range(6) for one in store.find([REQUEST(n)]) if one != picked)
    assert client.get("/console/label", params={**ANN, "sample": other}).status_code == 404


@pytest.mark.parametrize("n", ["", "0", "-1", "1.5", "1001", "9" * 30, "²"])
def test_invalid_request_count_is_refused(store: SampleStore, client: TestClient, n: str) -> None:
    assert (pick(client, n).status_code, store.picked(SERIES)) == (400, {})


def test_empty_store_says_requests_are_missing(tmp_path: Path) -> None:
    with SampleStore.open(f"sqlite:///{tmp_path / 'samples.db'}") as store:
        assert "No request has been sampled yet" in visitor(store).get("/console/label").text


def test_people_grade_unjudged_requests(tmp_path: Path) -> None:
    """From served requests to an estimate from grades alone."""
    n = 6
    with SampleStore.open(filled(tmp_path, n, judge=False)) as store:
        client = visitor(store)
        assert "No judge has seen them" in client.get("/console/label").text
        task = {"judge": ""}
        pick(client, n * 12, **task, **WHOLE)
        for _ in range(n):
            text = page(client, **task)
            sample = sample_on(text)
            for passage in shown(text):
                relevant = passage.endswith(("-1", "0-0"))
                give(client, "2" if relevant else "0", passage, sample, follows=False, **task)
        assert "All that was picked is graded" in page(client, **task)
        report = Monitor(store, PeopleAlone(), min_n=5).report()
        precision = report.estimates[Window.ALL_RETAINED][Metric.PRECISION]
        assert (report.labelled, report.judge_estimates) == (n, {})
        assert precision.value == pytest.approx((n + 1) / (n * 4))


def test_the_guide_is_the_files_guide(client: TestClient) -> None:
    text = client.get("/console/label/guide").text
    assert "the whole answer, stated clearly" in text
    assert "hard negative" in text


def test_hostile_passage_and_name_are_text(tmp_path: Path) -> None:
    with SampleStore.open(filled(tmp_path, 1, ids=hostile)) as store:
        client = visitor(store)
        pick(client, 12, annotator=HOSTILE[:90], **WHOLE)
        text = page(client, annotator=HOSTILE[:90])
    assert SHOWN in text
    assert "<script>document" not in text
    assert "<img" not in text

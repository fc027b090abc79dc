"""Label questions: the same screen on candidates of a retriever, kept in a file of labels."""

from collections.abc import Iterator
from pathlib import Path
from re import findall

import pytest
from judged_store import HOSTILE, SAME_SITE, SHOWN
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from calibration.data.label_file import LabelFile
from calibration.data.readers import read_jsonl
from calibration.pooling import pooled
from ctxguard.cli._question_pages import QuestionGrading
from ctxguard.cli.label import QuestionWork
from ctxguard.core.types import Passage
from ctxguard.server.app import console_app
from ctxguard.server.console.routes import label_routes
from ctxguard.server.settings import ServiceSettings

N = 12
IDS = [f"p{number} \r\n{'é' * number}" for number in range(7)]


class Texts:
    """Reads any passage; each text is hostile."""

    def passage(self, passage_id: str) -> Passage:
        return Passage(passage_id, f"{passage_id} {HOSTILE}", f"Title {HOSTILE}")


def client_of(
    path: Path, token: str | None = None, n: int = N, host: str = "127.0.0.1"
) -> TestClient:
    file = LabelFile(path, [f"Question {number} {HOSTILE}?" for number in range(n)])
    pools = {query.query_id: pooled(query.text, [IDS[:6]]) for query in file.queries}
    work = QuestionWork(file, Texts(), 1, pools)  # type: ignore[arg-type]
    work.next_step = "ctxguard calibrate"
    settings = ServiceSettings(console_token=token)
    routes = label_routes(lambda pages: QuestionGrading(pages, work), token=token)
    app = console_app(settings, routes, CollectorRegistry())
    return TestClient(app, headers=SAME_SITE, base_url=f"http://{host}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "labels.jsonl"


@pytest.fixture
def client(path: Path) -> Iterator[TestClient]:
    with client_of(path) as opened:
        yield opened


def give(client: TestClient, grade: str, passage: str, question: int = 0) -> str:
    form = {"sample": str(question), "passage": passage, "grade": grade}
    answer = client.post("/console/label/grade", data=form)
    assert answer.status_code == 200, answer.text
    return answer.text


def grade_all(client: TestClient, grade: str, question: int) -> str:
    text = client.get(f"/console/label?sample={question}").text
    while still := findall(r'card open"[^>]*data-passage="([^"]*)"', text):
        text = give(client, grade, still[0], question)
    return text


def test_grades_reach_the_file_at_once(client: TestClient, path: Path) -> None:
    """Ids with line breaks, which forms change, are those of the retriever."""
    text = client.get("/console/").text
    assert "0 of 12 questions graded" in text
    assert SHOWN in text
    assert "<script>document" not in text
    give(client, "1", IDS[0])
    give(client, "h", IDS[1])
    give(client, "x", "", 1)
    [first, second] = read_jsonl(path).qrels.values()
    assert (first, second) == ({IDS[0]: 1, IDS[1]: 0}, {})
    assert 'data-own="x" id="whole"' in client.get("/console/label?sample=1").text
    give(client, "", "", 1)
    give(client, "", IDS[1])
    assert list(read_jsonl(path).qrels.values()) == [{IDS[0]: 1}]


def test_answers_need_a_relevant_passage(client: TestClient) -> None:
    assert "No answer here" in give(client, "0", IDS[0])
    assert "No answer here" not in give(client, "1", IDS[1])
    form = {"sample": "0", "passage": "", "grade": "x"}
    assert client.post("/console/label/grade", data=form).status_code in (400, 404)


def test_labels_worth_is_said_after_ten(client: TestClient) -> None:
    said = [grade_all(client, "1", question) for question in range(10)]
    words = "10 questions with a relevant passage: 10 more to extend"
    assert [words in text for text in said] == [False] * 9 + [True]
    assert words not in grade_all(client, "0", 10)
    grade_all(client, "0", 11)
    end = client.get("/console/label").text
    assert "12 questions graded" in end
    assert "ctxguard calibrate" in end
    assert words in end


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"passage": "unknown"}, 404),
        ({"grade": "2"}, 400),
        ({"grade": "y"}, 400),
        ({"sample": "99"}, 404),
        ({"sample": "-1"}, 400),
        ({"sample": "x"}, 400),
        ({"passage": "", "grade": "1"}, 400),
    ],
)
def test_a_form_of_nothing_is_refused(
    client: TestClient, path: Path, changes: dict[str, str], status: int
) -> None:
    form = {"sample": "0", "passage": IDS[0], "grade": "1", **changes}
    assert client.post("/console/label/grade", data=form).status_code == status
    assert not path.exists()


def test_changed_file_is_said(client: TestClient, path: Path) -> None:
    give(client, "1", IDS[0])
    path.write_text("{}\n")
    form = {"sample": "0", "passage": IDS[1], "grade": "1"}
    answer = client.post("/console/label/grade", data=form)
    assert answer.status_code == 400
    assert "changed by another program" in answer.text


def test_other_sites_and_names_are_refused(path: Path) -> None:
    form = {"sample": "0", "passage": IDS[0], "grade": "1"}
    elsewhere = {"sec-fetch-site": "cross-site"}
    with client_of(path) as client:
        answer = client.post("/console/label/grade", data=form, headers=elsewhere)
        assert (answer.status_code, client.get("/console/decisions").status_code) == (403, 404)
        assert client.get("/metrics").status_code == 404
    with client_of(path, host="rebound.example") as client:
        assert not client.get("/console/label").is_success
    assert not path.exists()


def test_with_a_token_people_sign_in(path: Path) -> None:
    token = "a token of sixteen"  # noqa: S105
    with client_of(path, token) as client:
        assert client.get("/console/label").status_code == 401
        answer = client.post("/console/sign-in", data={"token": token, "next": "/console/label"})
        assert "0 of 12 questions graded" in answer.text
        client.post("/console/sign-out")
        assert client.get("/console/label").status_code == 401

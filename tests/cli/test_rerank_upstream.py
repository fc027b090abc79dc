"""Commands on lists of candidates that a server reranks: from the file to the tables."""

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from household import read_rows, write_jsonl
from running import Run, figures

from calibration.reranked_candidates import RerankedCandidates, read_candidates
from ctxguard.core.types import Passage, ScoreKind
from ctxguard.endpoints.rerank import RerankClient
from ctxguard.errors import DataError, OverloadedError
from ctxguard.profile.schema import Profile
from tests.rerank_endpoint import Answer, RerankEndpoint, share_of_words

pytest.importorskip("httpx2")


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[RerankEndpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("CTXGUARD_UPSTREAM_KEY", "secret-key")
    with closing(RerankEndpoint()) as served:
        yield served


@pytest.fixture(scope="module")
def candidates(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every question of the collection with the passages that share a word with it, and others."""
    passages = read_rows(collection / "corpus.jsonl")
    texts = [f"{each['title']}. {each['text']}" for each in passages]
    rows = []
    for query in read_rows(collection / "queries.jsonl"):
        shares = share_of_words(query["text"], texts)
        order = sorted(range(len(texts)), key=lambda at: (-shares[at], at))[:20]
        documents = [{"id": passages[at]["_id"], "text": texts[at]} for at in order]
        rows.append({"query_id": query["_id"], "query": query["text"], "documents": documents})
    return write_jsonl(tmp_path_factory.mktemp("candidates") / "candidates.jsonl", rows)


def described_by(upstream: RerankEndpoint, candidates: Path) -> dict[str, str]:
    """The system of a reranker and its lists."""
    return {"rerank-upstream": upstream.url, "candidates": str(candidates)}


def test_candidates_are_calibrated_compared_queried(
    run: Run, upstream: RerankEndpoint, candidates: Path, collection: Path, tmp_path: Path
) -> None:
    """From the file to the profile, the report, the tables and the decisions on one query."""
    profile, report = tmp_path / "p.json", tmp_path / "r.html"
    described = described_by(upstream, candidates) | {"rerank-model": "m"}
    asked = ("calibrate", "--data", collection, "--out", profile, "--report", report)
    made = run.ok(*asked, system=described)
    assert {headers["Authorization"] for headers in upstream.headers} == {"Bearer secret-key"}
    assert "secret-key" not in made.stdout + made.stderr
    made_for = Profile.load(profile)
    assert made_for.fingerprint.pop("reranker_scores").count(" ") > 30
    assert made_for.fingerprint == {"reranker": "cohere m", "score_kind": "probability"}
    assert [each.score_kind.value for each in made_for.routes.values()] == ["probability"]
    assert "with a damp cloth" in report.read_text(encoding="utf-8")

    three = ("--profile", profile, "--candidate", "three=k=3")
    compared = run.ok("evaluate", "--data", collection, *three, system=described)
    assert "system" in compared.stdout

    question = "what is the right way to clean my kettle"
    shown = run.ok("query", "--profile", profile, question, system=described)
    assert "clean-kettle" in shown.stdout


def test_tei_gives_logits_foreign_refused(
    run: Run, upstream: RerankEndpoint, candidates: Path, collection: Path, tmp_path: Path
) -> None:
    described = described_by(upstream, candidates)
    data = ("--data", collection, "--profile", tmp_path / "p.json")
    tei = described | {"rerank-protocol": "tei"}
    run.ok("calibrate", "--data", collection, "--out", data[3], system=tei)
    assert "texts" in upstream.requests[0]
    profile = Profile.load(tmp_path / "p.json")
    assert [each.score_kind.value for each in profile.routes.values()] == ["logit"]

    says = ("tei (default model)", "cohere (default model)")
    run.finding("evaluate", *data, system=described, says=says)


def test_labels_may_hold_the_candidates(run: Run, upstream: RerankEndpoint, tmp_path: Path) -> None:
    """A file of labels may hold the candidates and documents need no id."""
    rows: list[dict[str, object]] = [
        {
            "query_id": f"q{n}",
            "query": f"red fox {n}",
            "documents": ["a blue fox", f"a red fox {n}", {"text": "nothing"}],
            "relevant": {f"q{n}/1": 2},
        }
        for n in range(12)
    ]
    file = write_jsonl(tmp_path / "labelled.jsonl", rows)
    described = described_by(upstream, file)
    found = run.read("evaluate", "--data", file, "-k", "1", system=described)
    assert figures(found)["recall"]["mean"]["value"] == 1.0


def test_incomplete_requests_are_left_out(
    run: Run, upstream: RerankEndpoint, candidates: Path, collection: Path, tmp_path: Path
) -> None:
    """A query without candidates and a failing request are left out with a note."""
    rows = [row for row in read_rows(candidates) if row["query_id"] != "q-none-test"]
    described = described_by(upstream, write_jsonl(tmp_path / "some.jsonl", rows))
    upstream.script.append(Answer(status=500))
    result = run.ok("evaluate", "--data", collection, columns="200", system=described)
    assert "this query is not among the recorded candidates" in result.stdout
    assert "answered 500: it failed" in result.stdout


def test_a_rate_limit_is_waited_for(upstream: RerankEndpoint) -> None:
    client, pauses = RerankClient(upstream.url), list[float]()
    listed = {"red fox": (Passage("a", "a blue fox"), Passage("b", "red fox"))}
    source = RerankedCandidates(listed, client, ScoreKind.PROBABILITY, sleep=pauses.append)
    try:
        upstream.script += [Answer(status=429)] * 2
        assert tuple(source.retrieve("red fox").scores) == (0.5, 1.0)
        assert pauses == [1.0, 2.0]
        upstream.script += [Answer(status=429)] * 9
        with pytest.raises(OverloadedError, match="call less often"):
            source.retrieve("red fox")
    finally:
        client.close()


def test_changing_reranker_ends_the_command(
    run: Run, upstream: RerankEndpoint, candidates: Path, collection: Path, tmp_path: Path
) -> None:
    """A reranker that changes or is down while it is calibrated ends the command."""

    def changing(query: str, documents: Sequence[str]) -> list[float]:
        if len(upstream.requests) > 10:
            return [random.Random(query + each).random() for each in documents]
        return share_of_words(query, documents)

    upstream.score = changing
    described, out = described_by(upstream, candidates), tmp_path / "p.json"
    asked = ("calibrate", "--data", collection, "--out", out)
    changed = "the reranker changed while its scores were collected"
    run.refused(*asked, system=described, says=changed)
    upstream.close()
    says = ("none of 25 queries could be replayed", "refuses connections")
    run.finding(*asked, system=described, says=says)
    assert not out.exists()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"documents": []}'], "line 1: the field query (or text) is missing"),
        (['{"query": 3, "documents": []}'], "query is 3; it must be a string"),
        (['{"query": "q"}'], "documents is None; write a list"),
        (['{"query": "q", "documents": [3]}'], "document 0 is 3; write a string"),
        (['{"query": "q", "documents": [{"id": "a"}]}'], "the field text is missing"),
        (['{"query": "q", "documents": [{"id": [], "text": "d"}]}'], "an id must be a string"),
        (
            ['{"query": "q", "documents": [{"id": 1, "text": "d"}, {"id": "1", "text": "e"}]}'],
            "two documents have the id '1'",
        ),
        (['{"query": "q", "documents": []}'] * 2, "line 2: line 1 already has the query 'q'"),
        (["{"], "broken JSON"),
    ],
)
def test_unreadable_candidates_are_refused(tmp_path: Path, lines: list[str], says: str) -> None:
    file = tmp_path / "candidates.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(says)):
        read_candidates(file)

"""``ctxguard judge`` and ``calibrate --store``: from a log without labels to a guard."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chat_endpoint import Answer, ChatEndpoint, grade_by_words
from household import grade_file, read_rows, write_jsonl, write_log
from running import Run
from tiny_cross_encoder import make_cross_encoder

from ctxguard import ContextGuard
from ctxguard.core.policies import ExpectedUtilityPolicy, RatioPolicy
from ctxguard.core.types import Route
from ctxguard.monitor.sampling.record import SampleRecord
from ctxguard.monitor.store import SampleStore
from ctxguard.monitor.store.writer import sample_to
from ctxguard.profile.schema import Profile
from ctxguard.retrieval.hybrid.retriever import HybridRetriever
from tests.rerank_endpoint import RerankEndpoint


class StrictEndpoint(ChatEndpoint):
    """Says yes only where three words of the question are in the passage."""

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
        return Answer(json.dumps({"grade": max(grade_by_words(request["messages"]) - 2, 0)}))


@pytest.fixture
def chat() -> Iterator[ChatEndpoint]:
    pytest.importorskip("truststore")
    with closing(StrictEndpoint()) as endpoint:
        yield endpoint


FAILURES = (
    Answer(body='{"error": {"message": "Provider returned error", "code": 502}}'),
    Answer(content=None, refusal="I cannot grade this."),
    Answer('{"grade": 7}'),
    Answer('{"gra', finish_reason="length"),
    Answer("Certainly! It is very relevant."),
)


class FailingEndpoint(StrictEndpoint):
    """Fails on three passages of ten, by five causes, while it is not healthy."""

    is_healthy = False

    def answer(self, path: str, request: dict[str, Any]) -> Answer:
        luck = random.Random(request["messages"][-1]["content"])
        if self.is_healthy or luck.random() >= 0.3:
            return super().answer(path, request)
        return luck.choice(FAILURES)


@pytest.fixture
def questions(collection: Path) -> list[str]:
    return [row["text"] for row in read_rows(collection / "queries.jsonl")]


@pytest.fixture
def log(questions: list[str], tmp_path: Path) -> Path:
    """The questions of a labelled collection, as a log would have them."""
    return write_log(tmp_path / "log.csv", questions)


@pytest.fixture
def few(questions: list[str], tmp_path: Path) -> Path:
    """A log of eight questions."""
    return write_log(tmp_path / "few.csv", questions[:8])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'samples.db'}"


def records(url: str) -> list[SampleRecord]:
    with SampleStore.open(url) as store:
        ids = [one.sample_id for one in store.newest_samples(1_000)]
        return list(store.records(ids).values())


def shares_words(row: dict[str, str]) -> bool:
    return len(set(row["query"].lower().split()) & set(row["text"].lower().split())) > 3


def test_log_becomes_a_filtering_guard(
    run: Run, index: Path, log: Path, url: str, chat: ChatEndpoint
) -> None:
    folder = log.parent
    system = {"judge": {"base-url": chat.url, "prices": [2.0, 8.0]}}
    asked: tuple[object, ...] = ("judge", "--index", index, "--queries", log, "--store", url)
    asked += ("--judge", "llm", "--model", "stand-in")
    judged = run.ok(*asked, system=system)
    words = " ".join(judged.stdout.split())
    assert "at the prices given" in words
    assert "the judge's own view, uncorrected" in words
    assert re.search(r"have people grade \d+ passages of these", words)
    calls = len(chat.requests)
    assert calls > 0
    again = run.ok(*asked, "--json", system=system)
    assert len(chat.requests) == calls, "grades are kept"
    assert "the store already holds every question" in again.stderr
    rows = json.loads(again.stdout)["by_k"]["rows"]
    assert [row["k"] for row in rows] == [1, 3, 5, 10, 20]
    assert {row["precision"]["lower"] for row in rows} == {None}

    out, page = folder / "profile.json", folder / "report.html"
    made = ("calibrate", "--index", index, "--store", url, "--out", out, "--report", page)
    run.finding(*made)
    assert not out.exists(), "what a judge alone promises is not there"
    assert "own view, uncorrected" in page.read_text(encoding="utf-8")

    file = folder / "grades.csv"
    run.ok("label", "export", "--store", url, "-n", 300, "--out", file)
    assert len(grade_file(file, shares_words)) > 100
    run.ok("label", "import", file, "--store", url, "--annotator", "ann")
    found = run.read(*made)
    assert found["by_k"]["is_corrected"]
    assert all(row["precision"]["lower"] is not None for row in found["by_k"]["rows"])
    assert found["gain"]["udcg"]["lower"] < found["gain"]["udcg"]["upper"]
    assert "corrected with" in page.read_text(encoding="utf-8")
    lean = run.read(*made[:-4], "--out", folder / "lean.json", "--context", "leaner")
    assert 0 < lean["context"]["tokens"] <= found["context"]["tokens"]
    profile = Profile.load(out)
    assert found["verdict"] == profile.verdict.decision
    assert not profile.unverified
    guard = ContextGuard(HybridRetriever.load(index), profile=profile, mode="enforce")
    context = guard.retrieve("how do I clean a lantern")
    assert not guard.comparison.mismatches
    if found["verdict"] != "keep":
        assert isinstance(context.decision.policy, ExpectedUtilityPolicy)


def test_failed_calls_are_asked_again(run: Run, index: Path, few: Path, tmp_path: Path) -> None:
    """No figure counts them, their number is said, and the next run asks about these alone."""
    pytest.importorskip("openai")
    with closing(FailingEndpoint()) as endpoint:
        system = {"judge": {"base-url": endpoint.url}}
        asked = ("judge", "--index", index, "--queries", few)
        asked = (*asked, "--judge", "llm", "--model", "stand-in", "--json")
        url = f"sqlite:///{tmp_path / 'failing.db'}"
        first = run(*asked, "--store", url, system=system)
        n_calls = len(endpoint.requests)
        rows = json.loads(first.stdout)["by_k"]["rows"]
        names = ("precision", "mrr", "udcg", "recall")
        assert {row[name]["value"] for row in rows for name in names} == {None}
        said = re.search(
            r"([\d,]+) passages of 8 requests got no grade", " ".join(first.stderr.split())
        )
        assert said is not None
        n_failed = int(said[1])
        assert 0.15 * n_calls < n_failed < 0.45 * n_calls
        profile = run("calibrate", "--store", url, "--index", index, "--out", tmp_path / "p.json")
        assert "got no grade" in " ".join((profile.stdout + profile.stderr).split())
        endpoint.is_healthy = True
        second = run.ok(*asked, "--store", url, system=system)
        assert len(endpoint.requests) == n_calls + n_failed
        assert f"{n_failed} passages of 8 questions got no grade" in " ".join(second.stderr.split())
        never = run.ok(*asked, "--store", f"sqlite:///{tmp_path / 'never.db'}", system=system)
        assert json.loads(second.stdout)["by_k"] == json.loads(never.stdout)["by_k"]


def test_without_judge_it_names_cost(
    run: Run, index: Path, log: Path, url: str, tmp_path: Path
) -> None:
    result = run.ok("judge", "--index", index, "--queries", log, "--store", url)
    words = " ".join(result.stdout.split())
    assert re.search(r"judging [\d,]+ passages of [\d,]+ questions takes [\d,]+ calls", words)
    assert re.search(r"reads about [\d,]+00 tokens, instructions included", words)
    assert "add --judge" in words
    assert not (tmp_path / "samples.db").exists()
    one = write_log(tmp_path / "one.csv", ["how do I clean a lantern"])
    result = run.ok("judge", "--index", index, "--queries", one, "--store", url)
    assert re.search(r"of 1 question takes \d+ calls and", " ".join(result.stdout.split()))


def test_reranker_judges_repeats_count_again(
    run: Run, index: Path, questions: list[str], url: str, tmp_path: Path
) -> None:
    """A reranker judges what is served and a repeated question counts as often."""
    pytest.importorskip("httpx2")
    rows = ({"query": text} for text in (*questions[:12], questions[0].upper()))
    log = write_jsonl(tmp_path / "log.jsonl", rows)
    asked = ("judge", "--index", index, "--queries", log, "--store", url, "--judge", "reranker")
    with closing(RerankEndpoint()) as endpoint:
        run.refused(*asked, says="set base-url")
        system = {"judge": {"base-url": endpoint.url, "min-score": 0.3, "serving-k": 3}}
        found = run.read(*asked, "--model", "stand-in", system=system)
    assert found["judge"] == "reranker cohere stand-in score>=0.3"
    assert found["requests"] == 12
    samples = records(url)
    assert sorted({one.probability for one in samples}) == [0.5, 1.0]
    guard = ContextGuard(HybridRetriever.load(index), k=3)
    for one in samples[:5]:
        served = [passage.passage_id for passage in guard.retrieve(one.query).passages]
        assert [one.passage_ids[at] for at in one.served] == served
        assert len(one.to_judge()) == 20
        assert len(one.scores) > 20, "the scores of all candidates are kept"


def test_model_writes_missing_questions(run: Run, index: Path, url: str) -> None:
    class Writer(ChatEndpoint):
        """Asks about a passage's last words, and says yes where it finds them."""

        def answer(self, path: str, request: dict[str, Any]) -> Answer:
            lines = request["messages"][-1]["content"].split("\n")
            if "question" in request["response_format"]["json_schema"]["schema"]["properties"]:
                return Answer(json.dumps({"question": f"What about {lines[-2][-40:]}?"}))
            asked = lines[1].removeprefix("What about ").removesuffix("?").strip()
            return Answer(json.dumps({"grade": int(asked in "\n".join(lines[3:]))}))

    asked = ("judge", "--index", index, "--store", url, "--judge", "llm", "--model", "stand-in")
    with closing(Writer()) as chat:
        system = {"judge": {"base-url": chat.url, "questions": 5}}
        result = run.ok(*asked, system=system)
        calls = len(chat.requests)
        run.ok(*asked, system=system)
    assert "easier than people's questions" in " ".join(result.stdout.split())
    assert len(records(url)) == 5
    assert calls > 5
    assert len(chat.requests) == calls, "questions and grades are kept"


def test_questions_that_fail_say_why(run: Run, index: Path, url: str) -> None:
    """The cause stands beside the number, for some of the passages and for all."""
    refusal = Answer(status=400, body='{"error": {"message": "blocked by policy 7"}}')
    asked = ("judge", "--index", index, "--store", url, "--judge", "llm", "--model", "m")
    with closing(ChatEndpoint()) as chat:
        system = {"judge": {"base-url": chat.url, "questions": 3, "max-reply-tokens": 99}}
        chat.script.extend([refusal] * 3)
        said = " ".join(run(*asked, system=system).output.split())
        assert "3 passages got no question: 127.0.0.1" in said
        assert "answered 400: it refuses the request" in said
        assert "blocked by policy 7" in said
        chat.script.extend([Answer(status=401, body="{}")] * 3)
        said = " ".join(run(*asked, system=system).output.split())
        assert "does not accept the key" in said
        assert {each["max_tokens"] for each in chat.requests} == {99}


def test_nonsense_judge_stops_samples_wait(
    run: Run, index: Path, few: Path, url: str, chat: ChatEndpoint
) -> None:
    """A judge that answers nonsense stops and the samples wait for another."""

    class Nonsense(ChatEndpoint):
        def answer(self, path: str, request: dict[str, Any]) -> Answer:
            return Answer("it is hard to say")

    asked = ("judge", "--index", index, "--queries", few, "--store", url, "--judge", "llm")
    with closing(Nonsense()) as bad:
        says = ("gave no valid grade", "The samples still wait")
        run.finding(*asked, "--model", "m", system={"judge": {"base-url": bad.url}}, says=says)
    assert len(bad.requests) < 60
    again = run.ok(*asked, "--model", "good", "--json", system={"judge": {"base-url": chat.url}})
    assert json.loads(again.stdout)["requests"] == len(records(url))
    assert "waited for a judge" in again.stderr


def test_rerankers_lists_are_judged(
    run: Run, questions: list[str], url: str, tmp_path: Path, chat: ChatEndpoint
) -> None:
    """The candidates are the log: no other file of questions is needed."""
    pytest.importorskip("httpx2")
    rows: list[dict[str, object]] = [
        {"query": text, "documents": [f"{text} {n}" if n else "the kettle" for n in range(6)]}
        for text in questions[:12]
    ]
    lists = write_jsonl(tmp_path / "candidates.jsonl", rows)
    asked = ("judge", "--store", url, "--judge", "llm", "--model", "stand-in", "--json")
    with closing(RerankEndpoint()) as upstream:
        named = {"rerank-upstream": upstream.url, "candidates": str(lists)}
        found = run.read(*asked, system={**named, "judge": {"base-url": chat.url}})
    assert found["requests"] == 12
    assert {len(one.passage_ids) for one in records(url)} == {6}


@pytest.mark.model
def test_cross_encoder_judges_a_function(
    run: Run, few: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retriever is a plain function that returns texts with scores."""
    model = make_cross_encoder(tmp_path / "model", seed=0)
    (tmp_path / "shop.py").write_text(FUNCTION, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    run.ok(
        *("judge", "--retriever", "shop:search", "--queries", few, "--store", url),
        *("--judge", "cross-encoder", "--model", model),
        system={"score-kind": "cosine", "judge": {"min-score": -0.5}},
    )
    assert {one.route.value for one in records(url)} == {"external"}


def test_traffic_calibrates_as_well(
    run: Run, index: Path, questions: list[str], tmp_path: Path, chat: ChatEndpoint
) -> None:
    """A profile of a system that was not named is unverified."""
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    writer = sample_to(url, rate=1.0)
    guard = ContextGuard(HybridRetriever.load(index), k=3, sampler=writer.sampler)
    for number, text in enumerate(questions):
        guard.retrieve(text, request_id=f"r{number}")
    writer.stop()
    judge = ("--judge", "llm", "--model", "stand-in")
    run("monitor", "--store", url, *judge, "--once", system={"monitor": {"base-url": chat.url}})
    file, out = tmp_path / "grades.csv", tmp_path / "profile.json"
    run.ok("label", "export", "--store", url, "-n", 300, "--out", file)
    grade_file(file, shares_words)
    run.ok("label", "import", file, "--store", url, "--annotator", "ann")
    alone = run.read("calibrate", "--store", url, "--out", out)
    assert any(note.startswith("unverified: no system was named") for note in alone["notes"])
    assert Profile.load(out).unverified
    assert Profile.load(out).routes[Route.HYBRID].safe_policy == RatioPolicy(k=3)
    made = run.read("calibrate", "--store", url, "--index", index, "--out", out)
    assert made["requests"] == len(questions)
    assert Profile.load(out).verdict.serving_k == 3
    second = tmp_path / "second.json"
    again = run.read("calibrate", "--store", url, "--profile", out, "--out", second)
    assert again["in_force"] is not None
    assert Profile.load(second).fingerprint == Profile.load(out).fingerprint


FUNCTION = """
from ctxguard import Hit

TEXTS = ["A red fox lives three years.", "The train leaves at noon.", "The kettle boils water.",
         "Vacation is requested on a form.", "A harp has strings.", "The lamp takes one bulb."]

def search(query, *, depth):
    words = set(query.lower().split())
    found = [Hit(f"p{n}", len(words & set(text.lower().split())) / 10 + n / 100, text)
             for n, text in enumerate(TEXTS)]
    return sorted(found, key=lambda hit: -hit.score)[:depth]
"""

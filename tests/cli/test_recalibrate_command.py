"""`ctxguard recalibrate`: a new profile from judged traffic, beside the one in force."""

import json
from pathlib import Path

import pytest
from household import write_jsonl
from judged_samples import SERIES, WHOLE, serve, spoilt, truth_of, watched
from running import Result, Run, figures, ok, read, refused
from simulated_pools import calibrated, simulate
from watching import Watching

from ctxguard.core.corpus_sketch import CorpusSketch, passage_digest
from ctxguard.core.types import Passage, Route
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.sampling.inclusion import JudgingRates
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Profile
from ctxguard.retrieval import HybridRetriever


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a store with 160 judged requests."""
    url = f"sqlite:///{tmp_path_factory.mktemp('live') / 'samples.db'}"
    watched(300, url=url).store.close()
    return url


@pytest.fixture
def in_force(tmp_path: Path) -> Path:
    """A profile that serves far too little."""
    file = tmp_path / "profile.json"
    spoilt(calibrated(60).profile).save(file)
    return file


def recalibrate(
    run: Run, store: str, profile: Path, out: Path, *options: object, **system: object
) -> Result:
    return run(
        *("recalibrate", "--store", store, "--profile", profile, "--out", out),
        *options,
        system=system or None,
    )


def test_a_better_policy_is_found_and_nothing_is_put_in_force(
    run: Run, store: str, in_force: Path, tmp_path: Path
) -> None:
    before, out = in_force.read_bytes(), tmp_path / "new" / "profile.json"
    found = read(recalibrate(run, store, in_force, out, "--json"))
    assert (found["route"], found["requests"], found["held_out"]) == ("hybrid", 300, 150)
    assert (found["questions"], found["effective_requests"]) == (300, 300.0)
    assert found["certificate"]["n_equivalent"] is None
    assert found["profile_id"] == Profile.load(out).profile_id
    assert found["left_out"] == {}
    assert found["old_policy"] != found["new_policy"]
    for metric in ("recall", "udcg_strict"):
        old, new = (figures(found, policy)[metric] for policy in ("old", "new"))
        difference = new["difference"]
        assert difference["outcome"] == "better"
        gain = new["mean"]["value"] - old["mean"]["value"]
        assert difference["value"] == pytest.approx(gain)
        assert 0.0 < difference["lower"] < difference["value"] < difference["upper"]
    assert in_force.read_bytes() == before


def test_a_person_reads_what_would_change_and_what_to_do(
    run: Run, store: str, in_force: Path, tmp_path: Path
) -> None:
    arguments = ("--profile", in_force, "--out", tmp_path / "new.json")
    for columns in ("80", "100"):
        result = run.ok("recalibrate", "--store", store, *arguments, columns=columns)
        lines = [line.split() for line in result.stdout.splitlines()]
        (head,) = [place for place, words in enumerate(lines) if words[:1] == ["metric"]]
        table = lines[head + 2 : lines.index([], head)]
        assert len(table) == 12
        outcomes = {row[-1] for row in table}
        assert outcomes <= {"better", "worse", "higher", "lower", "noise", "data"}
    words = " ".join(result.stdout.split())
    for part in (
        "300 with wholly judged pools, which ask 300 questions",
        "certificate For this route by itself, with probability at least 0.9: over queries",
        "In shadow, on 150 questions that took no part in the choice",
        "the labels are the grades of judge 'labels 1'",
        "better",
        "until you copy the new one over it",
    ):
        assert part in words


def test_repeats_count_as_the_requests_that_they_are(
    run: Run, in_force: Path, tmp_path: Path
) -> None:
    url, out = f"sqlite:///{tmp_path / 'samples.db'}", tmp_path / "new.json"
    retriever, dataset = simulate(300)
    texts = [query.text for query in dataset.queries]
    live = Watching(truth_of(dataset), rates=WHOLE, url=url)
    live.watch(*serve(retriever, [*texts, *texts[:25] * 10]))
    live.store.close()
    result = ok(recalibrate(run, url, in_force, out))
    words = " ".join(result.stdout.split())
    made = Profile.load(out)
    for part in (
        "550 with wholly judged pools, which ask 300 questions",
        "verdict keep: no other policy is shown to be better",
        "25 of 300 questions are 50% of the traffic. All weigh as much as 50 of the most frequent",
    ):
        assert part in words
    assert any("of the most frequent" in note for note in made.provenance.notes)


def test_the_new_profile_is_for_the_corpus_of_the_index_that_answered(
    run: Run, store: str, in_force: Path, tmp_path: Path
) -> None:
    passages = [Passage(f"p{n}", f"text {n}") for n in range(3)]
    corpus = [{"_id": each.passage_id, "text": each.text} for each in passages]
    run("index", write_jsonl(tmp_path / "corpus.jsonl", corpus), "--out", tmp_path / "i")
    former, out = CorpusSketch.of(range(10)), tmp_path / "new.json"
    Profile.load(in_force).model_copy(update={"corpus": former}).save(in_force)
    for options, sketch in (
        ((), former),
        (("--index", tmp_path / "i"), CorpusSketch.of(map(passage_digest, passages))),
    ):
        ok(recalibrate(run, store, in_force, out, *options))
        assert Profile.load(out).corpus == sketch


def test_where_nothing_changes_all_is_within_noise(
    run: Run, store: str, in_force: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new.json"
    recalibrate(run, store, in_force, new)
    result = recalibrate(run, store, new, tmp_path / "newer.json", "--json")
    found = figures(json.loads(result.stdout))
    assert found["udcg_strict"]["difference"]["value"] == 0.0
    outcomes = {row["difference"]["outcome"] for row in found.values()}
    assert outcomes <= {"within noise", "no data"}


def test_the_profile_in_force_is_never_overwritten(
    run: Run, store: str, in_force: Path, tmp_path: Path
) -> None:
    before = in_force.read_bytes()
    (tmp_path / "link.json").symlink_to(in_force)
    for out in (in_force, tmp_path / "link.json", tmp_path / "." / "profile.json"):
        result = refused(recalibrate(run, store, in_force, out))
        assert "is not overwritten" in " ".join(result.stderr.split())
    assert in_force.read_bytes() == before


def test_requests_that_could_not_be_used_are_said(run: Run, in_force: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    rates = JudgingRates(
        dropped_rate=0.0, full_pool_rate=0.6, full_pool_rate_if_no_hit=0.6, baseline_rate=0.0
    )
    watched(300, rates=rates, url=url).store.close()
    result = ok(recalibrate(run, url, in_force, tmp_path / "new.json"))
    assert "judged requests are left out: whose pool was judged in part" in " ".join(
        result.stdout.split()
    )


def test_nothing_usable_is_a_finding_that_names_why_and_writes_nothing(
    run: Run, in_force: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    watched(20, rates=JudgingRates(0.0, 0.0, 0.0, 0.0), url=url).store.close()
    out = tmp_path / "new.json"
    result = recalibrate(run, url, in_force, out, "--json")
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "CalibrationError"
    assert "20 whose pool was judged in part; where requests are sampled" in error["message"]
    assert "rates=JudgingRates(full_pool_rate=0.5)) would make about 10" in error["message"]
    assert not out.exists()


def test_without_a_profile_the_index_that_answered_names_its_models(
    run: Run, store: str, tmp_path: Path
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"_id": "p1", "text": "text 1"}])
    index, out = tmp_path / "i", tmp_path / "new.json"
    run("index", corpus, "--out", index)
    run.refused("recalibrate", "--store", store, "--out", out, says="give --index, or --profile")
    ok(run("recalibrate", "--store", store, "--out", out, "--index", index))
    made, retriever = Profile.load(out), HybridRetriever.load(index)
    assert (made.fusion, made.fingerprint) == (retriever.fusion, retriever.fingerprint())
    assert made.corpus == retriever.corpus_sketch()
    assert made.routes.keys() == {Route.HYBRID}


def test_of_several_judges_one_has_to_be_named(run: Run, in_force: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'samples.db'}"
    SampleStore.open(url).close()
    refused(recalibrate(run, url, in_force, tmp_path / "new.json"), "run `ctxguard monitor`")
    watched(300, url=url).store.close()
    retriever, dataset = simulate(1)
    labels = {query.text: dataset.qrels[query.query_id] for query in dataset.queries}
    other = Watching(LabelJudge(labels, version="2"), rates=WHOLE, url=url)
    other.watch(*serve(retriever, [query.text for query in dataset.queries]))
    other.store.close()
    command = (run, url, in_force, tmp_path / "new.json")
    refused(recalibrate(*command), f"name one as judge: '{SERIES}', 'labels 2'")
    refused(recalibrate(*command, judge="nobody"), "the store has no judge 'nobody'")
    assert recalibrate(*command, judge=SERIES).exit_code == 0

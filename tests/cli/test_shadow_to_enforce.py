"""Calibrate, shadow, watch, enforce: from judged requests to what a guard serves, and back."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from live_traffic import EVERYTHING, profile_of, serve
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from running import Result, Run, ok, read

from ctxguard import ContextGuard, Hit, Mode, RatioPolicy, Route, ScoreKind
from ctxguard.guard.reload import ProfileWatcher
from ctxguard.guard.telemetry import Telemetry
from ctxguard.monitor.export.prometheus import MonitorCollector
from ctxguard.monitor.judges import LabelJudge
from ctxguard.monitor.service import Monitor, WatchedProfile
from ctxguard.monitor.store import SampleStore
from ctxguard.profile.schema import Profile, RouteVerdict

SHADOW = RouteVerdict(decision="shadow", n=12, serving_k=10, tolerance=0.01, max_loss=0.05)


def in_shadow(policy: RatioPolicy) -> Profile:
    route = profile_of(policy).routes[Route.EXTERNAL].model_copy(update={"verdict": SHADOW})
    return profile_of(policy).model_copy(update={"routes": {Route.EXTERNAL: route}})


KEEPS_ALL = in_shadow(RatioPolicy(k=6))
"""The fifth passage is the relevant one: nothing is lost by six instead of ten."""


@dataclass
class Watched:
    """Traffic that a profile in shadow decided, and its file."""

    run: Run
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "profile.json"

    def traffic(self, n: int, profile: Profile = KEEPS_ALL) -> None:
        profile.save(self.file)
        made = serve(self.folder, n, profile=profile, relevant_ranks=[4], rates=EVERYTHING)
        made.write_labels(self.folder / "labels.jsonl")

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder / 'samples.db'}"

    def monitor(self, *options: object) -> Result:
        labels = self.folder / "labels.jsonl"
        judge = ("--judge", "labels", "--labels", labels)
        command = ("monitor", "--store", self.url, *judge, "--profile", self.file, "--once")
        return self.run(*command, *options)


@pytest.fixture
def watched(run: Run, tmp_path: Path) -> Watched:
    return Watched(run, tmp_path)


def in_one_line(result: Result) -> str:
    return " ".join(ok(result).stdout.split())


def test_until_requests_suffice_the_monitor_says_how_many_are_missing(watched: Watched) -> None:
    watched.traffic(40)
    found = read(watched.monitor("--json"))["in_shadow"]["external"]
    assert (found["n"], found["difference"], found["risen"]) == (40, 0.0, False)
    assert 10 <= found["missing"] <= 30
    said = in_one_line(watched.monitor("--switch"))
    assert f"it stays in shadow until about {found['missing']} more like these are judged" in said
    assert Profile.load(watched.file) == KEEPS_ALL


def test_switch_raises_the_verdict_and_a_copy_returns(watched: Watched) -> None:
    watched.traffic(80)
    said = in_one_line(watched.monitor())
    assert "recall +0.000 over 80 judged requests of the profile in force" in said
    assert "it may be enforced" in said
    assert Profile.load(watched.file) == KEEPS_ALL, "nobody asked for it"
    guard = ContextGuard(
        lambda _query, *, depth: [Hit(f"p{n}", 0.9 - n / 20, f"text {n}") for n in range(depth)],
        profile=watched.file,
        score_kind=ScoreKind.COSINE,
        telemetry=Telemetry(CollectorRegistry()),
    )
    watcher = ProfileWatcher(guard, watched.file)
    assert len(guard.retrieve("q").passages) == 10
    said = in_one_line(watched.monitor("--switch"))
    assert f"your copy of profile {KEEPS_ALL.profile_id}, put back, undoes that" in said
    raised = Profile.load(watched.file)
    assert raised.verdict.statement.startswith(
        "enforce: mean recall differs by +0.000 from that of the first 10 on 80 judged requests"
    )
    assert raised.routes[Route.EXTERNAL].policy == KEEPS_ALL.routes[Route.EXTERNAL].policy
    watcher.check()
    assert (guard.mode, len(guard.retrieve("q").passages)) == (Mode.ENFORCE, 6)
    assert "recall +0.000 over 80 judged requests" in raised.provenance.notes[-1]
    KEEPS_ALL.save(watched.file)
    watcher.check()
    assert (guard.mode, len(guard.retrieve("q").passages)) == (Mode.SHADOW, 10)


def test_a_policy_that_loses_never_rises(watched: Watched) -> None:
    watched.traffic(200, in_shadow(RatioPolicy(k=1)))
    said = in_one_line(watched.monitor("--switch"))
    assert "recall -1.000 over 200 judged requests" in said
    assert "more requests like these would not change that" in said
    assert Profile.load(watched.file).verdict.decision == "shadow"


def test_a_profile_that_was_replaced_meanwhile_is_not_overwritten(watched: Watched) -> None:
    """Between its reading and the raise: the requests were decided by the former."""
    watched.traffic(80)
    other = profile_of(RatioPolicy(k=3))
    with SampleStore.open(watched.url) as store:
        monitor = Monitor(
            store,
            LabelJudge({f"which shelf holds tool {n}": {f"d{n}-4": 1} for n in range(80)}),
            watched=WatchedProfile(KEEPS_ALL, path=watched.file, switch=True),
        )
        while monitor.step():
            pass
        other.save(watched.file)
        monitor.maintain()
        assert Profile.load(watched.file) == other
        assert monitor.alarms.profile == other


def test_a_scrape_says_what_is_missing_until_it_rises(watched: Watched) -> None:
    registry = CollectorRegistry()
    watched.traffic(40)
    judge = LabelJudge({f"which shelf holds tool {n}": {f"d{n}-4": 1} for n in range(80)})

    def scrape() -> dict[str, float]:
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
            if sample.name.startswith("ctxguard_shadow_")
        }

    with SampleStore.open(watched.url) as store:
        monitor = Monitor(
            store,
            judge,
            watched=WatchedProfile(KEEPS_ALL, path=watched.file, switch=True),
        )
        MonitorCollector(monitor, registry)
        while monitor.step():
            pass
        monitor.maintain()
        found = scrape()
        assert found["ctxguard_shadow_may_rise"] == 0
        assert 10 <= found["ctxguard_shadow_requests_needed"] <= 30
        assert found["ctxguard_shadow_labels_needed"] == 0
        serve(watched.folder, 40, first=40, profile=KEEPS_ALL, relevant_ranks=[4], rates=EVERYTHING)
        while monitor.step():
            pass
        monitor.maintain()
        assert scrape()["ctxguard_shadow_may_rise"] == 1
        assert Profile.load(watched.file).verdict != SHADOW
        monitor.maintain()
        assert scrape() == {}


def test_without_a_profile_judged_requests_give_the_first(run: Run, tmp_path: Path) -> None:
    watched = Watched(run, tmp_path)
    serve(tmp_path, 200, rates=EVERYTHING).write_labels(tmp_path / "labels.jsonl")
    labels = ("--judge", "labels", "--labels", tmp_path / "labels.jsonl")
    assert run("monitor", "--store", watched.url, *labels, "--once").exit_code == 0
    out = tmp_path / "first.json"
    found = run.read("calibrate", "--store", watched.url, "--out", out, "--json")
    assert found["requests"] == 200
    made = Profile.load(out)
    assert made.routes[Route.EXTERNAL].safe_policy == RatioPolicy(k=5)
    assert made.provenance.depth == 12
    assert made.unverified
    assert made.verdict is not None

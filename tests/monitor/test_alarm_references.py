"""What judged losses are compared with, from traffic and a judge that errs to `/metrics`."""

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from contexts import make_context
from people import grade
from stub_judges import ErringJudge
from watching import Watching

from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import FloatArray, Route, ScoreKind
from ctxguard.measure.metrics import Metric, losses
from ctxguard.monitor.alarms import Alarm, AlarmKind, ReferenceKind
from ctxguard.monitor.alarms.ecusum import WEEK, Day, Days
from ctxguard.monitor.alarms.reference import corrected, upper_limit
from ctxguard.monitor.estimation.sampling_design import to_label
from ctxguard.monitor.sampling.sampler import JudgingRates
from ctxguard.profile.schema import Profile, RouteProfile
from tests.profiles import CERTIFICATE, profile_with
from tests.stored import all_judged

POOL = [f"p{rank}" for rank in range(5)]
KEPT, LOST = "p0", "p4"
RATES = JudgingRates(baseline_rate=1.0)
ROUTE = RouteProfile(
    policy=RatioPolicy(k=3),
    score_kind=ScoreKind.RATIO,
    certificate=CERTIFICATE.model_copy(update={"alpha": 0.21}),
    safe_policy=RatioPolicy(k=5),
)
PROFILE = profile_with({Route.EXTERNAL: ROUTE})
PROFILE_ID = PROFILE.profile_id


def is_named(query: str, passage_id: str) -> bool:
    """A query names its only relevant passage."""
    return passage_id == query.split(maxsplit=1)[0]


class Traffic:
    """Requests of which a share lose their only relevant passage, before a whole monitor."""

    def __init__(self, path: Path | None = None, rates: JudgingRates = RATES) -> None:
        self._rng = random.Random(5)
        self._relevant: dict[str, str] = {}
        self.live = Watching(
            ErringJudge(is_named, (0.85, 0.8)),
            rates=rates,
            profile=PROFILE,
            path=path,
            switch_to_safe=True,
        )
        self.registry = self.live.registry

    def watch(self, n: int, loss: float, days: int = 1) -> None:
        for _ in range(days):
            self._watch_day(n // days, loss)

    def _watch_day(self, n: int, loss: float) -> None:
        contexts = []
        for number in range(len(self._relevant), len(self._relevant) + n):
            relevant = LOST if self._rng.random() < loss else KEPT
            context = make_context(POOL, 3, request_id=f"r{number}", query=f"{relevant} {number}")
            self._relevant[f"r{number}"] = relevant
            contexts.append(replace(context, profile_id=PROFILE_ID))
        self.live.watch(*contexts)
        self.live.end_day()

    def grade(self, n: int) -> None:
        """Have people grade the pools of a random part of the requests."""
        store, monitor = self.live.store, self.live.monitor
        grade(
            store,
            to_label(store, monitor.series, n * len(POOL), whole=True),
            lambda row: int(row.passage_id == self._relevant[row.request_id]),
        )
        monitor.maintain()

    def judged_losses(self) -> list[float]:
        rows = all_judged(self.live.store, self.live.monitor.series)
        found = losses(rows)[Metric.RECALL_LOSS]
        return found[~np.isnan(found)].tolist()

    @property
    def active(self) -> list[Alarm]:
        return list(self.live.monitor.alarms.report().active)

    def scraped(self, name: str, reference: str) -> float | None:
        labels = {"route": "external", "quantity": "recall_loss", "reference": reference}
        return self.registry.get_sample_value(name, labels)


def test_erring_judge_never_rings() -> None:
    """A judge that errs rings for nothing neither before nor after labels."""
    traffic = Traffic()
    traffic.watch(300, loss=0.2, days=3)
    assert traffic.scraped("ctxguard_alarm_e_value", "baseline") is None
    assert traffic.scraped("ctxguard_alarm_target", "baseline") is None
    assert traffic.scraped("ctxguard_alarm_requests_needed", "baseline") > 90
    traffic.watch(700, loss=0.2, days=7)
    # The promise holds, and what this judge says would break it.
    assert np.mean(traffic.judged_losses()) > 0.25
    assert 0.3 < traffic.scraped("ctxguard_alarm_target", "baseline") < 0.4
    assert traffic.scraped("ctxguard_alarm_target", "corrected") is None
    traffic.grade(250)
    assert 0.3 < traffic.scraped("ctxguard_alarm_target", "corrected") < 0.45
    traffic.watch(700, loss=0.2, days=7)
    assert traffic.active == []
    assert traffic.scraped("ctxguard_alarm_target", "promise") is None


def test_rise_above_own_mean_rings(tmp_path: Path) -> None:
    """A rise above the judge's own mean rings and labels show whether to switch."""
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    traffic = Traffic(path)
    traffic.watch(840, loss=0.2, days=7)
    traffic.watch(400, loss=0.6, days=2)
    (alarm,) = traffic.active
    assert (alarm.kind, alarm.reference) == (AlarmKind.RECALL_LOSS, ReferenceKind.BASELINE)
    assert re.search(
        r"compared with this judge's own mean over its first \d+ requests \(at most 0\.3",
        alarm.message,
    )
    assert "because there are too few human labels to correct the judge with" in alarm.message
    assert "so switch-to-safe does not act on it" in alarm.message
    assert Profile.load(path) == PROFILE
    traffic.grade(250)
    traffic.watch(400, loss=0.6, days=2)
    (alarm,) = traffic.active
    assert alarm.reference is ReferenceKind.CORRECTED
    assert "the certificate promises at most 0.21. The judge makes errors" in alarm.message
    assert "requests that people graded too" in alarm.message
    assert Profile.load(path) == PROFILE.safe()


def test_unobservable_promise_warns_with_mend() -> None:
    """Until samples can show it, over a restart."""
    traffic = Traffic(rates=JudgingRates(baseline_k=4, full_pool_rate=0.0))
    traffic.watch(40, loss=0.2)
    (warning,) = traffic.active
    assert warning.kind is AlarmKind.PROMISE_NOT_MONITORED
    assert "JudgingRates(baseline_k=5, baseline_rate=0.2)" in warning.message
    labels = {"kind": "promise_not_monitored", "route": "external", "reference": ""}
    assert traffic.registry.get_sample_value("ctxguard_alarm_active", labels) == 1.0
    judge = ErringJudge(is_named, (0.85, 0.8))
    mended = Watching(judge, rates=RATES, store=traffic.live.store, profile=PROFILE)
    assert mended.monitor.own()
    assert mended.monitor.alarms.report().active == (warning,)
    later = make_context(POOL, 3, request_id="later", query="p0 later")
    mended.watch(replace(later, profile_id=PROFILE_ID))
    assert mended.monitor.alarms.report().active == ()


def test_promise_below_judged_depth_is_monitored() -> None:
    traffic = Traffic(rates=JudgingRates(baseline_rate=1.0, baseline_k=10))
    traffic.watch(300, loss=0.2)
    (monitor,) = [
        one
        for one in traffic.live.monitor.alarms.report().losses
        if one.quantity is AlarmKind.RECALL_LOSS
    ]
    assert monitor.n > 250


def graded(
    rng: np.random.Generator, n: int, loss: float = 0.1
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Losses by people and by a judge that errs, and the probabilities of grading."""
    human = (rng.random(n) < loss).astype(float)
    judge = np.where(rng.random(n) < np.where(human > 0.0, 0.85, 0.1), 1.0, 0.0)
    human[rng.random(n) < 0.1] = np.nan
    judge[rng.random(n) < 0.05] = np.nan
    return human, judge, rng.choice([0.05, 0.1], n)


def test_translated_promise_is_seldom_too_low() -> None:
    """The translated promise is seldom below the judge's mean at the promised loss."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(400):
        human, judge, probability = graded(rng, 300)
        found.append(corrected(human, judge, 1.0 / probability, 0.12))
    # Where people find no loss defined, the judge's mean stays that at a loss of 0.1.
    truth = 0.9 * (0.1 + 0.12 * 0.75) + 0.1 * (0.1 + 0.1 * 0.75)
    used = [one for one in found if one is not None]
    assert len(used) > 200
    assert np.mean([target < truth for target, _ in used]) <= 0.08
    assert np.mean([target for target, _ in used]) - truth < 0.06


def test_too_little_evidence_translates_nothing() -> None:
    """Too few graded requests or a judge that sees no loss translate nothing."""
    rng = np.random.default_rng(2)
    human, judge, probability = graded(rng, 40, loss=0.5)
    assert corrected(human, judge, 1.0 / probability, 0.3) is None
    assert corrected(human[:0], judge[:0], probability[:0], 0.3) is None
    human, _, probability = graded(rng, 400, loss=0.3)
    assert corrected(human, rng.random(400), 1.0 / probability, 0.3) is None


def week_of(loss: float, n: int) -> Days:
    """A week of n losses a day."""
    seen = Days()
    for _ in range(WEEK):
        seen = seen.plus(Days.of(Day.of(np.full(n, loss), np.ones(n), np.arange(n))))
    return seen


def test_lossless_baseline_allows_for_unseen() -> None:
    assert 5.0 / 700 > upper_limit(week_of(0.0, 100)) > 1.0 / 700


def test_varying_days_widen_the_baseline() -> None:
    week, rng = Days(), np.random.default_rng(6)
    for day in range(WEEK):
        lost = (rng.random(500) < (0.1 if day > 4 else 0.4)).astype(float)
        week = week.plus(Days.of(Day.of(lost, np.ones(500), np.arange(500))))
    assert upper_limit(week) - week.mean > 2.0 * (upper_limit(week_of(0.31, 500)) - 0.31)

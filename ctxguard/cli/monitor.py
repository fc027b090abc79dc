"""``ctxguard monitor``: judge sampled requests, and serve live estimates and alarms.

Reads and writes the store, reads labels, the index and the profile, which it may replace by a safe
one; calls the model that judges, handles signals, and serves metrics on a port.
"""

import signal
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator
from rich.console import RenderableType

import ctxguard
from ctxguard._support.settings import key, optional, optional_key, setting
from ctxguard._support.words import count
from ctxguard.cli import _options
from ctxguard.cli._console import FINDING, Output, picked
from ctxguard.cli._inputs import read_labelled
from ctxguard.cli._store import (
    IN_WORDS,
    WAITS,
    JudgeModel,
    judge_waiting,
    label_judge,
    open_store,
    tokens_in_words,
)
from ctxguard.cli._tables import NO_DATA, TextTable, facts, interval, remark
from ctxguard.errors import ConfigurationError, CtxguardError
from ctxguard.measure.worth import READERS
from ctxguard.server.system import AllMetrics, IndexSystem

if TYPE_CHECKING:
    from ctxguard import CorpusSketch, HybridRetriever
    from ctxguard.measure.estimate import Estimate
    from ctxguard.measure.metrics import Metric
    from ctxguard.monitor.alarms import AlarmReport
    from ctxguard.monitor.estimation.live import WindowPopulation
    from ctxguard.monitor.judges import Judge
    from ctxguard.monitor.service import Monitor, Report

_DAY_SECONDS = 86_400.0
_GIB = 2**30
_EXIT_SECONDS = 5.0
_LOOK_SECONDS = 5.0


class MonitorCommand(JudgeModel, IndexSystem):
    judge: Literal["labels", "llm", "cross-encoder", "reranker", "people"] = setting(
        "Grades passages: labels, llm (a language model), cross-encoder, reranker (a server), or "
        "people alone.",
        "JUDGE",
    )
    labels: Path | None = optional(
        "Labelled queries of --judge labels: a BEIR folder, the file of one of its splits, or "
        "a JSONL file.",
        "PATH",
    )
    relevant_from: _options.RelevantFrom = 1
    all_metrics: AllMetrics = False
    store: _options.StoreUrl
    profile: Path | None = optional(
        "Calibrated profile; an alarm is raised when its losses rise.", "FILE"
    )
    switch_to_safe: bool = key(
        "Replace the file --profile by its safe policy when recall loss is above what it promises.",
        value=False,
    )
    calls_per_day: float | None = optional("Most passages judged per UTC day.", "N", gt=0)
    price_per_million: float | None = optional_key(
        "Price of a million tokens of context, to show what is saved.", gt=0
    )
    host: str = setting("Address on which /metrics is served.", "ADDRESS", value="127.0.0.1")
    once: bool = setting("Judge the waiting samples, print the estimates, and exit.", value=False)
    port: int = key("Port on which /metrics is served; 0 for any free.", ge=0, le=65535, value=9108)
    calls_per_hour: float | None = optional_key("Most passages judged per hour.", gt=0)
    cost_per_day: float | None = optional_key(
        "Most spent per UTC day, in the currency of prices.", gt=0
    )
    window_seconds: float = key("Length of the recent window.", ge=1, value=3600.0)
    keep_days: float = key("Age in days at which samples are deleted.", ge=0.01, value=30.0)
    keep_gib: float = key(
        "GiB of stored samples above which the oldest are deleted.", ge=0.001, value=2.0
    )
    refresh_seconds: float = key(
        "Time between two updates of estimates.", ge=0.1, le=300, value=15.0
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.switch_to_safe and self.profile is None:
            raise ConfigurationError("switch-to-safe changes a profile file: give --profile")
        if self.judge == "people" and self.profile is not None:
            raise ConfigurationError(
                "alarms require a judge: leave out --profile, or name another --judge"
            )
        if self.cost_per_day is not None and self.prices is None:
            raise ConfigurationError("cost-per-day requires prices: set the key prices")
        return self

    def __call__(self, output: Output) -> None:
        """One monitor owns a store: another waits until it ends, and then takes over.

        For notifications, load the alerting rules that `ctxguard metrics rules`
        prints into Prometheus, and let Alertmanager send what fires:
        docs/alertmanager.yml in the project's repository is an example.

        With --once the exit code is 1 while an alarm is active or if the judge
        cannot be reached. A judge whose first 20 calls give no valid grade is
        asked no more: the command ends with 1, and the samples wait.
        """
        if output.as_json and not self.once:
            raise ConfigurationError("--json prints what --once found: give --once")
        from ctxguard.guard.wrapped_retriever import call_if
        from ctxguard.monitor.judging.budget import BudgetLimits
        from ctxguard.monitor.service import Monitor
        from ctxguard.monitor.store import Limits

        loaded = None if self.profile is None else ctxguard.Profile.load(self.profile)
        retriever = None
        if self.index is not None:
            retriever = self.model_copy(update={"reranker": None}).open_index()
        judge = self._judge(output)
        limits = Limits(self.keep_days * _DAY_SECONDS, int(self.keep_gib * _GIB))
        running = Monitor(
            open_store(self.store, limits),
            judge,
            window_seconds=self.window_seconds,
            budget=BudgetLimits(self.calls_per_hour, self.calls_per_day, self.cost_per_day),
            lookup=None if retriever is None else retriever.passage,
            utilities=READERS if loaded is None else loaded.utilities,
            profile=loaded,
            path=self.profile,
            corpus_sketch=None if retriever is None else partial(_present_corpus, retriever),
            switch_to_safe=self.switch_to_safe,
        )
        former = running.store.series()
        if former and running.series not in former:
            output.note(
                f"this store was judged by {former[-1]!r}: {running.series!r} first judges again "
                "what people labelled, and then later samples"
            )
        try:
            (self._once if self.once else self._serve)(running, judge, output)
        finally:
            call_if(judge, "close")
            running.store.close()

    def _judge(self, output: Output) -> "Judge":
        """Build the judge, and note the repairs made in labels."""
        if self.judge == "people":
            from ctxguard.monitor.judges import PeopleAlone

            return PeopleAlone()
        if self.judge != "labels":
            return self.model_judge(self.judge, self.reranker)
        if self.labels is None:
            raise ConfigurationError("--judge labels needs --labels: a BEIR folder, or JSONL")
        labelled = read_labelled(self.labels, "test", self.relevant_from)
        texts, notes = labelled.texts()
        judge = label_judge(labelled.dataset, texts)
        output.note(*labelled.notes, *notes)
        if judge.ambiguous:
            output.note(
                f"{count(judge.ambiguous, 'question')} with conflicting labels get no grade: make "
                "the labels agree, or remove some"
            )
        return judge

    def _once(self, running: "Monitor", judge: "Judge", output: Output) -> None:
        from ctxguard.measure.metrics import failed_in_words
        from ctxguard.monitor.judging.counts import tokens_by_mode
        from ctxguard.monitor.service import JudgingOutcome

        owns = running.own()
        if not owns:
            output.note("another monitor owns this store: these are its current figures")
        judge_fault = judge_waiting(running, output) if owns else None
        own_alarms = running.alarms if owns else None
        before = None if own_alarms is None else own_alarms.profile_id
        report = running.maintain() if owns else running.report()
        alarms = None if own_alarms is None else own_alarms.report()
        judge_failed = report.waiting > 0 and report.outcomes[JudgingOutcome.JUDGE_FAILED] > 0
        notes = [] if judge_fault is None else [judge_fault]
        if getattr(judge, "n_unlabelled", 0) or not report.outcomes[JudgingOutcome.JUDGED]:
            notes += _of_labels(judge)
        if alarms is not None and alarms.profile_id != before:
            notes.append(
                f"{self.profile} now holds profile {alarms.profile_id}; to undo that, restore your "
                f"copy of profile {before}"
            )
        if report.failed_passages:
            notes.append(failed_in_words(report.failed_requests, report.failed_passages))
        if judge_failed:
            notes.append(
                f"{running.why_judge_failed}; {count(report.waiting, 'sample')} still waiting"
            )
        price = self.price_per_million
        tokens = {
            mode: {**found._asdict(), "saved_cost": found.saved_cost(price)}
            for mode, found in tokens_by_mode(report.counts).items()
        }
        alarmed = alarms is not None and any(each.reference is not None for each in alarms.active)
        output.result(
            {**_document(report, alarms), "tokens": tokens},
            _shown(report, alarms, price),
            notes,
            found=judge_failed or judge_fault is not None or alarmed,
        )

    def _serve(self, running: "Monitor", judge: "Judge", output: Output) -> None:
        from ctxguard.monitor.export.multiprocess import registry_for_scrape
        from ctxguard.monitor.export.prometheus import MonitorCollector
        from ctxguard.monitor.export.server import MetricsServer

        registry = registry_for_scrape(all_metrics=self.all_metrics)
        MonitorCollector(
            running,
            registry,
            price_per_million=self.price_per_million,
            all_metrics=self.all_metrics,
        )
        try:
            server = MetricsServer(self.host, self.port, registry)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {self.host}:{self.port} ({error.strerror}); choose another "
                "--host, or another port in the --system file"
            ) from error
        threading.Thread(target=server.serve_forever, name="ctxguard-metrics", daemon=True).start()
        # A signal handler may put to a queue. A hanging judge holds up only its own thread.
        received: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: received.put(number))
        url = f"http://{self.host}:{server.server_port}/metrics"
        output.err.print(f"{url}, judged by {running.series}")
        output.note(*_of_labels(judge))
        if not running.own():
            output.note(WAITS.format(store=running.store.name))
        running.start(refresh_seconds=self.refresh_seconds)
        while running.judge_fault is None:
            with suppress(Empty):
                received.get(timeout=_LOOK_SECONDS)
                break
        running.stop(_EXIT_SECONDS)
        server.shutdown()
        server.server_close()
        if running.judge_fault is not None:
            output.err.print(running.judge_fault, soft_wrap=True)
            raise SystemExit(FINDING)


def _of_labels(judge: "Judge") -> list[str]:
    """Say how a judge that uses labels counts unlabelled passages."""
    from ctxguard.monitor.judges import LabelJudge

    if not isinstance(judge, LabelJudge):
        return []
    line = (
        "unlabelled passages count as not relevant: precision is at least the figure shown, and "
        "recall covers only labelled passages"
    )
    return [line]


def _present_corpus(retriever: "HybridRetriever") -> "CorpusSketch":
    """Sketch the index in its folder, or the last version that could be opened."""
    with suppress(CtxguardError):
        retriever.reload()
    return retriever.corpus_sketch()


def _document(report: "Report", alarms: "AlarmReport | None") -> dict[str, object]:
    from ctxguard.monitor.judging.counts import MISMATCHED

    names = (
        *("shown", "estimates", "judge_estimates", "labelled", "unpicked", "disagreements"),
        *("judge", "outcomes", "waiting", "failed_requests", "failed_passages"),
        "judging_sampling_probability",
    )
    totals = _totals(report)
    return {
        **picked(report, *names),
        **{name: int(totals[name]) for name in ("grades", "invalid_grades", MISMATCHED)},
        **picked(report.accounts, "sampled", "stored", "pending", "unaccounted", "lost"),
        "windows": report.populations,
        "alarms": () if alarms is None else alarms.active,
        "promises": [
            {
                **picked(loss, "route", "quantity", "reference", "target", "e_value"),
                **picked(loss.promise, "at_most", "source"),
                "reference_requests": loss.n_reference,
                "judged": loss.n,
                "needed": loss.n_needed,
            }
            for loss in (() if alarms is None else alarms.losses)
        ],
    }


def _shown(
    report: "Report", alarms: "AlarmReport | None", price: float | None
) -> Iterator[RenderableType]:
    from ctxguard.monitor.judging.counts import MISMATCHED

    accounts = report.accounts
    lost = ", ".join(f"{n:,} {reason.value}" for reason, n in accounts.lost.items() if n)
    outcomes = ", ".join(
        f"{n:,} {outcome.value.replace('_', ' ')}" for outcome, n in report.outcomes.items() if n
    )
    samples = f"{accounts.sampled:,} taken, {accounts.stored:,} stored, "
    samples += f"{sum(accounts.lost.values()):,} lost" + (f" ({lost})" if lost else "")
    samples += f", {accounts.pending:,} pending" if accounts.pending else ""
    samples += f", {accounts.unaccounted:,} unaccounted for" if accounts.unaccounted else ""
    yield facts(
        ("samples", samples),
        ("judged by", report.judge),
        ("this run", outcomes or ("nothing judged" if report.waiting else "nothing waited")),
        ("grades", _grades(report)),
        ("waiting", count(report.waiting, "sample") if report.waiting else None),
        *tokens_in_words(report.counts, price),
    )
    if mismatched := _totals(report)[MISMATCHED]:
        yield remark(
            f"{count(int(mismatched), 'sample')} answered under a profile that was calibrated on "
            "another system (profile_mismatch); each answer's `differences` name what differs"
        )
    if report.waiting and report.judging_sampling_probability == 0.0:
        yield remark("the judging budget is used up for now")
    if alarms is not None:
        yield from _alarms_shown(alarms)
    yield from _estimates_shown(report)


def _totals(report: "Report") -> Mapping[str, float]:
    """Sum the counts since the judge's series began."""
    totals = defaultdict[str, float](float)
    for (name, *_), n in report.counts.items():
        totals[name] += n
    return totals


def _grades(report: "Report") -> str | None:
    """Report how many grades the judge was asked for."""
    totals = _totals(report)
    if not totals["grades"]:
        return None
    said = count(int(totals["grades"]), "passage")
    said += f", {totals['invalid_grades']:,.0f} without a grade"
    if totals["judge_calls"]:
        said += f", {count(int(totals['judge_calls']), 'call')}"
    return said + (f", cost {totals['judge_cost']:,.2f}" if totals["judge_cost"] else "")


def _alarms_shown(alarms: "AlarmReport") -> Iterator[RenderableType]:
    from ctxguard.monitor.alarms.ecusum import DEFAULT_THRESHOLD

    yield facts(*[("alarm" if one.reference else "warning", one.message) for one in alarms.active])
    if not alarms.losses:
        yield remark(f"profile {alarms.profile_id} has no promise that could be monitored")
        return
    rows = [
        (
            monitor.quantity.value.replace("_", " "),
            monitor.route.value,
            f"{monitor.promise.at_most:.3f}",
            f"after {monitor.n_needed:,} more"
            if monitor.target is None
            else f"{monitor.target:.3f}",
            f"{monitor.n:,}",
            NO_DATA if monitor.e_value is None else f"{monitor.e_value:,.3g}",
        )
        for monitor in alarms.losses
    ]
    yield TextTable(
        ("promise", "route", "at most>", "target>", "judged>", "evidence>"),
        rows,
        f"Promises of profile {alarms.profile_id}; alarm at evidence {DEFAULT_THRESHOLD:,.0f}",
    )
    if not any(monitor.n for monitor in alarms.losses) and not alarms.active:
        yield remark(
            "no whole day of requests served by this profile in enforce mode is judged yet"
        )


def _estimates_shown(report: "Report") -> Iterator[RenderableType]:
    from ctxguard.monitor.estimation.live import Window

    if report.judge_estimates:
        yield remark(
            f"the judge makes errors, which people's labels on {count(report.labelled, 'request')} "
            f"correct. {_next_step(report)}"
        )
    if report.unpicked:
        yield remark(
            f"no estimate uses {count(report.unpicked, 'labelled request')} that `ctxguard label "
            "export` did not pick: their probability of being picked is unknown"
        )
    titles = {
        Window.RECENT: "recent window",
        Window.UP_TO_LABELS: "up to labels",
        Window.ALL_RETAINED: "all retained",
    }
    about = {titles[each]: _population(one) for each, one in report.populations.items()}
    if len(about) > 1 and len(set(about.values())) == 1:
        about = {"all windows": next(iter(about.values()))}
    yield facts(*about.items())
    # A metric comes above its parts.
    places = {name: place for place, name in enumerate(IN_WORDS)}
    shown = sorted(report.shown.items(), key=lambda each: places.get(each[0].value, len(places)))
    for title, by_window in (
        ("Live estimates, with 95% intervals", report.estimates),
        ("The judge's raw figures, not corrected", report.judge_estimates),
    ):
        if not by_window:
            continue
        rows = []
        for metric, window in shown:
            found, name = by_window[window][metric], IN_WORDS.get(metric.value, metric.value)
            n = NO_DATA if found.n_effective is None else f"{found.n_effective:,.0f}"
            rows.append((name, _figure(metric, found), titles[window], n))
        yield TextTable(("metric", "estimate>", "window", "effective>"), rows, title)


def _next_step(report: "Report") -> str:
    """Say what people should grade next, until every metric has an estimate."""
    shown = [report.estimates[window][metric] for metric, window in report.shown.items()]
    lacking = [one.grades_needed for one in shown if one.value is None]
    n = max(filter(None, lacking), default=0)
    if n <= 0:
        return "Label more with `ctxguard label export`"
    return (
        f"Next: have people grade about {count(n, 'passage')}, "
        f"`ctxguard label export -n {n} --out FILE`"
    )


def _population(about: "WindowPopulation") -> str:
    span = ""
    if about.since_seconds is not None and about.until_seconds is not None:
        since, until = (
            f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
            for seconds in (about.since_seconds, about.until_seconds)
        )
        span = f" from {since} to {until} UTC"
    said = f"{count(about.judged, 'judged request')}{span}, {about.labelled:,} of them labelled"
    return said + (f", {about.failed:,} lack a grade" if about.failed else "")


_HALF_WIDTHS = {"precision": 0.045, "served_mrr": 0.045, "pooled_recall": 0.12}
"""Half-width of the interval that 400 grades gave in simulation
(benchmarks/results/labelling.json)."""


def _figure(metric: "Metric", estimate: "Estimate") -> str:
    """Write an estimate with its interval, or how much more data it needs, and why."""
    if estimate.value is not None or estimate.n_needed is None:
        return interval(estimate)
    if estimate.grades is None:
        return f"needs {count(max(estimate.n_needed - estimate.n, 1), 'more request')}"
    said, half = f"needs {count(estimate.n_needed, 'more grade')}", _HALF_WIDTHS.get(metric.value)
    if half is None:
        return said
    return f"{said}: ± {half * (400 / (estimate.grades + estimate.n_needed)) ** 0.5:.2f}"

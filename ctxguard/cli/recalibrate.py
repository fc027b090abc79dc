"""``ctxguard recalibrate``: a new profile from judged traffic, and whether it would be better."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli._console import Output, check_writable, interval, number, print_json, table
from ctxguard.cli._store import StoreUrl, named_series, open_store
from ctxguard.cli._words import policy_in_words
from ctxguard.types import Route

if TYPE_CHECKING:
    from calibration.samples import JudgedTraffic, Recalibration
    from ctxguard.profile import Profile


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("recalibrate")(recalibrate)


def recalibrate(
    *,
    from_samples: StoreUrl,
    profile: Annotated[Path, typer.Option(help="The profile in force.")],
    out: Annotated[Path, typer.Option(help="Where the new profile is written.")],
    judge: Annotated[
        str | None, typer.Option(help="The series of judgments. (default: the only one)")
    ] = None,
    route: Annotated[
        Route | None, typer.Option(help="The stages that answered. (default: the commonest)")
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="Share of the requests that old and new are compared on.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of splits and bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Calibrate on judged traffic, and compare with the profile in force.

    The new policy runs in shadow on requests that took no part in its
    choice. Nothing is put in force: copy the new profile over the old one
    when the comparison convinces.
    """
    from calibration.certify import Settings
    from calibration.samples import judged_traffic
    from calibration.samples import recalibrate as run
    from ctxguard.profile import Profile

    check_writable(out, "--out")
    if out.exists() and profile.exists() and out.samefile(profile):
        raise typer.BadParameter(
            "the profile in force is not overwritten; name another file", param_hint="--out"
        )
    output = Output(as_json=as_json)
    before = Profile.load(profile)
    with open_store(from_samples) as store, output.doing("reading judged requests"):
        traffic = judged_traffic(store, named_series(store, judge), route=route)
    settings = Settings(held_out=held_out, seed=seed, utilities=before.utilities)
    with output.passes() as begin:
        found = run(traffic, before, settings, passes=begin)
    found.profile.save(out)
    if as_json:
        print_json(_document(found, traffic, before, out))
        return
    _print(found, traffic, before, output)
    output.facts(
        [
            ("wrote", f"{out} (profile {found.profile.profile_id})"),
            ("in force", f"{profile}, until you copy the new one over it"),
        ]
    )
    for note in traffic.dataset.notes:
        output.note(note)


def _print(
    found: "Recalibration", traffic: "JudgedTraffic", before: "Profile", output: Output
) -> None:
    route = traffic.route
    output.facts(
        [
            ("requests", f"{len(traffic.dataset):,} distinct queries with wholly judged pools"),
            ("route", route.value),
            ("old policy", policy_in_words(before.routes[route].policy)),
            ("new policy", policy_in_words(found.profile.routes[route].policy)),
        ]
    )
    made = table(
        "metric",
        "old>",
        "new>",
        "new − old>",
        "95% interval",
        "",
        title=f"In shadow, on {found.held_out:,} queries that took no part in the choice",
    )
    old, new = found.old.evidence().metrics, found.new.evidence().metrics
    for name, difference in found.differences.items():
        made.add_row(
            name,
            number(old[name].value),
            number(new[name].value),
            number(difference.value),
            interval(difference),
            difference.outcome,
        )
    output.out.print(made)


def _document(
    found: "Recalibration", traffic: "JudgedTraffic", before: "Profile", out: Path
) -> dict[str, object]:
    route = traffic.route
    old, new = found.old.evidence().metrics, found.new.evidence().metrics
    return {
        "profile": str(out),
        "profile_id": found.profile.profile_id,
        "route": route.value,
        "requests": len(traffic.dataset),
        "held_out": found.held_out,
        "left_out": dict(traffic.left_out),
        "old_policy": policy_in_words(before.routes[route].policy),
        "new_policy": policy_in_words(found.profile.routes[route].policy),
        "metrics": {
            name: {
                "old": old[name].value,
                "new": new[name].value,
                "difference": difference.value,
                "lower": difference.lower,
                "upper": difference.upper,
                "n": difference.n,
                "outcome": difference.outcome,
            }
            for name, difference in found.differences.items()
        },
    }

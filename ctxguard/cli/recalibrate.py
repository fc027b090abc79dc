"""``ctxguard recalibrate``: a new profile from judged traffic, compared with the old one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard._support.settings import SettingsModel, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, check_writable, print_json
from ctxguard.cli._results import by_metric
from ctxguard.cli._store import named_series, open_store
from ctxguard.core.types import Route
from ctxguard.profile.describe import describe_policy

if TYPE_CHECKING:
    from calibration.from_traffic import JudgedTraffic, Recalibration
    from ctxguard.monitor.estimation.rise import Rise
    from ctxguard.profile.schema import Profile, RouteProfile
_HELD_OUT = 0.5
"""Share of the questions on which the two profiles are compared."""


class Recalibrate(SettingsModel):
    """Settings of ``ctxguard recalibrate``."""

    store: _options.StoreUrl
    profile: Annotated[Path, setting("Profile in force, to compare the new one with.", "FILE")]
    out: Annotated[Path, setting("File to write the new profile to.", "FILE")]
    judge: _options.NamedJudge = None
    route: Annotated[
        Route | None,
        setting(
            "Route whose requests are used: lexical, dense or hybrid, each with or without "
            "+rerank, or external.",
            "ROUTE",
            default="the most frequent",
        ),
    ] = None
    index: Annotated[
        Path | None,
        setting(
            "Index that answered; the new profile is for its corpus.",
            "FOLDER",
            default="the corpus of the profile in force",
        ),
    ] = None
    as_json: _options.AsJson = False


def recalibrate(settings: Recalibrate) -> None:
    """Calibrate on judged traffic, and compare with the profile in force.

    The new policy runs in shadow on questions that took no part in its
    choice; each counts as often as it was asked. Nothing is put in
    force: copy the new profile over the old one when the comparison
    convinces.
    """
    from calibration.calibrate_route import Settings
    from calibration.from_traffic import judged_traffic
    from calibration.from_traffic import recalibrate as run
    from ctxguard.profile.schema import Profile
    from ctxguard.retrieval.index.hybrid_index import HybridIndex

    out, profile, index = settings.out, settings.profile, settings.index
    check_writable(out, "--out")
    if out.exists() and profile.exists() and out.samefile(profile):
        raise typer.BadParameter(
            "the profile in force is not overwritten; name another file", param_hint="--out"
        )
    output = Output(as_json=settings.as_json)
    before = Profile.load(profile)
    with open_store(settings.store) as store, output.doing("reading judged requests"):
        series = named_series(store, settings.judge)
        traffic = judged_traffic(store, series, route=settings.route)
    sketch = None if index is None else HybridIndex.load(index).passages.sketch
    calibration = Settings(
        held_out=_HELD_OUT,
        utilities=before.utilities,
        utilities_source=before.provenance.utilities_source,
    )
    with output.passes() as begin:
        recalibration = run(traffic, before, calibration, passes=begin, corpus_sketch=sketch)
    recalibration.profile.save(out)
    if settings.as_json:
        print_json(_document(recalibration, traffic, before, out))
        return
    _print(recalibration, traffic, before, output)
    output.facts(
        [
            ("wrote", f"{out} (profile {recalibration.profile.profile_id})"),
            ("in force", f"{profile}, until you copy the new one over it"),
        ]
    )
    output.notes(traffic.dataset.notes)


def _print(
    recalibration: "Recalibration", traffic: "JudgedTraffic", before: "Profile", output: Output
) -> None:
    from calibration.from_traffic import rise_by_traffic

    route = traffic.route
    after = recalibration.profile.routes[route]
    output.facts(
        [
            *_verdict(after, rise_by_traffic(traffic, before)),
            ("requests", _requests(traffic)),
            ("route", route.value),
            ("old policy", describe_policy(before.routes[route].policy)),
            ("new policy", describe_policy(after.policy)),
            ("certificate", _certificate(after)),
        ]
    )
    held_out = f"{recalibration.held_out:,} questions that took no part in the choice"
    output.heading(f"In shadow, on {held_out}")
    output.out.print(by_metric(recalibration.results))


def _verdict(after: "RouteProfile", rise: "Rise | None") -> list[tuple[str, str]]:
    """The verdict on the new profile, and that of traffic on one in force in shadow."""
    facts = [("verdict", "" if after.verdict is None else after.verdict.statement)]
    if rise is not None:
        facts.append(("in shadow", rise.statement))
    return facts


def _requests(traffic: "JudgedTraffic") -> str:
    return (
        f"{traffic.requests:,} with wholly judged pools, which ask {len(traffic.dataset):,} "
        "questions"
    )


def _certificate(after: "RouteProfile") -> str:
    """The promise of the new profile for the route, in words."""
    if after.certificate is None:
        return "none: the first k are kept, or no held-out question has a relevant passage"
    wide = " This bound is too wide to rely on." if after.certificate.promises_nothing else ""
    return after.certificate.statement + wide


def _document(
    recalibration: "Recalibration", traffic: "JudgedTraffic", before: "Profile", out: Path
) -> dict[str, object]:
    from calibration.from_traffic import rise_by_traffic

    route = traffic.route
    after = recalibration.profile.routes[route]
    return {
        "profile": out,
        "profile_id": recalibration.profile.profile_id,
        "route": route,
        "requests": traffic.requests,
        "questions": len(traffic.dataset),
        "effective_requests": traffic.effective_requests,
        "effective_questions": traffic.effective_questions,
        "held_out": recalibration.held_out,
        "left_out": traffic.left_out,
        "old_policy": describe_policy(before.routes[route].policy),
        "new_policy": describe_policy(after.policy),
        "verdict": after.verdict,
        "in_shadow": rise_by_traffic(traffic, before),
        "certificate": after.certificate,
        "results": recalibration.results,
        "notes": traffic.dataset.notes,
    }

"""``ctxguard recalibrate``: a new profile from judged traffic, compared with the old one."""

from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer
from pydantic import model_validator

import ctxguard
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, picked
from ctxguard.cli._results import by_metric, print_asking
from ctxguard.cli._store import named_series, open_store
from ctxguard.core.fusion import Fusion
from ctxguard.core.types import Route
from ctxguard.errors import ConfigurationError
from ctxguard.profile.describe import describe_policy
from ctxguard.server.settings import IndexSystem

if TYPE_CHECKING:
    from calibration.from_traffic import JudgedTraffic
    from ctxguard.monitor.estimation.promotion import Rise
    from ctxguard.monitor.store import SampleStore
    from ctxguard.profile.schema import Profile, RouteProfile

_HELD_OUT = 0.5
"""Share of the questions on which the two profiles are compared."""


class RecalibrateCommand(SettingsModel):
    store: _options.StoreUrl
    profile: Path | None = optional(
        "Profile in force, to compare the new one with.",
        "FILE",
        default="none, and the first k are served",
    )
    out: Path = setting("File to write the new profile to.", "FILE", writes=True)
    switch: bool = setting(
        "Raise the verdict of --profile from shadow to enforce if judged requests suffice; keep a "
        "copy of the file to undo it.",
        value=False,
    )
    judge: _options.NamedJudge = None
    route: Route | None = optional(
        "Route whose requests are used: lexical, dense or hybrid, each with or without "
        "+rerank, or external.",
        "ROUTE",
        default="the most frequent",
    )
    index: Path | None = optional(
        "Index that answered; the new profile is for its corpus, and without --profile for its "
        "models too.",
        "FOLDER",
        default="that of the profile in force",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.switch and self.profile is None:
            raise ConfigurationError("--switch changes a profile file: give --profile")
        return self

    def __call__(self, output: Output) -> None:
        """The new policy runs in shadow on questions that took no part in its
        choice; each counts as often as it was asked. The new profile is not put
        in force: copy it over the old one when the comparison convinces. A
        profile in shadow may rise by the same requests, with --switch.
        """
        from calibration.calibrate_route import Settings
        from calibration.from_traffic import judged_traffic, recalibrate
        from ctxguard.monitor.alarms.actions import raise_verdict
        from ctxguard.retrieval.index.hybrid_index import HybridIndex

        out, profile = self.out, self.profile
        if profile is not None and out.exists() and profile.exists() and out.samefile(profile):
            raise typer.BadParameter(
                "the profile in force is not overwritten; name another file", param_hint="--out"
            )
        before = None if profile is None else ctxguard.Profile.load(profile)
        with open_store(self.store) as store, output.doing("reading judged requests"):
            series = named_series(store, self.judge)
            traffic = judged_traffic(store, series, route=self.route)
            rises = {} if before is None else _rises(store, series, before)
        sketch = None if self.index is None else HybridIndex.load(self.index).passages.sketch
        before = _today(traffic, self.index) if before is None else before
        calibration = Settings(
            held_out=_HELD_OUT,
            utilities=before.utilities,
            utilities_source=before.provenance.utilities_source,
        )
        with output.passes() as begin:
            made = recalibrate(traffic, before, calibration, passes=begin, corpus_sketch=sketch)
        made.profile.save(out)
        raised = None
        if self.switch and profile is not None and any(each.risen for each in rises.values()):
            raised = raise_verdict(profile, before, rises)
        route, n_questions = traffic.route, len(traffic.dataset)
        after = made.profile.routes[route]
        policies = {
            "old_policy": describe_policy(before.routes[route].policy),
            "new_policy": describe_policy(after.policy),
        }
        document = {
            "profile": out,
            "profile_id": made.profile.profile_id,
            "route": route,
            "questions": n_questions,
            **picked(traffic, "requests", "effective_requests", "effective_questions", "left_out"),
            **policies,
            **picked(after, "verdict", "certificate", "asking", "assessor"),
            **picked(made, "held_out", "results"),
            "in_shadow": rises,
            "raised": None if raised is None else raised.profile_id,
        }

        def show() -> None:
            pools = f"{traffic.requests:,} with wholly judged pools, which ask {n_questions:,}"
            output.facts(
                ("verdict", "" if after.verdict is None else after.verdict.statement),
                *[("in shadow", f"{each.value}: {rise.statement}") for each, rise in rises.items()],
                ("requests", f"{pools} questions"),
                ("route", route.value),
                *[(name.replace("_", " "), policy) for name, policy in policies.items()],
                ("certificate", _certificate(after)),
            )
            held_out = f"{made.held_out:,} questions that took no part in the choice"
            output.heading(f"In shadow, on {held_out}")
            output.out.print(by_metric(made.results))
            print_asking(after, output)
            output.facts(("wrote", f"{out} (profile {made.profile.profile_id})"))
            if raised is not None and before is not None:
                in_force = f"{profile} (profile {raised.profile_id}) is enforced now"
                output.facts(("raised", in_force))
                output.note(f"your copy of profile {before.profile_id}, put back, undoes that")
            elif profile is not None:
                output.facts(("in force", f"{profile}, until you copy the new one over it"))

        output.result(document, show, traffic.dataset.notes)


def _rises(store: "SampleStore", series: str, profile: "Profile") -> "dict[Route, Rise]":
    """Report what judged requests say of the routes of a profile that are in shadow."""
    from ctxguard.monitor.estimation.full_judged_pools import ShadowedTraffic
    from ctxguard.monitor.judges import LabelJudge

    exact = series.startswith(f"{LabelJudge.name} ")
    return ShadowedTraffic(store, series, profile, exact=exact).look()


def _today(traffic: "JudgedTraffic", index: Path | None) -> "Profile":
    """Describe as a profile what is served without one, by the system that answered.

    Raises:
        ConfigurationError: nothing names that system.
    """
    from calibration.from_traffic import served_today

    route = traffic.route
    if route is Route.EXTERNAL:
        return served_today(traffic, fusion=Fusion(), fingerprint={})
    if index is None or route.value.endswith("rerank"):
        raise ConfigurationError(
            f"route {route.value} answered, and nothing names the models behind it: give "
            + ("--index, or --profile" if index is None else "--profile")
        )
    retriever = IndexSystem(index=index).open_index()
    return served_today(
        traffic,
        fusion=retriever.fusion,
        fingerprint=retriever.fingerprint(),
        corpus_sketch=retriever.corpus_sketch(),
    )


def _certificate(after: "RouteProfile") -> str:
    """Put the promise of the new profile for the route in words."""
    if after.certificate is None:
        return "none: the first k are kept, or no held-out question has a relevant passage"
    wide = " This bound is too wide to rely on." if after.certificate.promises_nothing else ""
    return after.certificate.statement + wide

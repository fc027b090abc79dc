"""``ctxguard calibrate``: choose a policy for each route, certify it, and report the evidence.

Reads labels or a store, calls the retriever and the assessor, and writes the profile and reports.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import model_validator
from rich.console import RenderableType

import ctxguard
from calibration.settings import ChoiceSettings
from ctxguard._support.extras import require
from ctxguard._support.settings import key, optional, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, picked
from ctxguard.cli._inputs import Labelled, in_first_order, notes_on_pools, open_labelled
from ctxguard.cli._results import asking_shown, summary_shown
from ctxguard.cli._store import RECALL_OF_JUDGED, by_k, named_series, next_step, open_store
from ctxguard.cli._system import LabelledSystem, open_assessor
from ctxguard.cli._tables import dim, facts, heading, interval, remark
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError
from ctxguard.measure.worth import READERS
from ctxguard.profile.describe import describe_policy, describe_utilities
from ctxguard.server.system import AssessorSettings

if TYPE_CHECKING:
    from calibration.calibrate import Calibration
    from calibration.judged_requests import JudgedRequests
    from calibration.settings import Settings
    from ctxguard.profile.schema import Profile, RouteEvidence, RouteVerdict

_OF_ROUTE = ("why", "verdict", "certificate", "sufficiency", "asking", "assessor", "evidence")
_OF_JUDGED = ("context", "today", "in_short", "gain", "in_force")


class CalibrateCommand(ChoiceSettings, AssessorSettings, LabelledSystem):
    data: _options.LabelledQueriesIfAny = None
    store: str | None = optional(
        "Sample store whose judged requests are calibrated on, in place of --data.", "URL", own=True
    )
    judge: _options.NamedJudge = None
    profile: Path | None = optional(
        "With --store: profile in force, whose other routes stay, and which is compared.",
        "FILE",
        own=True,
    )
    out: Path = setting("Profile to write, as JSON.", "FILE", writes=True)
    report: list[Path] = setting(
        "Write the evidence as one HTML page, or its figures where the name ends in .json. "
        "Repeatable.",
        "FILE",
        value=[],
        writes=True,
    )
    price: float | None = optional(
        "Ask the assessor (the key assessor) about a candidate where that is worth more than this, "
        "in UDCG.",
        "UDCG",
        default="0.002 with an assessor",
        ge=0,
    )
    signal_columns: list[str] = key(
        "Columns of the passages' metadata that P(relevant) may use: when a passage was written, "
        "its version, a number, or where it comes from.",
        value=[],
    )
    required: Literal["enforce"] | None = optional(
        "Exit with 1 unless the verdict is enforce.", "VERDICT", "--require"
    )
    alpha: float | None = optional(
        "Certify that at most this share of the relevant passages served today is dropped on "
        "the mean, in place of --context.",
        "LOSS",
    )
    show_all: _options.ShowAll = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.data is None) is (self.store is None):
            raise ConfigurationError(
                "give either --data (labelled queries) or --store (judged requests; `ctxguard "
                "judge` creates them from a log)"
            )
        if self.data is not None and self.profile is not None:
            raise ConfigurationError("--profile works only with --store")
        if self.store is not None and self.run is not None:
            raise ConfigurationError("--run has no effect with --store: leave it out")
        if self.store is not None and self.alpha is not None:
            raise ConfigurationError("--alpha needs --data: a judge's opinion certifies nothing")
        if (self.price is not None or self.asked is not None) and self.data is None:
            raise ConfigurationError("an assessor is calibrated on labelled queries: give --data")
        if self.price is not None and self.asked is None:
            raise ConfigurationError("--price needs a model to ask: name it with --ask")
        return self

    def __call__(self, output: Output) -> None:
        """Today's context (the first serving-k passages) stays unless another is shown to be
        better. With --store, a judge's grades of requests and people's of some passages stand for
        labels; without grades there is only a table of the judge's own view, and no profile. Name
        the system that answered, or the profile is unverified.
        """
        from calibration.asking import DEFAULT_PRICE, Asking
        from calibration.calibrate import calibrate
        from calibration.report import report, write_html, write_json

        if any(file.suffix != ".json" for file in self.report):
            require("jinja2", "report")
        chosen = self._chosen()
        if self.data is None:
            self._from_store(str(self.store), chosen, output)
            return
        labelled, opened = open_labelled(self, self.data, "train", output)
        price = DEFAULT_PRICE if self.price is None else self.price
        with open_assessor(self, patient=True) as stage, output.passes() as begin:
            made = calibrate(
                opened,
                labelled.dataset,
                chosen,
                passes=begin,
                asking=None if stage is None else Asking(stage, opened.passage, price),
            )
        made.profile.save(self.out)
        if self.report:
            with output.doing("writing the report"):
                evidence = report(made, opened.passage)
                for file in self.report:
                    (write_json if file.suffix == ".json" else write_html)(evidence, file)
        said = (*labelled.notes, *labelled.shared_questions(), *made.chosen_on.notes)
        notes = list(dict.fromkeys([*said, *made.profile.provenance.notes]))
        for route, outcome in made.outcomes.items():
            pools = outcome.route.pools
            notes += notes_on_pools(replace(pools, skipped=(), themselves=()), route, self.run)
        output.result(
            self._document(made, labelled),
            self._shown(made, labelled.in_words),
            notes,
            found=self._lacks_verdict(made.profile),
        )

    def _from_store(self, url: str, chosen: "Settings", output: Output) -> None:
        """Calibrate on judged requests; without enough grades by people, show only the table."""
        from calibration.from_store import calibrate_from_store, judged_store
        from calibration.report import write_judged

        in_force = None if self.profile is None else ctxguard.Profile.load(self.profile)
        with open_store(url) as store, output.doing("reading requests"):
            found = judged_store(store, named_series(store, self.judge), chosen.utilities)
        if "serving_k" not in self.model_fields_set and found.serving_k is not None:
            chosen = chosen.model_copy(update={"serving_k": found.serving_k})
        profile, judged = None, dict[str, Any]()
        if not found.lacking:
            with output.doing("fitting"):
                profile = calibrate_from_store(found, chosen, in_force, **self._system(in_force))
                judged = _judged(found, profile, in_force)
            profile.save(self.out)
        figures, table = by_k(found)
        document = {
            "verdict": profile and profile.verdict and profile.verdict.decision,
            "profile": None if profile is None else self.out,
            "profile_id": profile and profile.profile_id,
            "route": found.pools.route,
            "policy": profile and describe_policy(profile.routes[found.pools.route].policy),
            **dict.fromkeys(_OF_JUDGED),
            **judged,
            **figures,
        }
        for file in self.report:
            write_judged(document, file)
        notes = [*found.questions.notes, *(() if profile else next_step(found))]
        if profile is not None and not profile.fingerprint:
            notes.append(
                "unverified: no system was named, so a guard cannot tell whether it serves the "
                "same passages; name the system that answered, such as with --index"
            )
        shown: list[RenderableType] = [table, dim(f"recall: {RECALL_OF_JUDGED}")]
        if profile is not None:
            shown.insert(0, self._judged_facts(profile, found.pools.route, judged))
        files = [*([self.out] if profile else ()), *self.report]
        shown.append(facts(*[("wrote", str(file)) for file in files]))
        lacks = profile is None or self._lacks_verdict(profile)
        output.result(document, shown, notes, found=lacks)

    def _lacks_verdict(self, profile: "Profile") -> bool:
        """Return whether a required verdict was not reached."""
        decision = None if profile.verdict is None else profile.verdict.decision
        return self.required not in {None, decision}

    def _judged_facts(
        self, profile: "Profile", route: Route, judged: Mapping[str, Any]
    ) -> RenderableType:
        verdict = profile.verdict
        rows = [
            ("verdict", "" if verdict is None else verdict.short),
            ("in short", judged["in_short"]),
            ("in full", verdict.statement if verdict and self.show_all else None),
            ("route", route.value),
            ("keeps", describe_policy(profile.routes[route].policy)),
        ]
        for name in ("gain", "in_force"):
            if gain := judged[name]:
                recall, udcg = (interval(each, sign="+") for each in gain.values())
                rows.append((name.replace("_", " "), f"UDCG {udcg}, recall {recall}"))
        return facts(*rows)

    def _system(self, in_force: "Profile | None") -> dict[str, Any]:
        """Identify the system that answered, from itself or from the profile in force."""
        from ctxguard.guard.wrapped_retriever import call_if

        if self.sources:
            source = in_first_order(self.open())
            return {
                "fusion": getattr(source, "fusion", None),
                "fingerprint": source.fingerprint(),
                "corpus_sketch": call_if(source, "corpus_sketch"),
            }
        if in_force is None:
            return {}
        return {**picked(in_force, "fusion", "fingerprint"), "corpus_sketch": in_force.corpus}

    def _chosen(self) -> "Settings":
        """Build the settings for calibration."""
        from calibration.settings import Settings

        return Settings(
            **picked(self, *ChoiceSettings.model_fields),
            alpha=self.alpha,
            depth=self.depth or DEFAULT_DEPTH,
            utilities=self.worth(READERS),
            utilities_source=self.by_hand or None,
            signal_columns=tuple(self.signal_columns),
        )

    def _document(self, made: "Calibration", labelled: Labelled) -> dict[str, object]:
        from calibration.report import certificate_words, summarise

        held_out, profile = made.held_out, made.profile
        return {
            "verdict": None if profile.verdict is None else profile.verdict.decision,
            "profile": self.out,
            "reports": self.report,
            "profile_id": profile.profile_id,
            **labelled.document,
            "held_out": 0 if held_out is None else len(held_out),
            "fusion": profile.fusion,
            "utilities": profile.utilities,
            "utilities_source": profile.provenance.utilities_source,
            "routes": {
                route: {
                    "policy": describe_policy(outcome.profile.policy),
                    "kind": outcome.profile.policy.kind,
                    "k": outcome.profile.policy.k,
                    "promise": certificate_words(outcome),
                    "summary": summarise(outcome),
                    **picked(outcome.profile, *_OF_ROUTE),
                }
                for route, outcome in made.outcomes.items()
            },
        }

    def _shown(self, made: "Calibration", queries: str) -> Iterator[RenderableType]:
        from calibration.certify import sufficiency_words
        from calibration.report import summarise

        profile, held_out, show_all = made.profile, made.held_out, self.show_all
        source = profile.provenance.utilities_source
        utilities = describe_utilities(profile.utilities, source)
        (_, first), *others = made.outcomes.items()
        verdict, summary = profile.verdict, summarise(first)
        yield facts(
            ("verdict", "" if verdict is None else verdict.short),
            ("in short", summary.in_short),
            ("in full", verdict.statement if verdict is not None and show_all else None),
            ("queries", queries),
            ("held out", f"{len(held_out):,} of them" if held_out else None),
            ("fusion", profile.fingerprint.get("fusion") if show_all else None),
            ("utilities", utilities if show_all or source is not None else None),
        )
        yield from summary_shown(summary, first, show_all=show_all)
        yield from asking_shown(first.profile)
        if show_all:
            yield facts(("sufficiency", sufficiency_words(first.profile.sufficiency)))
        else:
            yield remark("--all shows the verdict's figures, certificate and reasons")
        rows = []
        for route, outcome in others:
            own, line = outcome.profile.verdict, summarise(outcome).in_short
            # A line says by itself that today's contexts stay.
            if own is not None and own.decision != "keep":
                line = f"{own.decision}: {line}"
            rows.append((route.value, line))
        if rows:
            yield heading("when a stage is down")
            yield facts(*rows)
        yield ""
        written = [("wrote", str(file)) for file in (self.out, *self.report)]
        yield facts(("profile", profile.profile_id), *written)


def _judged(
    found: "JudgedRequests", profile: "Profile", in_force: "Profile | None"
) -> dict[str, Any]:
    """Compare a policy's contexts on judged requests with today's; keys are ``_OF_JUDGED``.

    ``gain`` and ``in_force``, that of the policy in force, are over today's first k.
    """
    from calibration.judged_requests import decided
    from calibration.report.summary import in_one_line, unshown_by

    route, pools = profile.routes[found.pools.route], found.pools
    verdict = cast("RouteVerdict", route.verdict)
    todays = decided(pools, RatioPolicy(k=verdict.serving_k))
    context, today = (
        {"passages": sizes["kept"].value, "tokens": sizes["tokens"].value}
        for sizes in (cast("RouteEvidence", route.evidence).metrics, found.sizes(todays))
    )
    before = None if in_force is None else in_force.routes.get(pools.route)
    recall = verdict.recall
    noisy = ["recall"] if recall and recall.bounds is not None and recall.side is None else []
    in_short = in_one_line(
        passages=(context["passages"], today["passages"]),
        tokens=(context["tokens"], today["tokens"]),
        recall=None if verdict.decision == "keep" else recall,
        misleading="not counted in judged requests",
        unshown=unshown_by(verdict, noisy, "utility"),
    )
    gain = None if recall is None else {"recall": recall, "udcg": verdict.udcg}
    old = None if before is None else found.gain(decided(pools, before.policy), todays)
    return dict(zip(_OF_JUDGED, (context, today, in_short, gain, old), strict=True))

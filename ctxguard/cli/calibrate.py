"""``ctxguard calibrate``: choose a policy for each route, certify it, and report the evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

import ctxguard
from calibration.settings import ChoiceSettings
from ctxguard._support.cache_folder import cache_folder
from ctxguard._support.extras import require
from ctxguard._support.settings import key, optional, optional_key, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, check_writable
from ctxguard.cli._from_questions import calibrate_from_questions, require_verdict
from ctxguard.cli._inputs import Labelled, read_labelled, shared_questions
from ctxguard.cli._pools import notes_on_pools
from ctxguard.cli._results import print_asking, print_summary
from ctxguard.cli._store import JudgeModel
from ctxguard.cli._system import Source, System, open_assessor
from ctxguard.core.metrics import DEFAULT_UTILITIES, Utilities
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError
from ctxguard.profile.describe import describe_policy, describe_utilities

if TYPE_CHECKING:
    from calibration.calibrate import Calibration
    from calibration.calibrate_route import RouteOutcome, Settings

_TIMED_QUERIES = 20
"""Whose signals are timed for a report."""


class Calibrate(JudgeModel, System, ChoiceSettings):
    """Settings of ``ctxguard calibrate``."""

    data: _options.LabelledQueriesIfAny = None
    queries: Path | None = optional(
        "Questions without labels, in place of --data: JSONL or CSV with query_id and query, "
        "such as a log. Without --judge, the command says what judging them would take.",
        "FILE",
    )
    store: str | None = optional_key(
        "Sample store whose requests give the questions, in place of --queries. Without either, "
        "--judge llm writes some from passages of --index.",
        "URL",
    )
    questions: int = key(
        "Most questions from store, or written from passages.", "N", ge=1, value=100
    )
    judge: Literal["llm", "cross-encoder", "reranker"] | None = optional(
        "Grades the first 20 passages of each question: llm (a language model), cross-encoder, or "
        "reranker (a server, the key base-url).",
        "JUDGE",
    )
    out: Path = setting("Profile to write, as JSON.", "FILE")
    report: list[Path] = setting(
        "Write the evidence as one HTML page, or its figures where the name ends in .json. "
        "Repeatable.",
        "FILE",
        factory=list,
    )
    price: float | None = optional(
        "Ask the assessor (the key assessor) about a candidate where that is worth more than this, "
        "in strict UDCG.",
        "UDCG",
        default="0.002 with an assessor",
        ge=0,
    )
    signal_column: list[str] = setting(
        "Column of the passages' metadata that P(relevant) may use: when a passage was written, "
        "its version, a number, or where it comes from. Repeatable.",
        "COLUMN",
        factory=list,
    )
    required: Literal["enforce"] | None = optional(
        "Exit with 1 unless the verdict is enforce.", "VERDICT", "--require"
    )
    alpha: float | None = optional(
        "Certify that at most this share of the relevant passages served today is dropped on "
        "the mean, in (0, 1), and take the policy of highest strict UDCG that keeps this "
        "promise; --objective is not used then.",
        "LOSS",
    )
    utilities: Path | None = optional_key(
        "Utilities that `ctxguard fit utilities --out FILE` fitted to a reader.",
        "FILE",
        default="the preset",
    )
    show_all: _options.ShowRest = False
    as_json: _options.AsJson = False
    beta: float | None = optional_key(
        "Certify a mean harm of at most this as well; needs --alpha.", "HARM"
    )
    cache: Path | None = optional_key(
        "Folder that caches the retrieved candidates, by the fingerprint of the system.",
        "FOLDER",
        default="ctxguard/pools in the user's cache folder for an index, otherwise none",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("data", "queries", "store") if getattr(self, name) is not None]
        if len(given) > 1 or not (given or self.judge == "llm"):
            raise ConfigurationError(
                "give either --data, labelled queries, or questions without labels: --queries, "
                "the key store, or --judge llm alone, which writes some from passages"
            )
        if self.judge is not None and self.data is not None:
            raise ConfigurationError("--judge goes with questions: labels need no judge")
        if not given and self.index is None:
            raise ConfigurationError(
                "questions are written from the passages of --index; give it, --queries or store"
            )
        if self.judge == "reranker" and self.base_url == self.rerank_upstream is not None:
            raise ConfigurationError("the reranker that is calibrated cannot judge itself")
        if (self.price is not None or self.assessor is not None) and self.data is None:
            raise ConfigurationError("an assessor is calibrated on labelled queries: give --data")
        if self.price is not None and self.assessor is None:
            raise ConfigurationError("--price needs an assessor: name it in a file --system")
        if self.utilities is not None and self.preset is not None:
            raise ConfigurationError("give utilities, those of a reader, or preset, not both")
        for name in ("segment_by", "beta"):
            if getattr(self, name) is not None and self.alpha is None:
                raise ConfigurationError(f"{name.replace('_', '-')} needs --alpha")
        if self.cache is not None and self.rerank_upstream is not None:
            # Kept pools are told apart by the reranker, not by the candidates that it scored.
            raise ConfigurationError("cache goes with no rerank-upstream")
        return self


def calibrate(settings: Calibrate) -> None:
    """Choose and certify a policy for each route, and measure it on held-out queries.

    What you serve today, the first serving-k passages, is shown beside the choice. It is kept
    on a route where the labels show nothing better, or where no promise can be certified.

    Without labels a judge stands in for them, on questions of a file, of a
    sample store, or that a language model writes from passages. People may
    grade 20 of the questions.
    """
    from calibration.asking import DEFAULT_PRICE, Asking
    from calibration.calibrate import calibrate as calibrate_all

    for option, file in [
        ("--out", settings.out),
        *(("--report", each) for each in settings.report),
    ]:
        check_writable(file, option)
    if any(map(_is_page, settings.report)):
        require("jinja2", "report")
    output = Output(as_json=settings.as_json)
    chosen = _chosen(settings)
    if settings.data is None:
        calibrate_from_questions(settings, chosen)
        return
    labelled = read_labelled(settings.data, "train")
    with output.doing("opening the retriever"):
        opened = settings.open(labelled.dataset.queries)
    labelled, counts = labelled.against(opened)
    # Whoever changes a retriever of their own may forget its fingerprint, and would get old pools.
    default_cache = None if settings.index is None else cache_folder() / "pools"
    price = DEFAULT_PRICE if settings.price is None else settings.price
    with open_assessor(settings, patient=True) as stage, output.passes() as begin:
        calibration = calibrate_all(
            opened,
            labelled.dataset,
            chosen,
            passes=begin,
            cache=settings.cache or default_cache,
            asking=None if stage is None else Asking(stage, opened.passage, price),
        )
    calibration.profile.save(settings.out)
    with output.doing("writing the report"):
        _write_reports(calibration, opened, settings.report)
    written = [str(file) for file in (settings.out, *settings.report)]
    said = (*labelled.notes, *shared_questions(labelled), *calibration.chosen_on.notes)
    notes = list(dict.fromkeys([*said, *calibration.profile.provenance.notes]))
    for route, pools in calibration.pools.items():
        notes += notes_on_pools(replace(pools, skipped=()), route, settings.run)
    described, show_all = labelled.described(counts), settings.show_all
    output.result(
        _document(calibration, labelled, counts, written),
        lambda: _print(calibration, described, written, output, show_all=show_all),
        notes,
    )
    require_verdict(calibration.profile, settings.required)


def _chosen(settings: Calibrate) -> "Settings":
    """The settings as calibration takes them."""
    from calibration.calibrate_route import Settings
    from calibration.certify import Promise

    utilities, source = _utilities(settings)
    promise = None
    if settings.alpha is not None:
        promise = Promise(settings.alpha, settings.beta, settings.delta)
    return Settings(
        **{name: getattr(settings, name) for name in ChoiceSettings.model_fields},
        promise=promise,
        depth=settings.depth or DEFAULT_DEPTH,
        utilities=utilities,
        utilities_source=source,
        signal_columns=tuple(settings.signal_column),
    )


def _utilities(settings: Calibrate) -> "tuple[Utilities, str | None]":
    """The worth of passages, and where that comes from; None for the default preset."""
    from calibration.reader.utilities import load_utilities

    base, source = DEFAULT_UTILITIES, ""
    if settings.utilities is not None:
        base, source = load_utilities(settings.utilities)
    worth, parts = settings.worth(base), [source, settings.by_hand]
    return worth, "; ".join(filter(None, parts)) or None


def _is_page(report: Path) -> bool:
    return report.suffix != ".json"


def _write_reports(calibration: "Calibration", retriever: "Source", files: Sequence[Path]) -> None:
    if not files:
        return
    from calibration.report import report, write_html, write_json

    evidence = report(
        calibration, retriever.passage, milliseconds=_signal_milliseconds(calibration, retriever)
    )
    for file in files:
        if _is_page(file):
            write_html(evidence, file)
        else:
            write_json(evidence, file)


def _signal_milliseconds(
    calibration: "Calibration", retriever: "Source"
) -> dict[str, float] | None:
    """Times each family of signals on this machine; None for a retriever that cannot tell."""

    if not isinstance(retriever, ctxguard.HybridRetriever):
        return None
    queries = [query.text for query in calibration.dataset.queries[:_TIMED_QUERIES]]
    view = retriever.with_fusion(calibration.profile.fusion)
    return view.signal_milliseconds(queries, calibration.settings.depth)


def _document(
    calibration: "Calibration",
    labelled: "Labelled",
    counts: Mapping[str, int],
    written: Sequence[str],
) -> dict[str, object]:
    held_out, verdict = calibration.held_out, calibration.profile.verdict
    return {
        "verdict": None if verdict is None else verdict.decision,
        "profile": written[0],
        "reports": written[1:],
        "profile_id": calibration.profile.profile_id,
        "data": labelled.dataset.name,
        "split": labelled.split,
        **counts,
        "chosen_on": len(calibration.chosen_on),
        "held_out": 0 if held_out is None else len(held_out),
        "fusion": calibration.profile.fusion,
        "utilities": calibration.profile.utilities,
        "utilities_source": calibration.profile.provenance.utilities_source,
        "routes": {
            route: _route_document(outcome, calibration)
            for route, outcome in calibration.outcomes.items()
        },
    }


def _print(
    calibration: "Calibration",
    queries: str,
    written: Sequence[str],
    output: Output,
    *,
    show_all: bool,
) -> None:
    profile, held_out = calibration.profile, calibration.held_out
    n_held_out = 0 if held_out is None else len(held_out)
    facts = [
        ("verdict", "" if profile.verdict is None else profile.verdict.statement),
        ("queries", queries),
        ("parts", f"{len(calibration.chosen_on):,} to choose on, {n_held_out:,} held out"),
    ]
    if show_all and "fusion" in profile.fingerprint:
        facts.append(("fusion", profile.fingerprint["fusion"]))
    source = profile.provenance.utilities_source
    if show_all or source is not None:
        facts.append(("utilities", describe_utilities(profile.utilities, source)))
    output.facts(facts)
    routes = iter(calibration.outcomes)
    from calibration.sufficiency import sufficiency_words

    first = next(routes)
    print_summary(first, calibration, output, show_all=show_all)
    print_asking(calibration.outcomes[first].profile.assessor, output)
    if show_all:
        sufficiency = calibration.outcomes[first].profile.sufficiency
        output.facts([("sufficiency", sufficiency_words(sufficiency))])
    else:
        output.note("--all shows what else could be served, and when a context is insufficient")
    others = list(routes)
    if others:
        output.heading("when a stage is down")
        output.facts([(route.value, _in_short(route, calibration)) for route in others])
    output.out.print()
    output.facts([("profile", profile.profile_id), *(("wrote", file) for file in written)])


def _k_and_threshold(outcome: "RouteOutcome", place: tuple[int, int]) -> dict[str, float]:
    return dict(zip(("k", "threshold"), outcome.chosen_grid.settings(place), strict=True))


def _route_document(outcome: "RouteOutcome", calibration: "Calibration") -> dict[str, object]:
    from calibration.report import certificate_words, summarise

    chosen, test = outcome.profile, outcome.certification
    return {
        "policy": describe_policy(chosen.policy),
        "kind": chosen.policy.kind,
        "k": chosen.policy.k,
        "why": chosen.why,
        "verdict": chosen.verdict,
        "promise": certificate_words(outcome, calibration.settings),
        "certificate": chosen.certificate,
        "summary": summarise(
            outcome, calibration.settings, held_out=calibration.held_out is not None
        ),
        "sufficiency": chosen.sufficiency,
        "assessor": chosen.assessor,
        "segments": {
            name: {
                "policy": describe_policy(segment.policy),
                "promise": segment.certificate.statement,
            }
            for name, segment in chosen.segments.items()
        },
        "chosen_on": chosen.chosen_on,
        "held_out": chosen.held_out,
        "rule_choices": {
            rule: {
                "choice": None if found is None else _k_and_threshold(outcome, found[0]),
                "tested": None if found is None else found[1],
            }
            for rule, found in ({} if test is None else test.rule_choices).items()
        },
    }


def _in_short(route: Route, calibration: "Calibration") -> str:
    """A fallback route in one line."""
    outcome = calibration.outcomes[route]
    policy = outcome.profile.policy
    words = describe_policy(policy)
    verdict = outcome.profile.verdict
    if verdict is not None and verdict.decision == "shadow":
        words = f"in shadow: {words}"
    if policy == outcome.today.policy:
        return f"{words}, as today"
    certificate = outcome.profile.certificate
    if certificate is None:
        return f"{words}; not certified"
    if certificate.recall_difference is None:
        return f"{words}; recall loss {certificate.alpha:g} at most"
    return f"{words}; recall {certificate.recall_difference.value:+.3f}"

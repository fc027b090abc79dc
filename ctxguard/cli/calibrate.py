"""``ctxguard calibrate``: choose a policy for each route, certify it, and report the evidence."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ctxguard._support.cache_folder import cache_folder
from ctxguard._support.extras import require
from ctxguard.cli import _options
from ctxguard.cli._console import (
    FINDING,
    Output,
    check_writable,
    print_json,
)
from ctxguard.cli._inputs import read_labelled, shared_questions, with_utilities
from ctxguard.cli._retriever import notes_on_pools, open_retriever, upstream_of
from ctxguard.cli._summary import print_summary
from ctxguard.core.types import DEFAULT_DEPTH, DEFAULT_K, Route
from ctxguard.profile.describe import describe_policy, describe_utilities

if TYPE_CHECKING:
    from calibration.calibrate import Calibration
    from calibration.calibrate_route import RouteOutcome
    from ctxguard.cli._inputs import Labelled, Source
    from ctxguard.core.metrics import Utilities

_TIMED_QUERIES = 20
"""Whose signals are timed for a report."""


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("calibrate")(calibrate)


def calibrate(
    *,
    index: _options.SourceIndex = None,
    engine: _options.SourceEngine = None,
    retriever: _options.SourceRetriever = None,
    run: _options.SourceRun = None,
    rerank_upstream: _options.RerankUpstream = None,
    candidates: _options.Candidates = None,
    rerank_protocol: _options.RerankProtocol = "cohere",
    rerank_model: _options.RerankModel = None,
    score_kind: _options.ScoresMean = None,
    fingerprint: _options.Fingerprint = None,
    data: _options.LabelledQueries,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Profile to write, as JSON.")],
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the evidence as one HTML page.")
    ] = None,
    report_json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures of the page as JSON.")
    ] = None,
    split: Annotated[str | None, _options.split("train")] = None,
    policy: Annotated[
        Literal["auto", "ratio", "expected_utility"],
        typer.Option(
            metavar="KIND",
            help="Keep a passage by its score relative to the best (ratio), or by its calibrated "
            "probability of relevance (expected_utility); auto chooses by the labels.",
        ),
    ] = "auto",
    serving_k: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Passages that you serve today; recall is compared with them."
        ),
    ] = DEFAULT_K,
    objective: Annotated[
        Literal["keep-recall", "utility"],
        typer.Option(
            metavar="OBJECTIVE",
            help="Choose the policy of least harm that keeps the recall of what you serve today "
            "(keep-recall), or the policy of highest strict UDCG (utility).",
        ),
    ] = "keep-recall",
    tolerance: Annotated[
        float,
        typer.Option(metavar="LOSS", help="Most mean recall that keep-recall may lose, in [0, 1)."),
    ] = 0.01,
    max_loss: Annotated[
        float,
        typer.Option(
            metavar="LOSS",
            help="How far below today's the lower bound on mean recall may lie for the verdict "
            "enforce, in (0, 1).",
        ),
    ] = 0.05,
    required: Annotated[
        Literal["enforce"] | None,
        typer.Option(
            "--require", metavar="VERDICT", help="Exit with 1 unless the verdict is enforce."
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="LOSS",
            help="Certify that at most this share of the relevant passages served today is "
            "dropped on the mean, in (0, 1), and take the policy of highest strict UDCG that "
            "keeps this promise; --objective is not used then.",
        ),
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(
            metavar="HARM", help="Certify a mean harm of at most this as well; needs --alpha."
        ),
    ] = None,
    delta: Annotated[
        float,
        typer.Option(metavar="P", help="Probability that the certificate is false, in (0, 1)."),
    ] = 0.1,
    false_alarms: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Largest share of contexts with a relevant passage that may be called "
            "insufficient, in (0, 1).",
        ),
    ] = 0.05,
    segment_by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Choose a policy for each value of this metadata column of the queries where it "
            "can be certified; needs --alpha.",
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of the queries that are held out to measure the policy on, in [0, 1).",
            show_default="half, or less of fewer than 60",
        ),
    ] = None,
    depth: Annotated[
        int, typer.Option(metavar="N", min=1, help="Candidates to retrieve for each query.")
    ] = DEFAULT_DEPTH,
    min_keep: Annotated[
        int, typer.Option(metavar="N", min=0, help="Fewest passages to keep for each query.")
    ] = 1,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Token budget of a context; no size whose mean exceeds it is chosen.",
            show_default="none",
        ),
    ] = None,
    utilities: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take the utilities that `ctxguard fit-utilities --out FILE` fitted to a reader.",
            show_default="the preset",
        ),
    ] = None,
    utility: _options.Utility = None,
    reranker: _options.Reranker = None,
    ranker: _options.RankerFile = None,
    seed: _options.Seed = 0,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder that caches the retrieved candidates, by the fingerprint of the system.",
            show_default="ctxguard/pools in the user's cache folder for an index, otherwise none",
        ),
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Choose and certify a policy for each route, and measure it on held-out queries.

    What you serve today, the first --serving-k passages, is shown beside the choice. It is kept
    on a route where the labels show nothing better, or where no promise can be certified.
    """
    reports = {"--report": report, "--report-json": report_json}
    for option, file in {"--out": out, **reports}.items():
        if file is not None:
            check_writable(file, option)
    for option, value in (("--segment-by", segment_by), ("--beta", beta)):
        if value is not None and alpha is None:
            raise typer.BadParameter("needs --alpha", param_hint=option)
    if report is not None:
        for library in ("jinja2", "plotly"):
            require(library, "report")
    if cache is not None and rerank_upstream is not None:
        # Kept pools are told apart by the reranker, not by the candidates that it scored.
        raise typer.BadParameter("goes with no --rerank-upstream", param_hint="--cache")
    output = Output(as_json=as_json)
    worth, source = _utilities(utilities, utility)
    labelled = read_labelled(data, split, "train")
    with output.doing("opening the retriever"):
        from calibration.calibrate import calibrate as calibrate_all
        from calibration.calibrate_route import Settings
        from calibration.certify import Promise

        settings = Settings(
            policy=policy,
            objective=objective,
            serving_k=serving_k,
            tolerance=tolerance,
            max_loss=max_loss,
            promise=None if alpha is None else Promise(alpha, beta, delta),
            delta=delta,
            false_alarms=false_alarms,
            segment_by=segment_by,
            held_out=held_out,
            depth=depth,
            min_keep=min_keep,
            max_tokens=max_tokens,
            utilities=worth,
            utilities_source=source,
            seed=seed,
        )
        opened = open_retriever(
            index=index,
            engine=engine,
            retriever=retriever,
            run=run,
            upstream=upstream_of(rerank_upstream, candidates, rerank_protocol, rerank_model),
            reranker=reranker,
            ranker=ranker,
            score_kind=score_kind,
            fingerprint=fingerprint,
            queries=labelled.dataset.queries,
        )
    labelled, counts = labelled.against(opened)
    # Whoever changes a retriever of their own may forget its fingerprint, and would get old pools.
    default_cache = None if index is None else cache_folder() / "pools"
    with output.passes() as begin:
        calibration = calibrate_all(
            opened, labelled.dataset, settings, passes=begin, cache=cache or default_cache
        )
    calibration.profile.save(out)
    with output.doing("writing the report"):
        _write_reports(calibration, opened, report, report_json)
    files = {"profile": out, "report": report, "report_json": report_json}
    written = {name: None if file is None else str(file) for name, file in files.items()}
    notes = _notes(calibration, (*labelled.notes, *shared_questions(labelled)))
    for route, pools in calibration.pools.items():
        notes += notes_on_pools(replace(pools, skipped=()), route, run)
    if as_json:
        print_json(_document(calibration, labelled, counts, written, notes))
    else:
        _print(calibration, labelled.described(counts), written, output)
    for note in notes:
        output.note(note)
    verdict = calibration.profile.verdict
    if required is not None and (verdict is None or verdict.decision != required):
        raise typer.Exit(FINDING)


def _utilities(file: Path | None, settings: list[str] | None) -> "tuple[Utilities, str | None]":
    """What passages are worth, and where that comes from; None for the preset."""
    from calibration.reader.saved_utilities import load_utilities
    from ctxguard.core.metrics import DEFAULT_UTILITIES

    saved = None if file is None else load_utilities(file)
    worth = with_utilities(DEFAULT_UTILITIES if saved is None else saved.utilities, settings)
    set_by_hand = f"set by hand: {', '.join(settings)}" if settings else None
    parts = [part for part in (saved and saved.source, set_by_hand) if part]
    return worth, "; ".join(parts) or None


def _write_reports(
    calibration: "Calibration",
    retriever: "Source",
    page: Path | None,
    figures: Path | None,
) -> None:
    if page is None and figures is None:
        return
    from calibration.report import report, write_html, write_json

    evidence = report(
        calibration, retriever.passage, milliseconds=_signal_milliseconds(calibration, retriever)
    )
    if page is not None:
        write_html(evidence, page)
    if figures is not None:
        write_json(evidence, figures)


def _signal_milliseconds(
    calibration: "Calibration", retriever: "Source"
) -> dict[str, float] | None:
    """What each family of signals costs a query here; None for a retriever that cannot tell."""
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever

    if not isinstance(retriever, HybridRetriever):
        return None
    queries = [query.text for query in calibration.dataset.queries[:_TIMED_QUERIES]]
    view = retriever.with_fusion(calibration.profile.fusion)
    return view.signal_milliseconds(queries, calibration.settings.depth)


def _notes(calibration: "Calibration", notes: tuple[str, ...]) -> list[str]:
    """Notes on the labels, the parts and the replay, each once, in order."""
    provenance = calibration.profile.provenance
    return list(dict.fromkeys([*notes, *calibration.chosen_on.notes, *provenance.notes]))


def _document(
    calibration: "Calibration",
    labelled: "Labelled",
    counts: Mapping[str, int],
    written: Mapping[str, str | None],
    notes: list[str],
) -> dict[str, object]:
    held_out, verdict = calibration.held_out, calibration.profile.verdict
    return {
        "verdict": None if verdict is None else verdict.decision,
        **written,
        "profile_id": calibration.profile.profile_id,
        "data": labelled.dataset.name,
        "split": labelled.split,
        **counts,
        "chosen_on": len(calibration.chosen_on),
        "held_out": 0 if held_out is None else len(held_out),
        "fusion": calibration.profile.model_dump(mode="json")["fusion"],
        "utilities": asdict(calibration.profile.utilities),
        "utilities_source": calibration.profile.provenance.utilities_source,
        "routes": {
            route.value: _route_document(outcome, calibration)
            for route, outcome in calibration.outcomes.items()
        },
        "notes": notes,
    }


def _print(
    calibration: "Calibration", queries: str, written: Mapping[str, str | None], output: Output
) -> None:
    profile, held_out = calibration.profile, calibration.held_out
    n_held_out = 0 if held_out is None else len(held_out)
    output.facts(
        [
            ("verdict", "" if profile.verdict is None else profile.verdict.statement),
            ("queries", queries),
            ("parts", f"{len(calibration.chosen_on):,} to choose on, {n_held_out:,} held out"),
            *[("fusion", name) for name in [profile.fingerprint.get("fusion")] if name],
            (
                "utilities",
                describe_utilities(profile.utilities, profile.provenance.utilities_source),
            ),
        ]
    )
    routes = iter(calibration.outcomes)
    from calibration.sufficiency import sufficiency_words

    first = next(routes)
    print_summary(first, calibration, output)
    sufficiency = calibration.outcomes[first].profile.sufficiency
    output.facts([("sufficiency", sufficiency_words(sufficiency))])
    others = list(routes)
    if others:
        output.heading("when a stage is down")
        output.facts([(route.value, _in_short(route, calibration)) for route in others])
    output.out.print()
    output.facts(
        [("profile", profile.profile_id), *(("wrote", file) for file in written.values() if file)]
    )


def _choice(outcome: "RouteOutcome", grid_index: tuple[int, int] | None) -> dict[str, float] | None:
    """The k and the threshold at a place of the grid."""
    if grid_index is None:
        return None
    k, threshold = outcome.chosen_grid.settings(grid_index)
    return {"k": k, "threshold": threshold}


def _route_document(outcome: "RouteOutcome", calibration: "Calibration") -> dict[str, object]:
    from calibration.report import certificate_words, summarise

    chosen, test = outcome.profile, outcome.certification
    certificate = chosen.certificate
    return {
        "policy": describe_policy(chosen.policy),
        "kind": chosen.policy.kind,
        "k": chosen.policy.k,
        "why": chosen.why,
        "verdict": None if chosen.verdict is None else chosen.verdict.model_dump(),
        "promise": certificate_words(outcome, calibration.settings),
        "certificate": None if certificate is None else certificate.model_dump(),
        "summary": summarise(
            outcome, calibration.settings, held_out=calibration.held_out is not None
        ).model_dump(),
        "sufficiency": None if chosen.sufficiency is None else chosen.sufficiency.model_dump(),
        "segments": {
            name: {
                "policy": describe_policy(segment.policy),
                "promise": segment.certificate.statement,
            }
            for name, segment in chosen.segments.items()
        },
        "chosen_on": None if chosen.chosen_on is None else chosen.chosen_on.model_dump(),
        "held_out": None if chosen.held_out is None else chosen.held_out.model_dump(),
        "rule_choices": {
            other.rule: {"choice": _choice(outcome, other.grid_index), "tested": other.tested}
            for other in (() if test is None else test.rule_choices)
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

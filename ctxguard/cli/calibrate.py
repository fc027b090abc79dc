"""``ctxguard calibrate``: labelled queries become a profile, with what was promised and seen."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli._console import NO_DATA, Output, check_writable, interval, number, print_json
from ctxguard.cli._console import table as new_table
from ctxguard.cli._inputs import (
    DEFAULT_BASELINE,
    baseline_k,
    cache_folder,
    open_index,
    read_labelled,
    shared_questions,
)
from ctxguard.cli._words import policy_in_words
from ctxguard.types import Route

if TYPE_CHECKING:
    from calibration.calibrate import Calibration
    from calibration.certify import RouteOutcome, Settings
    from ctxguard.profile import Evidence, RouteProfile

_SHOWN = ("recall", "precision", "mrr", "ndcg", "udcg_strict", "harm", "kept", "recall_loss")
_RULES = {
    "betting": "betting (certifies)",
    "hoeffding_bentkus": "Hoeffding–Bentkus",
    "clt": "normal approximation",
    "conformal_risk_control": "conformal risk control",
    "uncorrected": "plain means, no test",
}


class PolicyChoice(StrEnum):
    """The families of policies."""

    AUTO = "auto"
    RATIO = "ratio"
    EXPECTED_UTILITY = "expected_utility"


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("calibrate")(calibrate)


def calibrate(
    *,
    index: Annotated[Path, typer.Option(help="Folder that `ctxguard index` wrote.")],
    data: Annotated[Path, typer.Option(help="BEIR folder, or JSONL of labelled queries.")],
    out: Annotated[Path, typer.Option(help="The profile to write.")],
    split: Annotated[
        str | None, typer.Option(help="A name in the folder's qrels/. (default: train)")
    ] = None,
    policy: Annotated[
        PolicyChoice, typer.Option(help="Family; auto takes what the labels support.")
    ] = PolicyChoice.AUTO,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Promise at most this mean recall loss. (default: the policy of highest UDCG, "
            "with a certificate of what it costs in recall)"
        ),
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Promise at most this mean harm as well.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Probability that the certificate is false.")] = 0.1,
    baseline: Annotated[
        str, typer.Option(help="What recall loss is relative to: pool, or k=N.")
    ] = DEFAULT_BASELINE,
    allow_uncertified: Annotated[
        bool,
        typer.Option("--allow-uncertified", help="Take the best where nothing can be certified."),
    ] = False,
    segment_by: Annotated[
        str | None, typer.Option(help="Metadata column whose values get policies of their own.")
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="Share of the queries that takes no part in the choice.")
    ] = 0.5,
    depth: Annotated[int, typer.Option(min=1, help="Candidates a query.")] = 100,
    min_keep: Annotated[int, typer.Option(min=0, help="Passages kept whatever happens.")] = 1,
    reranker: Annotated[str | None, typer.Option(help="CrossEncoder, by name or folder.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of splits, tests and bootstrap.")] = 0,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for replayed pools. (default: the user's cache)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose a policy for every route, certify it, and measure it on queries held out."""
    check_writable(out, "--out")
    for option, value in (("--segment-by", segment_by), ("--beta", beta)):
        if value is not None and alpha is None:
            raise typer.BadParameter("it goes with a promise: give --alpha", param_hint=option)
    output = Output(as_json=as_json)
    labelled = read_labelled(data, split, "train")
    with output.doing("opening the index"):
        from calibration.calibrate import calibrate as run
        from calibration.certify import Settings
        from calibration.select import Promise

        settings = Settings(
            policy=policy.value,
            promise=None if alpha is None else Promise(alpha, beta, delta),
            delta=delta,
            baseline_k=baseline_k(baseline),
            allow_uncertified=allow_uncertified,
            segment_by=segment_by,
            held_out=held_out,
            depth=depth,
            min_keep=min_keep,
            seed=seed,
        )
        retriever = open_index(index, reranker)
    counts = labelled.counts(retriever)
    with output.passes() as begin:
        found = run(
            retriever,
            labelled.dataset,
            settings,
            passes=begin,
            cache=cache_folder() / "pools" if cache is None else cache,
        )
    found.profile.save(out)
    notes = _notes(found, (*labelled.notes, *shared_questions(labelled)))
    parts = {
        "chosen_on": len(found.chosen_on),
        "held_out": 0 if found.held_out is None else len(found.held_out),
    }
    if as_json:
        print_json(
            {
                "profile": str(out),
                "profile_id": found.profile.profile_id,
                "data": labelled.dataset.name,
                "split": labelled.split,
                **counts,
                **parts,
                "fusion": found.profile.model_dump(mode="json")["fusion"],
                "routes": {
                    route.value: _route_document(outcome, settings)
                    for route, outcome in found.outcomes.items()
                },
                "notes": notes,
            }
        )
    else:
        output.facts(
            [
                ("queries", labelled.described(counts)),
                ("parts", f"{parts['chosen_on']:,} to choose on, {parts['held_out']:,} held out"),
                ("fusion", found.profile.fingerprint.get("fusion", NO_DATA)),
            ]
        )
        for route, outcome in found.outcomes.items():
            _print_route(route, outcome, settings, output)
        output.out.print()
        output.facts([("wrote", f"{out} (profile {found.profile.profile_id})")])
    for note in notes:
        output.note(note)


def _notes(found: "Calibration", notes: tuple[str, ...]) -> list[str]:
    """What was said of the labels, the parts and the replay, each once, in order."""
    return list(dict.fromkeys([*notes, *found.chosen_on.notes, *found.profile.provenance.notes]))


def _promise_in_words(outcome: "RouteOutcome", settings: "Settings") -> str:
    certificate, test = outcome.profile.certificate, outcome.certification
    if certificate is not None:
        return certificate.statement
    if settings.promise is None or test is None:
        return "no certificate: no query with a relevant passage was held out to certify the cost"
    if test.labels_needed is None:
        needed = "no number of labels would do on queries like these"
    else:
        needed = f"about {test.labels_needed} answerable test queries would do"
    return (
        f"no certificate: none of {test.tested} policies could be shown to keep recall loss ≤ "
        f"{settings.promise.alpha:g} on {test.n_recall} answerable test queries; {needed}"
    )


def _choice(outcome: "RouteOutcome", cell: tuple[int, int] | None) -> dict[str, float] | None:
    """A cell of the grid as its k and threshold."""
    if cell is None:
        return None
    survival = outcome.chosen_grid.survival
    return {"k": int(survival.ks[cell[0]]), "threshold": float(survival.thresholds[cell[1]])}


def _route_document(outcome: "RouteOutcome", settings: "Settings") -> dict[str, object]:
    chosen, test = outcome.profile, outcome.certification
    certificate = chosen.certificate
    return {
        "policy": policy_in_words(chosen.policy),
        "kind": chosen.policy.kind,
        "k": chosen.policy.k,
        "why": chosen.why,
        "promise": _promise_in_words(outcome, settings),
        "certificate": None if certificate is None else certificate.model_dump(),
        "uncertified": policy_in_words(outcome.uncertified),
        "segments": {
            name: {
                "policy": policy_in_words(segment.policy),
                "promise": segment.certificate.statement,
            }
            for name, segment in chosen.segments.items()
        },
        "chosen_on": None if chosen.chosen_on is None else chosen.chosen_on.model_dump(),
        "held_out": None if chosen.held_out is None else chosen.held_out.model_dump(),
        "alternatives": {
            other.rule: {"choice": _choice(outcome, other.cell), "tested": other.tested}
            for other in (() if test is None else test.alternatives)
        },
    }


def _print_route(
    route: Route, outcome: "RouteOutcome", settings: "Settings", output: Output
) -> None:
    chosen = outcome.profile
    output.heading(f"route {route.value}")
    rows = [
        ("keeps", policy_in_words(chosen.policy)),
        ("why", chosen.why),
        ("certificate", _promise_in_words(outcome, settings)),
    ]
    if outcome.uncertified != chosen.policy:
        rows.append(("without it", policy_in_words(outcome.uncertified)))
    for name, segment in chosen.segments.items():
        rows.append((f"segment {name}", policy_in_words(segment.policy)))
        rows.append(("", segment.certificate.statement))
    output.facts(rows)
    _print_evidence(chosen, output)
    if outcome.certification is not None:
        _print_alternatives(outcome, output)


def _print_evidence(chosen: "RouteProfile", output: Output) -> None:
    made = new_table("metric", "chosen on>", "n>", "held out>", "n>")
    for name in _SHOWN:
        made.add_row(name, *_cells(chosen.chosen_on, name), *_cells(chosen.held_out, name))
    output.out.print(made)


def _cells(evidence: "Evidence | None", name: str) -> tuple[str, str]:
    if evidence is None:
        return NO_DATA, "0"
    found = evidence.metrics[name]
    return f"{number(found.value)} {interval(found)}".rstrip(), f"{found.n:,}"


def _print_alternatives(outcome: "RouteOutcome", output: Output) -> None:
    test = outcome.certification
    made = new_table(
        "rule",
        "k>",
        "threshold>",
        "udcg_strict>",
        "recall_loss>",
        "harm>",
        title="What each rule would choose, and its means on the test queries",
    )
    for other in () if test is None else test.alternatives:
        choice, tested = _choice(outcome, other.cell), other.tested
        if choice is None or tested is None:
            made.add_row(f"{_RULES[other.rule]}: nothing", *["–"] * 5)
            continue
        made.add_row(
            _RULES[other.rule],
            f"{choice['k']:.0f}",
            f"{choice['threshold']:.3g}",
            *(f"{tested[name]:.3f}" for name in ("udcg_strict", "recall_loss", "harm")),
        )
    output.out.print(made)

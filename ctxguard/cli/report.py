"""``ctxguard report``: a calibration and its evidence as one HTML file, and as JSON."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ctxguard._extras import require
from ctxguard.cli._console import FINDING, Output, check_writable
from ctxguard.cli._inputs import (
    DEFAULT_BASELINE,
    baseline_k,
    cache_folder,
    open_index,
    read_labelled,
    shared_questions,
)
from ctxguard.cli.calibrate import PolicyChoice


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("report")(report)


def report(
    *,
    index: Annotated[Path, typer.Option(help="Folder that `ctxguard index` wrote.")],
    data: Annotated[Path, typer.Option(help="BEIR folder, or JSONL of labelled queries.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")],
    json_out: Annotated[
        Path | None, typer.Option(help="Write the same figures as JSON here.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="A name in the folder's qrels/. (default: train)")
    ] = None,
    policy: Annotated[
        PolicyChoice, typer.Option(help="Family; auto takes what the labels support.")
    ] = PolicyChoice.AUTO,
    alpha: Annotated[
        float | None, typer.Option(help="Promise at most this mean recall loss. (default: none)")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Promise at most this mean harm as well.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Probability that the certificate is false.")] = 0.1,
    baseline: Annotated[
        str, typer.Option(help="What recall loss is relative to: pool, or k=N.")
    ] = DEFAULT_BASELINE,
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
) -> None:
    """Calibrate as `ctxguard calibrate` would, and write the evidence for a person to check.

    The page needs no network and no other file. Where a promise cannot be certified the report
    is written all the same, says so, and the command ends with a finding.
    """
    check_writable(out, "--out")
    if json_out is not None:
        check_writable(json_out, "--json-out")
    for option, value in (("--segment-by", segment_by), ("--beta", beta)):
        if value is not None and alpha is None:
            raise typer.BadParameter("it goes with a promise: give --alpha", param_hint=option)
    require("plotly", "report")
    output = Output()
    labelled = read_labelled(data, split, "train")
    with output.doing("opening the index"):
        from calibration.calibrate import calibrate
        from calibration.certify import Settings
        from calibration.report import report as gather
        from calibration.report import write_html, write_json
        from calibration.select import Promise

        promise = None if alpha is None else Promise(alpha, beta, delta)
        settings = Settings(
            policy=policy.value,
            promise=promise,
            delta=delta,
            baseline_k=baseline_k(baseline),
            allow_uncertified=True,
            segment_by=segment_by,
            held_out=held_out,
            depth=depth,
            min_keep=min_keep,
            seed=seed,
        )
        retriever = open_index(index, reranker)
    labelled.counts(retriever)
    with output.passes() as begin:
        found = calibrate(
            retriever,
            labelled.dataset,
            settings,
            passes=begin,
            cache=cache_folder() / "pools" if cache is None else cache,
        )
    with output.doing("gathering the evidence"):
        gathered = gather(found, retriever.passage, promise=promise)
        write_html(gathered, out)
        if json_out is not None:
            write_json(gathered, json_out)
    wrote = f"{out}" if json_out is None else f"{out} and {json_out}"
    output.facts([("wrote", f"{wrote} (profile {found.profile.profile_id})")])
    for note in dict.fromkeys((*labelled.notes, *shared_questions(labelled))):
        output.note(note)
    uncertified = [route.route.value for route in gathered.routes if route.certificate is None]
    if uncertified:
        output.err.print(
            Text(f"finding: no certificate for route {', '.join(uncertified)}; the report says why")
        )
        raise typer.Exit(FINDING)

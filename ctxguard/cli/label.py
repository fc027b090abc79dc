"""``ctxguard label``: export samples for people to label, import labels and user feedback."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli import _options
from ctxguard.cli._console import Output, check_writable, print_json
from ctxguard.cli._store import StoreUrl, named_series, open_store

if TYPE_CHECKING:
    from ctxguard.monitor.judges import Judgment
    from ctxguard.monitor.labels.files import RowToLabel
    from ctxguard.monitor.store import SampleStore

_label = typer.Typer(
    name="label",
    help="Export samples for people to label; import their labels, and users' feedback.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.add_typer(_label)


@_label.command("export")
def export(
    *,
    store: StoreUrl,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, .jsonl or .csv.")],
    n: Annotated[
        int, typer.Option("--n", "-n", metavar="N", min=1, help="How many requests to export.")
    ] = 50,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Judge that the labels correct, as the store names it.",
            show_default="the only one",
        ),
    ] = None,
    alarm: Annotated[
        bool,
        typer.Option(
            "--alarm",
            help="Export the samples that an alarm requested labels of, not a random pick.",
        ),
    ] = False,
    weighted: Annotated[
        bool,
        typer.Option(
            "--weighted",
            help="Pick requests twice as often where the judge calls the first passage wrong. It "
            "narrows the interval of an MRR above 0.75. Use one way of picking per store.",
        ),
    ] = False,
    as_json: _options.AsJson = False,
) -> None:
    """Write a file of passages for people to grade, of judged requests picked at random.

    Each row is one passage, with an empty grade to fill in. Requests whose
    labels are incomplete come first: whether the whole pool has to be graded
    is known only once the served passages are.
    """
    from ctxguard.monitor.labels.files import rows_to_label, write_label_file
    from ctxguard.monitor.labels.human import human_verdicts
    from ctxguard.monitor.sampling.record import SampleRecord
    from ctxguard.monitor.store import PICK_REASONS, RANDOM, WEIGHTED

    output = Output(as_json=as_json)
    check_writable(out, "--out")
    rows = []
    with open_store(store) as opened:
        labelled = human_verdicts(opened.labels())
        verdicts = {sample_id: found.by_passage for sample_id, found in labelled.items()}
        # Samples that an alarm requested are no random pick, and must not become part of one.
        reasons = opened.label_reasons().items()
        targeted = {sample_id for sample_id, reason in reasons if reason not in PICK_REASONS}
        picked = [one for one in _incomplete(opened, verdicts) if (one in targeted) is alarm]
        if alarm:
            picked += [sample_id for sample_id, _ in opened.label_queue() if sample_id in targeted]
        else:
            series = named_series(opened, judge)
            fresh = _weighted(opened, series, n) if weighted else opened.pick_for_labels(series, n)
            picked = list(dict.fromkeys(picked + fresh))
        picked = picked[:n]
        for sample_id, payload in opened.payloads(picked).items():
            rows += rows_to_label(SampleRecord.from_bytes(payload), verdicts.get(sample_id, {}))
        write_label_file(out, rows)
        if not alarm:
            opened.queue_labels(picked, reason=WEIGHTED if weighted else RANDOM)
    n_requests = len({row.request_id for row in rows})
    notes = _export_notes(rows, alarm=alarm)
    if as_json:
        print_json(
            {
                "out": str(out),
                "requests": n_requests,
                "passages": len(rows),
                "notes": notes,
            }
        )
    else:
        output.out.print(f"{out}: {n_requests:,} requests, {len(rows):,} passages to grade")
    for note in notes:
        output.note(note)


def _export_notes(rows: "Sequence[RowToLabel]", *, alarm: bool) -> list[str]:
    if not rows:
        none = "no alarm has requested labels"
        return [none if alarm else "every judged request has its labels already"]
    notes = ["import the graded file with `ctxguard label import`"]
    bare = sum(not row.text and not row.title for row in rows)
    if bare:
        notes.append(f"{bare:,} passages have no text in the store; look them up by their ids")
    return notes


def _weighted(store: "SampleStore", series: str, n: int) -> list[int]:
    """Pick by lowest label order divided by weight, so that heavier samples come more often."""
    import numpy as np

    from ctxguard.monitor.estimation.ppi import label_weights
    from ctxguard.monitor.estimation.terms import table_of

    in_order = store.pick_for_labels(series, 2 * n)
    weights: dict[int, float] = {}
    for page in store.judged_pages(series):
        picked = np.isin(page.sample_ids, in_order)
        of_page = label_weights(table_of(page.summaries)[picked])
        weights |= zip(page.sample_ids[picked].tolist(), of_page.tolist(), strict=True)
    turns = {one: (rank + 1) / weights[one] for rank, one in enumerate(in_order)}
    return sorted(in_order, key=turns.__getitem__)[:n]


def _incomplete(
    store: "SampleStore", verdicts: "Mapping[int, Mapping[str, Judgment]]"
) -> list[int]:
    """Samples with labels that still lack others."""
    from ctxguard.monitor.labels.human import positions_to_label
    from ctxguard.monitor.sampling.record import SampleRecord
    from ctxguard.monitor.store import LabelDepth

    return [
        sample_id
        for sample_id, payload in store.payloads(list(verdicts)).items()
        if positions_to_label(
            SampleRecord.from_bytes(payload), verdicts[sample_id], LabelDepth.POOL, ()
        )
    ]


@_label.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File written by `ctxguard label export`, with grades filled in."
        ),
    ],
    *,
    store: StoreUrl,
    annotator: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Name of the person who graded; labels are kept by name."
        ),
    ],
    max_grade: Annotated[
        int, typer.Option(metavar="N", min=1, help="Highest grade of the scale.")
    ] = 3,
    as_json: _options.AsJson = False,
) -> None:
    """Import the labels of one annotator.

    All labels are kept. Of several labels of a passage by one annotator the
    last counts, and of several annotators' the lower median.
    """
    from ctxguard.monitor.labels.files import read_label_file

    output = Output(as_json=as_json)
    read = read_label_file(file, annotator, time.time(), max_grade)
    with open_store(store) as opened:
        added = opened.add_labels(read.rows)
        of_blank = set(opened.unknown_requests(read.blank))
    unknown = list(dict.fromkeys([*added.unknown, *filter(of_blank.__contains__, read.blank)]))
    blank = sum(request_id not in of_blank for request_id in read.blank)
    counts = (
        (added.duplicates, "were in the store already"),
        (added.disagreeing, "contradict another label; all are kept"),
        (blank, "rows have no grade yet"),
        (len(unknown), "requests are not in the store; their labels were left out"),
    )
    notes = [f"{count:,} {words}" for count, words in counts if count]
    notes += [f"first unknown request: {request_id}" for request_id in unknown[:1]]
    if as_json:
        print_json(
            {
                "added": added.added,
                "duplicates": added.duplicates,
                "disagreeing": added.disagreeing,
                "unknown": unknown,
                "blank": blank,
                "notes": notes,
            }
        )
    else:
        output.out.print(f"{added.added:,} labels imported from {annotator}")
    for note in notes:
        output.note(note)


@_label.command("feedback")
def feedback(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSONL file: request_id, kind (thumb_up, thumb_down, cited), passage_ids, time.",
        ),
    ],
    *,
    store: StoreUrl,
    as_json: _options.AsJson = False,
) -> None:
    """Import users' reactions. They are counted by kind, and enter no estimate.

    Users see only what was served, so their reactions say nothing about recall.
    """
    from ctxguard.monitor.labels.files import read_feedback_file

    output = Output(as_json=as_json)
    reactions = read_feedback_file(file, time.time())
    with open_store(store) as opened:
        added = opened.add_feedback(reactions)
    notes = [
        f"{len(added.unknown):,} requests are not in the store (not sampled, or expired); "
        f"first: {first}"
        for first in added.unknown[:1]
    ]
    if as_json:
        print_json({"added": added.added, "unknown": list(added.unknown), "notes": notes})
    else:
        output.out.print(f"{added.added:,} reactions imported")
    for note in notes:
        output.note(note)

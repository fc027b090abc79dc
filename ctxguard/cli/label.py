"""``ctxguard label``: hand samples to people, and take their labels and users' feedback in."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli._console import Output, check_writable, print_json
from ctxguard.cli._store import StoreUrl, named_series, open_store
from ctxguard.errors import DataError

if TYPE_CHECKING:
    from ctxguard.monitor.store import FeedbackRow, LabelRow, SampleStore

_label = typer.Typer(
    name="label",
    help="Hand samples to people, and take their labels and users' feedback in.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.add_typer(_label)


@_label.command("export")
def export(
    *,
    store: StoreUrl,
    out: Annotated[Path, typer.Option(help="File to write: .jsonl, or .csv.")],
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Requests to label.")] = 50,
    judge: Annotated[
        str | None, typer.Option(help="The series of judgments that labels correct.")
    ] = None,
    alarm: Annotated[
        bool,
        typer.Option("--alarm", help="Those that tell most of an alarm, not a random pick."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write what people should grade, drawn at random from what was judged.

    Each row is one passage; its grade is to be filled in. Requests whose labels are incomplete
    come first: whether a whole pool is needed shows only once what was served is graded.
    """
    from ctxguard.monitor.label_files import to_label, write_label_file
    from ctxguard.monitor.records import Record
    from ctxguard.monitor.store import RANDOM

    output = Output(as_json=as_json)
    check_writable(out, "--out")
    opened = open_store(store)
    said: dict[int, list[LabelRow]] = {}
    for sample_id, label in opened.labels():
        said.setdefault(sample_id, []).append(label)
    if alarm:
        picked = [sample_id for sample_id, why in opened.label_queue() if why != RANDOM][:n]
    else:
        picked = _unfinished(opened, said) + opened.pick_for_labels(named_series(opened, judge), n)
        picked = list(dict.fromkeys(picked))[:n]
    rows = []
    for sample_id, payload in opened.payloads(picked).items():
        rows += to_label(Record.from_bytes(payload), said.get(sample_id, []))
    write_label_file(out, rows)
    if not alarm:
        opened.queue_labels(picked, why=RANDOM)
    found = {"requests": len({row.request_id for row in rows}), "passages": len(rows)}
    if as_json:
        print_json({**found, "out": str(out)})
    else:
        output.out.print(
            f"{out}: {found['requests']:,} requests, {found['passages']:,} passages to grade. "
            "Bring them back with `ctxguard label import`."
        )


def _unfinished(store: "SampleStore", said: "dict[int, list[LabelRow]]") -> list[int]:
    """Samples that people have begun and not yet graded as far as it takes."""
    from ctxguard.monitor.labels import resolve, wanted
    from ctxguard.monitor.records import Record

    return [
        sample_id
        for sample_id, payload in store.payloads(list(said)).items()
        if wanted(Record.from_bytes(payload), resolve(said[sample_id]).verdicts)
    ]


@_label.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `ctxguard label export` wrote, graded.")],
    *,
    store: StoreUrl,
    annotator: Annotated[str, typer.Option(help="Who graded; another name is another voice.")],
    max_grade: Annotated[int, typer.Option(min=1, help="The highest grade.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take in labels of one annotator. All labels are kept.

    Of one annotator the last word on a passage counts; of several, the lower median.
    """
    from ctxguard.monitor.label_files import read_label_file

    output = Output(as_json=as_json)
    read = read_label_file(file, annotator, time.time(), max_grade)
    added = open_store(store).add_labels(read.rows)
    if as_json:
        print_json(
            {
                "added": added.added,
                "duplicates": added.duplicates,
                "disagreeing": added.disagreeing,
                "unknown": list(added.unknown),
                "blank": read.blank,
            }
        )
        return
    output.out.print(f"{added.added:,} labels taken in from {annotator}")
    for count, words in (
        (added.duplicates, "were there already"),
        (added.disagreeing, "contradict another label; all are kept"),
        (read.blank, "rows have no grade yet"),
        (len(added.unknown), "requests are not in the store; their labels were left out"),
    ):
        if count:
            output.note(f"{count:,} {words}")
    if added.unknown:
        output.note(f"first unknown request: {added.unknown[0]}")


@_label.command("feedback")
def feedback(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL: request_id, kind (thumb_up, thumb_down, cited), passage_ids, time."
        ),
    ],
    *,
    store: StoreUrl,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Take in what users showed. It is counted by kind, and never mixed with judgments.

    Users see only what was served, so their reactions say nothing of recall.
    """
    output = Output(as_json=as_json)
    rows = _feedback_rows(file)
    added = open_store(store).add_feedback(rows)
    if as_json:
        print_json({"added": added.added, "unknown": list(added.unknown)})
        return
    output.out.print(f"{added.added:,} reactions taken in")
    if added.unknown:
        output.note(
            f"{len(added.unknown):,} requests are not in the store (not sampled, or expired); "
            f"first: {added.unknown[0]}"
        )


def _feedback_rows(file: Path) -> "list[FeedbackRow]":
    from ctxguard.monitor.store import FeedbackRow

    rows = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 ({error.reason})", path=file) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            rows.append(
                FeedbackRow(
                    str(document["request_id"]),
                    str(document["kind"]),
                    tuple([str(name) for name in document.get("passage_ids") or ()]),
                    float(document.get("time") or time.time()),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"no reaction: {error}", path=file, line=number) from error
    return rows

"""``ctxguard label``: hand samples to people, and take their labels and users' feedback in."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli._console import Output, check_writable, print_json
from ctxguard.cli._store import StoreUrl, named_series, open_store

if TYPE_CHECKING:
    from ctxguard.monitor.store import LabelRow, SampleStore

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
    weighed: Annotated[
        bool,
        typer.Option(
            "--weighed",
            help="Pick twice as often where the judge calls the first passage wrong: narrows MRR "
            "where it is above 0.75. Keep to one way of picking in a store.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write what people should grade, drawn at random from what was judged.

    Each row is one passage; its grade is to be filled in. Requests that
    still lack labels come first: whether a whole pool is needed shows only
    once what was served is graded.
    """
    from ctxguard.monitor.label_files import to_label, write_label_file
    from ctxguard.monitor.labels import HUMAN
    from ctxguard.monitor.records import Record
    from ctxguard.monitor.store import PICKED, RANDOM, WEIGHED

    output = Output(as_json=as_json)
    check_writable(out, "--out")
    rows = []
    with open_store(store) as opened:
        said: dict[int, list[LabelRow]] = {}
        for sample_id, label in opened.labels():
            if label.source == HUMAN:
                said.setdefault(sample_id, []).append(label)
        # What an alarm asked for is no random pick, and must not become one half-way.
        sought = {one for one, why in opened.label_reasons().items() if why not in PICKED}
        picked = [one for one in _unfinished(opened, said) if (one in sought) is alarm]
        if alarm:
            picked += [sample_id for sample_id, why in opened.label_queue() if why not in PICKED]
        else:
            series = named_series(opened, judge)
            fresh = _weighed(opened, series, n) if weighed else opened.pick_for_labels(series, n)
            picked = list(dict.fromkeys(picked + fresh))
        picked = picked[:n]
        for sample_id, payload in opened.payloads(picked).items():
            rows += to_label(Record.from_bytes(payload), said.get(sample_id, []))
        write_label_file(out, rows)
        if not alarm:
            opened.queue_labels(picked, why=WEIGHED if weighed else RANDOM)
    found = {"requests": len({row.request_id for row in rows}), "passages": len(rows)}
    if as_json:
        print_json({**found, "out": str(out)})
    else:
        output.out.print(
            f"{out}: {found['requests']:,} requests, {found['passages']:,} passages to grade"
        )
    if rows:
        output.note("bring them back with `ctxguard label import`")
    else:
        output.note(
            "no alarm asks for labels" if alarm else "all that was judged has its labels already"
        )
    bare = sum(not row.text and not row.title for row in rows)
    if bare:
        output.note(f"{bare:,} passages have no text in the store; look them up by their ids")


def _weighed(store: "SampleStore", series: str, n: int) -> list[int]:
    """Samples of lowest label order over weight, so that each is picked by its weight."""
    from ctxguard.monitor.ppi import label_weight
    from ctxguard.monitor.table import request_of, table_of

    in_order = store.pick_for_labels(series, 2 * n)
    rows = store.judged(series, with_grades=True)
    table, grades = table_of(rows.summaries), rows.grades or []
    place = {int(sample_id): row for row, sample_id in enumerate(rows.sample_ids)}

    def turn(rank: int) -> float:
        row = place[in_order[rank]]
        return (rank + 1) / label_weight(request_of(table[row], grades[row]))

    return [in_order[rank] for rank in sorted(range(len(in_order)), key=turn)[:n]]


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
    with open_store(store) as opened:
        added = opened.add_labels(read.rows)
        of_blank = set(opened.unknown_requests(read.blank))
    unknown = list(dict.fromkeys([*added.unknown, *filter(of_blank.__contains__, read.blank)]))
    blank = sum(request_id not in of_blank for request_id in read.blank)
    if as_json:
        print_json(
            {
                "added": added.added,
                "duplicates": added.duplicates,
                "disagreeing": added.disagreeing,
                "unknown": unknown,
                "blank": blank,
            }
        )
        return
    output.out.print(f"{added.added:,} labels taken in from {annotator}")
    for count, words in (
        (added.duplicates, "were there already"),
        (added.disagreeing, "contradict another label; all are kept"),
        (blank, "rows have no grade yet"),
        (len(unknown), "requests are not in the store; their labels were left out"),
    ):
        if count:
            output.note(f"{count:,} {words}")
    if unknown:
        output.note(f"first unknown request: {unknown[0]}")


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
    from ctxguard.monitor.label_files import read_feedback_file

    output = Output(as_json=as_json)
    reactions = read_feedback_file(file, time.time())
    with open_store(store) as opened:
        added = opened.add_feedback(reactions)
    if as_json:
        print_json({"added": added.added, "unknown": list(added.unknown)})
        return
    output.out.print(f"{added.added:,} reactions taken in")
    if added.unknown:
        output.note(
            f"{len(added.unknown):,} requests are not in the store (not sampled, or expired); "
            f"first: {added.unknown[0]}"
        )

"""``ctxguard label``: export samples for people to label, import labels and user feedback."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard.cli import _options
from ctxguard.cli._console import NO_DATA, Output, check_writable
from ctxguard.cli._store import IN_WORDS, named_series, open_store
from ctxguard.cli._tables import TextTable

if TYPE_CHECKING:
    from ctxguard.monitor.estimation.plan import LabelPlan
    from ctxguard.monitor.labels.files import RowToLabel

MaxGrade = Annotated[int, setting("Highest grade of the scale, one for a store.", "N", ge=1)]


class Export(SettingsModel):
    """Settings of ``ctxguard label export``."""

    store: _options.StoreUrl
    out: Path | None = optional(
        "File to write, .jsonl or .csv.",
        "FILE",
        default="none: only say what the labels would give and cost",
    )
    n: int = setting(
        "About how many passages people are to grade.", "N", "--n", "-n", ge=1, value=400
    )
    judge: _options.NamedJudge = None
    whole: bool = setting(
        "Have all that is judged of new requests graded: certificates need it, and alarms of a "
        "judge that errs. The same grades then tell less of the live figures.",
        value=False,
    )
    alarm: bool = setting(
        "Export the samples that an alarm requested labels of, to look into it. Their labels "
        "enter no estimate.",
        value=False,
    )
    tenant: str | None = optional(
        "Write only requests whose filter allows this one value of the field `tenant`, or of "
        "FIELD. The others that were picked wait for an export of their own.",
        "[FIELD=]VALUE",
    )
    max_grade: MaxGrade = 3
    as_json: _options.AsJson = False


class Import(SettingsModel):
    """Settings of ``ctxguard label import``."""

    file: Path = setting(
        "File written by `ctxguard label export`, with grades filled in.", "FILE", argument=True
    )
    store: _options.StoreUrl
    annotator: str = setting("Name of the person who graded; labels are kept by name.", "NAME")
    max_grade: MaxGrade = 3
    as_json: _options.AsJson = False


class Feedback(SettingsModel):
    """Settings of ``ctxguard label feedback``."""

    file: Path = setting(
        "JSONL file: request_id, kind (thumb_up, thumb_down, cited), passage_ids, time.",
        "FILE",
        argument=True,
    )
    store: _options.StoreUrl
    as_json: _options.AsJson = False


def export(settings: Export) -> None:
    """Write a file of passages for people to grade, of judged requests picked at random.

    Each row is one passage, with an empty grade to fill in. A page beside
    the file tells people how to grade.

    Some requests are graded from the top down, of others single passages
    are asked about: those that tell most of the live figures.

    In a store that no judge has seen, people grade alone: a judge gets none
    of these requests any more.

    Requests that were exported before and still lack grades come first.
    Exports of several days are one sample: each passage keeps the
    probability with which it was picked.
    """
    from ctxguard.monitor.estimation.plan import label_plan, to_label
    from ctxguard.monitor.labels.files import write_label_file
    from ctxguard.monitor.labels.guide import grading_guide
    from ctxguard.monitor.labels.samples import targeted_samples, unfinished
    from ctxguard.monitor.service import let_people_grade

    out, alarm, n, tenant = settings.out, settings.alarm, settings.n, settings.tenant
    output = Output(as_json=settings.as_json)
    check_writable(out, "--out")
    with open_store(settings.store) as opened:
        if out is not None and not opened.series():
            let_people_grade(opened)
        series = named_series(opened, settings.judge)
        if alarm:
            samples = unfinished(targeted_samples(opened, series), n, tenant=tenant)
        else:
            samples = to_label(
                *(opened, series, n), tenant=tenant, whole=settings.whole, dry_run=out is None
            )
        plan = label_plan(opened, series, samples, time.time())
        top_grade = opened.top_grade() or settings.max_grade
    rows = [row for sample in samples for row in sample.rows()]
    guide = None
    if out is not None:
        write_label_file(out, rows)
        guide = out.with_name(f"{out.stem}-guide.md")
        with atomic_write(guide) as stream:
            stream.write(grading_guide(out.name, top_grade).encode())
    notes = _export_notes(rows, alarm=alarm, guide=guide, tenant=tenant)
    if len({(sample.record.where, sample.record.where_withheld) for sample in samples}) > 1:
        notes.append(
            "these requests have different filters: whoever grades them sees what any of them may "
            "see; --tenant writes those of one"
        )
    document = {
        "out": out,
        "guide": guide,
        "requests": len(samples),
        "passages": len(rows),
        "expected_passages": plan.expected_passages,
        "widths": {
            metric: {"now": plan.widths_now[metric], "then": width}
            for metric, width in plan.widths.items()
        },
    }

    def show() -> None:
        _print_plan(plan, output, alarm=alarm)
        name = "" if out is None else f"{out}: "
        output.out.print(
            f"{name}{len(samples):,} requests, about {plan.expected_passages:,} passages to grade, "
            f"at most {len(rows):,}"
        )

    output.result(document, show, notes)


def _print_plan(plan: "LabelPlan", output: Output, *, alarm: bool) -> None:
    if alarm or not plan.widths:
        return
    rows = TextTable(
        "metric", "now>", "then>", title="Width of the 95% intervals, now and with these grades"
    )
    for metric, width in plan.widths.items():
        now = plan.widths_now[metric]
        name = IN_WORDS[metric.value].strip().removeprefix("its ")
        rows.add_row(name, _width(now, NO_DATA), _width(width, "needs more"))
    output.out.print(rows)


def _width(width: float | None, none: str) -> str:
    return none if width is None else f"{width:.2f}"


def _export_notes(
    rows: "Sequence[RowToLabel]", *, alarm: bool, guide: Path | None, tenant: str | None
) -> list[str]:
    if not rows and tenant is not None:
        return [f"of the requests that were picked, none of {tenant} lacks labels"]
    if not rows:
        none = "no alarm has requested labels, or they have them by now"
        return [none if alarm else "every judged request has its labels already"]
    notes = []
    if guide is not None:
        notes.append(
            f"{guide} tells people how to grade; import the graded file with "
            "`ctxguard label import`"
        )
    bare = sum(not row.text and not row.title for row in rows)
    if bare:
        notes.append(f"{bare:,} passages have no text in the store; look them up by their ids")
    return notes


def import_(settings: Import) -> None:
    """Import the labels of one annotator.

    All labels are kept. Of several labels of a passage by one annotator the
    last counts, and of several annotators' the lower median.

    It says how many of the file's grades count.
    """
    from ctxguard.monitor.estimation.plan import usable_labels
    from ctxguard.monitor.labels.files import read_label_file

    output, annotator = Output(as_json=settings.as_json), settings.annotator
    rows, ungraded = read_label_file(settings.file, annotator, time.time(), settings.max_grade)
    with open_store(settings.store) as opened:
        added = opened.add_labels(rows, settings.max_grade)
        requests = list(dict.fromkeys([row.request_id for row in rows] + ungraded))
        unknown = opened.unknown_requests(requests)
        blank = sum(request_id not in unknown for request_id in ungraded)
        usable = usable_labels(opened, requests)
    counts = (
        (added.duplicates, "were in the store already"),
        (added.disagreeing, "contradict another label; all are kept"),
        (len(unknown), "requests are not in the store; their labels were left out"),
    )
    notes = [f"{count:,} {words}" for count, words in counts if count]
    notes += [f"first unknown request: {request_id}" for request_id in unknown[:1]]
    notes += _usable_notes(usable)
    document = {
        "added": added.added,
        "duplicates": added.duplicates,
        "disagreeing": added.disagreeing,
        "unknown": unknown,
        "blank": blank,
        "usable": usable,
    }
    words = f"{added.added:,} labels imported from {annotator}"
    output.result(document, lambda: output.out.print(words), notes)


def _usable_notes(usable: dict[str, int]) -> list[str]:
    found = (
        f"{usable['passages']:,} grades of this file's requests count, {usable['runs']:,} of the "
        f"requests are graded from the top down; {usable['unfinished']:,} need more grades"
    )
    notes = [found]
    if usable["unpicked"]:
        notes.append(
            f"{usable['unpicked']:,} of them were not picked at random: they enter no estimate"
        )
    return notes


def feedback(settings: Feedback) -> None:
    """Import users' reactions. They are counted by kind, and enter no estimate.

    Users see only what was served, so their reactions say nothing about recall.
    """
    from ctxguard.monitor.labels.files import read_feedback_file

    output = Output(as_json=settings.as_json)
    reactions = read_feedback_file(settings.file, time.time())
    with open_store(settings.store) as opened:
        added = opened.add_feedback(reactions)
    notes = [
        f"{len(added.unknown):,} requests are not in the store (not sampled, or expired); "
        f"first: {first}"
        for first in added.unknown[:1]
    ]
    document = {"added": added.added, "unknown": added.unknown}
    words = f"{added.added:,} reactions imported"
    output.result(document, lambda: output.out.print(words), notes)

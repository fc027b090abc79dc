"""``ctxguard label``: export samples for people to label, import their labels."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ctxguard._support.atomic_write import atomic_write
from ctxguard._support.settings import SettingsModel, optional, setting
from ctxguard._support.words import count
from ctxguard.cli import _options
from ctxguard.cli._console import Output, picked
from ctxguard.cli._store import named_series, open_store
from ctxguard.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxguard.monitor.labels.files import RowToLabel

MaxGrade = Annotated[int, setting("Highest grade of the scale, one for a store.", "N", ge=1)]


class ExportCommand(SettingsModel):
    store: _options.StoreUrl
    out: Path | None = optional(
        "File to write, .jsonl or .csv.",
        "FILE",
        default="none: only say what the labels would cost",
        writes=True,
    )
    n: int = setting(
        "About how many passages of requests are to be graded, of all tenants together.",
        "N",
        "--n",
        "-n",
        ge=1,
        value=400,
    )
    judge: _options.NamedJudge = None
    whole: bool = setting(
        "Have all that is judged of new requests graded: certificates need it, and alarms of a "
        "judge that errs. The same grades then tell less of the live figures.",
        value=False,
    )
    tenant: str | None = optional(
        "Write only requests whose filter allows this one value of the field `tenant`, or of "
        "FIELD. The others that were picked wait for an export of their own.",
        "[FIELD=]VALUE",
    )
    max_grade: MaxGrade = 3

    def __call__(self, output: Output) -> None:
        """Each row is one passage, with an empty grade to fill in. A page beside
        the file tells people how to grade.

        A request is graded down to its first relevant passage, and a random part
        of what is below, so that all live figures rest on the same grades.

        In a store that no judge has seen, people grade alone: a judge gets none
        of these requests any more.

        Requests that were exported before and still lack grades come first.
        Exports of several days are one sample: each passage keeps the
        probability with which it was picked.
        """
        from ctxguard.monitor.estimation.sampling_design import to_label
        from ctxguard.monitor.labels.files import write_label_file
        from ctxguard.monitor.labels.guide import grading_guide
        from ctxguard.monitor.labels.samples import distinct_rows
        from ctxguard.monitor.service import let_people_grade

        out, tenant = self.out, self.tenant
        with open_store(self.store) as opened:
            if out is not None and not opened.series():
                let_people_grade(opened)
            series = named_series(opened, self.judge)
            samples = to_label(
                *(opened, series, self.n), tenant=tenant, whole=self.whole, dry_run=out is None
            )
            top_grade = opened.top_grade() or self.max_grade
        rows = distinct_rows(samples)
        expected = min(round(sum(sample.expected_passages for sample in samples)), len(rows))
        guide = None
        if out is not None:
            write_label_file(out, rows)
            guide = out.with_name(f"{out.stem}-guide.md")
            with atomic_write(guide) as stream:
                stream.write(grading_guide(out.name, top_grade).encode())
        notes = self._notes(rows, guide)
        if len({(sample.record.where, sample.record.where_withheld) for sample in samples}) > 1:
            notes.append(
                "these requests have different filters: whoever grades them sees what any of them "
                "may see; --tenant writes those of one"
            )
        document = {
            "out": out,
            "guide": guide,
            "requests": len(samples),
            "passages": len(rows),
            "expected_passages": expected,
        }

        def show() -> None:
            name = "" if out is None else f"{out}: "
            output.out.print(
                f"{name}{len(samples):,} requests, about {expected:,} passages to grade, "
                f"at most {len(rows):,}"
            )

        output.result(document, show, notes)

    def _notes(self, rows: "Sequence[RowToLabel]", guide: Path | None) -> list[str]:
        if not rows and self.tenant is not None:
            return [f"of the requests that were picked, none of {self.tenant} lacks labels"]
        if not rows:
            return ["every judged request has its labels already"]
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


class ImportCommand(SettingsModel):
    file: Path = setting(
        "File written by `ctxguard label export`, with grades filled in.", "FILE", argument=True
    )
    store: _options.StoreUrl
    annotator: str = setting("Name of the person who graded; labels are kept by name.", "NAME")
    max_grade: MaxGrade = 3

    def __call__(self, output: Output) -> None:
        """All labels are kept. Of several labels of a passage by one annotator the
        last counts, and of several annotators' the lower median.

        The output says how many of the file's grades count. A file with an id that
        was changed, as spreadsheets make dates of ids, is refused: each is named,
        and none of its labels counts.
        """
        from ctxguard.monitor.estimation.sampling_design import usable_labels
        from ctxguard.monitor.labels.files import read_label_file
        from ctxguard.monitor.labels.samples import repeats
        from ctxguard.monitor.labels.unknown_ids import unknown_ids

        rows, ungraded = read_label_file(self.file, self.annotator, time.time(), self.max_grade)
        with open_store(self.store) as opened:
            unknown = unknown_ids(opened, rows)
            # A request may be too old to be in the store still.
            if any(one.request_id is not None or one.meant is not None for one in unknown):
                raise DataError(
                    f"holds {count(len(unknown), 'id')} that the store does not know, and none of "
                    "its labels was imported; write the ids as they were exported: "
                    + "; ".join(one.in_words for one in unknown),
                    path=self.file,
                )
            added = opened.add_labels(rows, self.max_grade)
            repeated = opened.add_labels(repeats(opened, rows), self.max_grade)
            requests = list(dict.fromkeys([row.request_id for row in rows] + ungraded))
            usable = usable_labels(opened, requests)
        counts = (
            (repeated.added, "more requests ask the same of the same passage: graded as well"),
            (added.duplicates, "were in the store already"),
            (len(added.unknown), "requests are not in the store; their labels were left out"),
        )
        notes = [f"{n:,} {words}" for n, words in counts if n]
        notes += [f"unknown: {', '.join(added.unknown)}"] if added.unknown else []
        notes.append(
            f"{usable['passages']:,} grades of this file's requests count, {usable['requests']:,} "
            f"of the requests are complete; {usable['unfinished']:,} need more grades"
        )
        if usable["unpicked"]:
            notes.append(
                f"{usable['unpicked']:,} of them were not picked at random: they enter no estimate"
            )
        document = {
            **picked(added, "added", "duplicates", "unknown"),
            "repeated": repeated.added,
            "blank": len(ungraded),
            "usable": usable,
        }
        words = f"{added.added:,} labels imported from {self.annotator}"
        output.result(document, lambda: output.out.print(words), notes)

"""``ctxguard golden``: labels with provenance, frozen by digest, and how much they cover."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import Field

from ctxguard._support.settings import SettingsModel, key, optional, setting
from ctxguard.cli import _options
from ctxguard.cli._console import FINDING, Output, check_writable, interval, number, print_json
from ctxguard.cli._inputs import fitted, is_split, label_notes, read_labelled
from ctxguard.cli._pools import fusion_of, on_route, replayed, served_depth, served_route
from ctxguard.cli._system import open_index
from ctxguard.cli._tables import TextTable
from ctxguard.server.settings import IndexSystem

if TYPE_CHECKING:
    from calibration.data.coverage import CoverageAt, Unjudged
    from calibration.data.dataset import Dataset
    from calibration.data.frozen_sets import Snapshot
    from calibration.data.golden import GoldenSet
    from ctxguard.retrieval.hybrid.retriever import HybridRetriever

_SHOWN_DISPUTES = 10
_SEED = 0


class Freeze(SettingsModel):
    """Settings of ``ctxguard golden freeze``."""

    sources: list[Path] = setting(
        "JSONL or CSV files of labels and questions, frozen sets, BEIR folders.",
        "SRC...",
        argument=True,
    )
    out: Path = setting("New folder for the frozen set.", "FOLDER")
    source: Literal["human", "authored", "traffic", "llm"] | None = optional(
        "Source of labels that do not name one: human, authored, traffic or llm.", "SOURCE"
    )
    split: str | None = optional(
        "Split to read from BEIR folders and to write.",
        "NAME",
        default="train, or the only one of a folder",
    )
    as_json: _options.AsJson = False


class Check(SettingsModel):
    """Settings of ``ctxguard golden check``."""

    folder: Path = setting("A frozen set.", "DIR", argument=True)
    as_json: _options.AsJson = False


class Coverage(IndexSystem):
    """Settings of ``ctxguard golden coverage``."""

    data: _options.LabelledQueries
    ks: list[Annotated[int, Field(ge=1)]] = key(
        "Cut-offs, as a list.", "LIST", "--k", default="1, 3, 5, 10 and 20", factory=list
    )
    profile: _options.ProfileFile = None
    route: _options.OneRoute = None
    out: Path | None = optional(
        "JSONL file for the unlabelled passages that matter most, to label.", "FILE"
    )
    as_json: _options.AsJson = False
    depth: _options.Depth = None
    limit: int = key("Most passages written to --out.", "N", ge=1, value=200)


def freeze(settings: Freeze) -> None:
    """Merge the labels of all sources into one per passage, and freeze them under a digest.

    Every label is kept with its provenance, those that disagree too.
    """
    from calibration.data.frozen_sets import freeze as write
    from calibration.data.golden_sources import DEFAULT_SPLIT, read_sources

    output, out = Output(as_json=settings.as_json), settings.out
    golden = read_sources(settings.sources, source=settings.source, split=settings.split)
    snapshot = write(golden, out, settings.split or DEFAULT_SPLIT)
    if settings.as_json:
        document = snapshot.model_dump(mode="json")
        print_json({"golden": str(out), **document, "disputed": _disputes(golden)})
        return
    output.facts([("golden set", str(out)), *_facts(snapshot)])
    _print_disputes(golden, output)
    output.notes(snapshot.notes)


def check(settings: Check) -> None:
    """Show what a frozen set holds, and verify that it is unchanged; exit code 1 if it is not.

    Says where the labels come from, which ones disagree, and how they become one.
    """
    from calibration.data.frozen_sets import changes, read_snapshot
    from calibration.data.golden_sources import read_sources

    output, folder = Output(as_json=settings.as_json), settings.folder
    snapshot, changed = read_snapshot(folder), changes(folder)
    golden = read_sources([folder])
    if settings.as_json:
        print_json(
            {
                "golden": str(folder),
                **snapshot.model_dump(mode="json"),
                "disputed": _disputes(golden),
                "changes": list(changed),
            }
        )
    else:
        state = "changed" if changed else "unchanged"
        output.facts([("golden set", f"{folder}, {state}"), *_facts(snapshot)])
        _print_disputes(golden, output)
        output.heading("How the labels of a passage become one")
        output.facts([("-", rule) for rule in snapshot.rules])
        output.notes(snapshot.notes)
    for line in changed:
        output.err.print(f"finding: {line}")
    if changed:
        raise typer.Exit(FINDING)


def coverage(settings: Coverage) -> None:
    """Measure how much of what is retrieved has a label: an unlabelled passage may be relevant.

    Passages are ranked as a guard ranks them, with the key profile or without a profile.
    --out writes the unlabelled passages whose labels could change the figures most. Fill in grade
    (or distractor), annotator and date, and pass the file to `ctxguard golden freeze`.
    """
    from calibration.data import coverage as judged
    from ctxguard.profile.schema import Profile

    ks, out, limit = settings.ks or [1, 3, 5, 10, 20], settings.out, settings.limit
    check_writable(out, "--out")
    output = Output(as_json=settings.as_json)
    dataset, times_asked, notes = _questions(settings.data)
    with output.doing("opening the index"):
        retriever = open_index(settings)
    loaded = None if settings.profile is None else Profile.load(settings.profile)
    source = retriever if loaded is None else fitted(loaded, retriever)
    folder = settings.data.parent.parent if is_split(settings.data) else settings.data
    notes += label_notes(dataset, folder / "corpus.jsonl", retriever)
    route = settings.route or served_route(source, loaded)
    depth = served_depth(settings.depth, max(ks), loaded)
    pools = replayed(on_route(source, route), dataset, output, depth=depth, name=route.value)
    labelled = sum(dataset.is_labelled(query.query_id) for query in dataset.queries)
    rows = judged.coverage(pools, dataset, ks, seed=_SEED) if labelled else ()
    missing = judged.unjudged(pools, dataset, max(ks), times_asked)
    notes += [f"left out: {line}" for line in pools.skipped]
    if out is not None:
        _write_unjudged(out, missing[:limit], dataset, retriever)
    written = 0 if out is None else min(limit, len(missing))
    document = {
        "coverage": rows,
        "queries": len(dataset),
        "labelled_queries": labelled,
        "unjudged": len(missing),
        "written": written,
        "data": dataset.name,
        "dataset_digest": dataset.digest(),
        "route": route.value,
        "depth": depth,
        "fusion": fusion_of(source),
        "seed": _SEED,
    }

    def show() -> None:
        output.facts(
            [
                ("queries", f"{len(dataset):,} of {dataset.name}: {labelled:,} have a label"),
                ("route", f"{route.value}, {depth} candidates a query"),
                *[("fusion", each) for each in [source.fingerprint().get("fusion")] if each],
                ("unjudged", f"{len(missing):,} passages among the first {max(ks)}, of all"),
            ]
        )
        _print_coverage(rows, output)
        if out is not None:
            output.facts([("to label", f"{written:,} passages in {out}")])

    output.result(document, show, notes)


def _facts(snapshot: "Snapshot") -> list[tuple[str, str]]:
    counts = {name: f"{n:,}" for name, n in snapshot.counts.items()}
    sources = ", ".join(
        f"{counts[name]} {name.removeprefix('labels_')}"
        for name, n in snapshot.counts.items()
        if n and name.startswith("labels_")
    )
    return [
        ("digest", snapshot.digest),
        (
            "questions",
            "{queries}: {labelled_queries} have a label, {answerable_queries} are answerable; "
            "traffic asked {times_asked_in_traffic} times".format(**counts),
        ),
        ("labels", f"{counts['labels']} ({sources or 'none'}), {counts['annotators']} annotators"),
        (
            "passages",
            "{labelled_passages}: {relevant} relevant, {irrelevant} irrelevant, {hard_negative} "
            "hard negatives, {distractor} distractors".format(**counts),
        ),
        (
            "disagreement",
            "on {disagreements} of {labelled_more_than_once} passages labelled more than once, on "
            "the relevance of {disagreements_on_relevance}".format(**counts),
        ),
        ("split", snapshot.split),
    ]


def _disputes(golden: "GoldenSet") -> list[dict[str, object]]:
    return [
        {
            "query_id": label.query_id,
            "passage_id": label.passage_id,
            "value": label.value,
            "labels": [asdict(annotation) for annotation in label.annotations],
        }
        for label in golden.disputed
    ]


def _print_disputes(golden: "GoldenSet", output: Output) -> None:
    if not golden.disputed:
        return
    rows = TextTable("query", "passage", "labels", "value used", title="Labels that disagree")
    for label in golden.disputed[:_SHOWN_DISPUTES]:
        given = ", ".join(f"{one.value} {one.annotator or one.source}" for one in label.annotations)
        rows.add_row(label.query_id, label.passage_id, given, str(label.value))
    output.out.print(rows)
    more = len(golden.disputed) - _SHOWN_DISPUTES
    if more > 0:
        output.note(f"{more:,} more disagree; --json lists them all")


def _questions(data: Path) -> "tuple[Dataset, Mapping[str, int], list[str]]":
    """The queries to measure, how often each was asked, and notes.

    A frozen set is read with its provenance: its questions without a label are in no split.
    """
    from calibration.data.frozen_sets import SNAPSHOT, changes
    from calibration.data.golden_sources import read_sources

    if (data / SNAPSHOT).is_file():
        golden = read_sources([data])
        notes = [*golden.notes, *(f"since it was frozen, {line}" for line in changes(data))]
        return golden.dataset(data.resolve().name), golden.times_asked, notes
    labelled = read_labelled(data, "test")
    return labelled.dataset, {}, list(labelled.notes)


def _write_unjudged(
    out: Path, missing: "Iterable[Unjudged]", dataset: "Dataset", retriever: "HybridRetriever"
) -> None:
    from calibration.data.text_files import write_lines

    questions = {query.query_id: query.text for query in dataset.queries}
    lines = []
    for unjudged in missing:
        passage = retriever.passage(unjudged.passage_id)
        lines.append(
            json.dumps(
                {
                    "query_id": unjudged.query_id,
                    "query": questions[unjudged.query_id],
                    "passage_id": unjudged.passage_id,
                    "title": passage.title,
                    "text": passage.text,
                    "rank": unjudged.rank,
                    "grade": None,
                    "source": "human",
                    "annotator": None,
                    "date": None,
                },
                ensure_ascii=False,
            )
        )
    write_lines(out, lines)


def _print_coverage(at_each_k: "Sequence[CoverageAt]", output: Output) -> None:
    if not at_each_k:
        output.note("no query has a label yet: there is no coverage to measure")
        return
    rows = TextTable("k>", "judged>", "95% interval>", "n>", "fully judged>", "unjudged>")
    for at in at_each_k:
        rows.add_row(
            str(at.k),
            number(at.judged.value),
            interval(at.judged),
            f"{at.judged.n:,}",
            number(at.fully_judged),
            f"{at.unjudged:,}",
        )
    output.out.print(rows)

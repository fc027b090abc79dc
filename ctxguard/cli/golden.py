"""``ctxguard golden``: labels with provenance, frozen by digest, and how much they cover."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxguard.cli._console import (
    FINDING,
    Command,
    Output,
    check_writable,
    interval,
    number,
    print_json,
    table,
)
from ctxguard.cli._inputs import open_index, read_labelled
from ctxguard.errors import ConfigurationError
from ctxguard.types import Route

if TYPE_CHECKING:
    from calibration.labelling.coverage import CoverageAt, Unjudged
    from calibration.labelling.datasets import Dataset
    from calibration.labelling.golden import Merged, Settled
    from ctxguard.retrieval.hybrid import HybridRetriever

_SHOWN_DISPUTES = 10


class SourceName(StrEnum):
    """Where a label comes from."""

    HUMAN = "human"
    AUTHORED = "authored"
    TRAFFIC = "traffic"
    LLM = "llm"


def register(app: typer.Typer) -> None:
    """Add the commands to an application, under ``golden``."""
    golden = typer.Typer(
        name="golden",
        help="Golden sets: labels with provenance, frozen by digest.",
        no_args_is_help=True,
    )
    for command in (freeze, check, show, coverage):
        golden.command(command.__name__, cls=Command)(command)
    app.add_typer(golden)


def freeze(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC...",
            help="JSONL or CSV of labels and questions, frozen sets, BEIR folders.",
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Folder for the frozen set; a new one.")],
    source: Annotated[
        SourceName | None, typer.Option(help="Where labels come from that do not say.")
    ] = None,
    split: Annotated[str, typer.Option(help="Of a BEIR folder, and of the frozen set.")] = "test",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Settle the labels of all sources by one rule, and freeze them under a digest.

    Every label is kept with its provenance, those that disagree too.
    """
    from calibration.labelling.golden import merge
    from calibration.labelling.goldenfiles import read_sources
    from calibration.labelling.snapshots import freeze as write

    output = Output(as_json=as_json)
    merged = merge(
        read_sources(sources, source=None if source is None else source.value, split=split)
    )
    snapshot = write(merged, out, split)
    if as_json:
        print_json({"golden": str(out), **snapshot, "disputed": _disputes(merged)})
        return
    output.facts([("golden set", str(out)), ("digest", snapshot["digest"]), *_facts(snapshot)])
    _print_disputes(merged, output)
    for note in snapshot["notes"]:
        output.note(note)


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A frozen set.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Verify that a frozen set is what was frozen; exit code 1 where it is not."""
    from calibration.labelling.snapshots import changes, read_snapshot

    output = Output(as_json=as_json)
    digest, changed = read_snapshot(folder)["digest"], changes(folder)
    if as_json:
        print_json({"golden": str(folder), "digest": digest, "changes": list(changed)})
    elif not changed:
        output.facts([("golden set", f"{folder}, unchanged"), ("digest", digest)])
    for line in changed:
        output.err.print(f"finding: {line}")
    if changed:
        raise typer.Exit(FINDING)


def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A frozen set.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a frozen set holds, where its labels come from, and how they were settled."""
    from calibration.labelling.golden import merge
    from calibration.labelling.goldenfiles import read_sources
    from calibration.labelling.snapshots import changes, read_snapshot

    output = Output(as_json=as_json)
    snapshot, changed = read_snapshot(folder), changes(folder)
    merged = merge(read_sources([folder]))
    if as_json:
        print_json({**snapshot, "disputed": _disputes(merged), "changes": list(changed)})
        return
    output.facts([("golden set", str(folder)), ("digest", snapshot["digest"]), *_facts(snapshot)])
    _print_disputes(merged, output)
    output.heading("How labels that disagree become one")
    for rule in snapshot["rules"]:
        output.out.print(f"  - {rule}")
    for note in (*snapshot["notes"], *(f"since it was frozen, {line}" for line in changed)):
        output.note(note)


def coverage(
    *,
    index: Annotated[Path, typer.Option(help="Folder that `ctxguard index` wrote.")],
    data: Annotated[Path, typer.Option(help="Frozen set, BEIR folder, or JSONL of queries.")],
    split: Annotated[
        str | None, typer.Option(help="A name in the folder's qrels/. (default: test)")
    ] = None,
    ks: Annotated[
        list[int] | None,
        typer.Option("--k", "-k", min=1, help="A cut-off; give several. (default: 1 3 5 10 20)"),
    ] = None,
    route: Annotated[
        Route | None, typer.Option(help="The stages that answer. (default: all there are)")
    ] = None,
    reranker: Annotated[str | None, typer.Option(help="CrossEncoder, by name or folder.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSONL of the unjudged passages that matter most, to label.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The most passages of --out.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how much of what is retrieved has a label: unjudged is not irrelevant.

    With --out, the passages whose labels would tell most are written for labelling: fill in
    grade (or distractor), annotator and date, and give the file to `ctxguard golden freeze`.
    """
    from calibration.labelling import coverage as judged
    from calibration.replay import replay

    ks = [1, 3, 5, 10, 20] if ks is None else ks
    if out is not None:
        check_writable(out, "--out")
    output = Output(as_json=as_json)
    dataset, times_asked, notes = _questions(data, split)
    with output.doing("opening the index"):
        retriever = open_index(index, reranker)
    route = retriever.route if route is None else route
    with output.passes() as begin:
        pools = replay(
            retriever.on_route(route),
            dataset.queries,
            depth=max(ks),
            progress=begin(f"replaying {route.value}", len(dataset)),
        )
    labelled = sum(
        bool(dataset.qrels.get(q.query_id) or dataset.distractors.get(q.query_id))
        for q in dataset.queries
    )
    rows = judged.coverage(pools, dataset, ks, seed=seed) if labelled else ()
    missing = judged.unjudged(pools, dataset, max(ks), times_asked)
    notes += [f"left out: {line}" for line in pools.skipped]
    if out is not None:
        _write_unjudged(out, missing[:limit], dataset, retriever)
    if as_json:
        print_json(
            {
                "coverage": [{**asdict(row), "judged": row.judged.model_dump()} for row in rows],
                "queries": len(dataset),
                "labelled_queries": labelled,
                "unjudged": len(missing),
                "written": 0 if out is None else min(limit, len(missing)),
                "data": dataset.name,
                "dataset_digest": dataset.digest(),
                "route": route.value,
                "seed": seed,
                "notes": notes,
            }
        )
        return
    output.facts(
        [
            ("queries", f"{len(dataset):,} of {dataset.name}: {labelled:,} have a label"),
            ("route", route.value),
            ("unjudged", f"{len(missing):,} passages among the first {max(ks)}, of all queries"),
        ]
    )
    _print_coverage(rows, output)
    if out is not None:
        output.facts([("to label", f"{min(limit, len(missing)):,} passages in {out}")])
    for note in notes:
        output.note(note)


def _facts(snapshot: Mapping[str, Any]) -> list[tuple[str, str]]:
    counts = snapshot["counts"]

    def named(prefix: str) -> str:
        parts = [
            f"{n:,} {name.removeprefix(prefix)}"
            for name, n in counts.items()
            if n and name.startswith(prefix)
        ]
        return ", ".join(parts) or "none"

    asked, disputed = counts["times_asked_in_traffic"], counts["disagreements"]
    questions = (
        f"{counts['queries']:,}: {counts['labelled_queries']:,} have a label, "
        f"{counts['answerable_queries']:,} are answerable"
    )
    labels = (
        f"{counts['labels']:,} ({named('labels_')}) by {counts['annotators']:,} named annotators"
    )
    passages = (
        f"{counts['labelled_passages']:,}: {counts['relevant']:,} relevant, "
        f"{counts['irrelevant']:,} irrelevant, {counts['hard_negative']:,} hard negatives, "
        f"{counts['distractor']:,} distractors"
    )
    disagreement = (
        f"{disputed:,} of {counts['labelled_more_than_once']:,} passages labelled more than once, "
        f"{counts['disagreements_on_relevance']:,} on relevance"
    )
    return [
        ("questions", questions + (f"; traffic asked {asked:,} times" if asked else "")),
        ("labels", labels),
        ("passages", passages),
        ("disagreement", disagreement + (f": {named('settled_by_')}" if disputed else "")),
        ("split", snapshot["split"]),
    ]


def _disputes(merged: "Merged") -> list[dict[str, object]]:
    return [
        {
            "query_id": settled.query_id,
            "passage_id": settled.passage_id,
            "value": settled.value,
            "settled_by": settled.by,
            "labels": [asdict(judgment) for judgment in settled.judgments],
        }
        for settled in merged.disputed
    ]


def _print_disputes(merged: "Merged", output: Output) -> None:
    if not merged.disputed:
        return
    made = table("query", "passage", "labels", "settled", "by", title="Labels that disagree")
    for settled in merged.disputed[:_SHOWN_DISPUTES]:
        made.add_row(
            settled.query_id, settled.passage_id, _votes(settled), str(settled.value), settled.by
        )
    output.out.print(made)
    more = len(merged.disputed) - _SHOWN_DISPUTES
    if more > 0:
        output.note(f"{more:,} more disagree; --json lists them all")


def _votes(settled: "Settled") -> str:
    return ", ".join(f"{j.value} {j.annotator or j.source}" for j in settled.judgments)


def _questions(data: Path, split: str | None) -> "tuple[Dataset, Mapping[str, int], list[str]]":
    """The queries to look at, how often each was asked, and notes.

    A frozen set is read with its questions that have no label yet, which no split holds.
    """
    from calibration.labelling.golden import merge
    from calibration.labelling.goldenfiles import read_sources
    from calibration.labelling.snapshots import SNAPSHOT, changes, read_snapshot

    if (data / SNAPSHOT).is_file():
        frozen = read_snapshot(data)["split"]
        if split not in (None, frozen):
            raise ConfigurationError(f"--split {split}: the frozen set has {frozen!r} alone")
        golden = read_sources([data])
        notes = [*golden.notes, *(f"since it was frozen, {line}" for line in changes(data))]
        return merge(golden, data.resolve().name).dataset, golden.times_asked, notes
    labelled = read_labelled(data, split, "test")
    return labelled.dataset, {}, list(labelled.notes)


def _write_unjudged(
    out: Path, missing: "Iterable[Unjudged]", dataset: "Dataset", retriever: "HybridRetriever"
) -> None:
    from calibration.labelling.writers import write_lines

    questions = {query.query_id: query.text for query in dataset.queries}
    lines = []
    for found in missing:
        passage = retriever.passage(found.passage_id)
        lines.append(
            json.dumps(
                {
                    "query_id": found.query_id,
                    "query": questions[found.query_id],
                    "passage_id": found.passage_id,
                    "title": passage.title,
                    "text": passage.text,
                    "rank": found.rank,
                    "grade": None,
                    "source": "human",
                    "annotator": None,
                    "date": None,
                },
                ensure_ascii=False,
            )
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_lines(out, lines)


def _print_coverage(rows: "Iterable[CoverageAt]", output: Output) -> None:
    made = table("k>", "judged>", "95% interval>", "n>", "fully judged>", "unjudged>")
    for row in rows:
        made.add_row(
            str(row.k),
            number(row.judged.value),
            interval(row.judged),
            f"{row.judged.n:,}",
            number(row.fully_judged),
            f"{row.unjudged:,}",
        )
    if made.row_count:
        output.out.print(made)
    else:
        output.note("no query has a label yet: there is no coverage to measure")

"""``ctxguard hard-negatives``: passages that mislead the retriever, as training triplets."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ctxguard.cli import _options
from ctxguard.cli._console import Output, check_writable, number, print_json, table
from ctxguard.cli._inputs import open_index, read_labelled
from ctxguard.core.types import DEFAULT_DEPTH

_SHOWN = 5


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("hard-negatives")(hard_negatives)


def hard_negatives(
    *,
    index: _options.IndexFolder,
    data: _options.LabelledQueries,
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSONL file for the triplets.")],
    split: Annotated[str | None, _options.split("train")] = None,
    per_query: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most negatives of one query.")
    ] = 4,
    near: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="How many ranks below the first relevant passage to search."
        ),
    ] = 10,
    include_unjudged: Annotated[
        bool,
        typer.Option(
            "--include-unjudged", help="Also take unlabelled passages; some may be relevant."
        ),
    ] = False,
    margin: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            min=0.0,
            max=0.99,
            help="Unlabelled passages must score this share below the best relevant one.",
        ),
    ] = 0.05,
    depth: Annotated[
        int, typer.Option(metavar="N", min=1, help="Candidates to retrieve for each query.")
    ] = DEFAULT_DEPTH,
    ranker: _options.RankerFile = None,
    as_json: _options.AsJson = False,
) -> None:
    """Write passages that are ranked high but labelled not relevant, as training triplets.

    They are ranked by the ranker, or by convex fusion where the index has no signals; those that
    score furthest above a relevant passage are listed. Only labelled passages are taken unless
    --include-unjudged is given: an unlabelled passage may be relevant.
    """
    from calibration.data.hard_negatives import mine, triplets, write_triplets
    from calibration.replay import replay
    from ctxguard.core.fusion import Fusion
    from ctxguard.retrieval.index.passages import searchable_text

    check_writable(out, "--out")
    output = Output(as_json=as_json)
    labelled = read_labelled(data, split, "train")
    with output.doing("opening the index"):
        retriever = open_index(index, ranker=ranker)
        # Reciprocal ranks have no margin between two scores.
        retriever = retriever.with_fusion(Fusion("ranker" if retriever.has_signals else "convex"))
    labelled, _ = labelled.against(retriever)
    dataset = labelled.dataset
    with output.passes() as begin:
        pools = replay(
            retriever,
            dataset.queries,
            depth=depth,
            progress=begin("replaying hybrid", len(dataset)),
        )
    mining = mine(
        pools,
        dataset,
        per_query=per_query,
        near=near,
        unjudged_margin=margin if include_unjudged else None,
    )
    known = set(retriever.passage_ids)
    missing: Counter[str] = Counter()
    rows = triplets(
        mining,
        dataset,
        lambda passage_id: (
            searchable_text(retriever.passage(passage_id)) if passage_id in known else None
        ),
        missing,
    )
    written = write_triplets(out, rows)
    kinds = Counter(negative.kind for negative in mining.negatives)
    worst = mining.most_misleading(_SHOWN)
    notes = [*labelled.notes, *(f"{n:,} {what}" for what, n in (+missing).items())]
    notes += [f"left out: {line}" for line in pools.skipped]
    if kinds["unjudged"]:
        notes.append(
            f"{kinds['unjudged']:,} negatives are unlabelled: some may be relevant and would teach "
            "a reranker the opposite"
        )
    if as_json:
        print_json(
            {
                "out": str(out),
                "triplets": written,
                "negatives": dict(sorted(kinds.items())),
                "most_misleading": [asdict(each) for each in worst],
                "answerable": mining.answerable,
                "without_negative": mining.without_negative,
                "data": dataset.name,
                "dataset_digest": dataset.digest(),
                "notes": notes,
            }
        )
        return
    of = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in sorted(kinds.items()))
    output.facts(
        [
            ("triplets", f"{written:,} in {out}"),
            ("negatives", of),
            (
                "queries",
                f"{mining.answerable:,} answerable; {mining.without_negative:,} gave no negative",
            ),
        ]
    )
    if worst:
        output.heading("Furthest above the best relevant passage")
        shown = table("query", "passage", "rank>", "score above>")
        for each in worst:
            shown.add_row(each.query_id, each.passage_id, f"{each.rank}", number(each.lead))
        output.out.print(shown)
    for note in notes:
        output.note(note)

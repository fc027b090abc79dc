"""``ctxguard hard-negatives`` and ``ctxguard train-reranker``: a reranker for one's own domain."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxguard.cli._console import (
    FINDING,
    Output,
    check_writable,
    interval,
    number,
    print_json,
    table,
)
from ctxguard.cli._inputs import open_index, read_labelled
from ctxguard.errors import ConfigurationError
from ctxguard.types import DEFAULT_DEPTH, Route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.labelling.hard_negatives import Triplet
    from calibration.train import RerankEffect
    from ctxguard.cli._inputs import Labelled
    from ctxguard.retrieval.hybrid import HybridRetriever

_DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command("hard-negatives")(hard_negatives)
    app.command("train-reranker")(train_reranker)


def hard_negatives(
    *,
    index: Annotated[Path, typer.Option(help="Folder that `ctxguard index` wrote.")],
    data: Annotated[Path, typer.Option(help="BEIR folder, or JSONL of labelled queries.")],
    out: Annotated[Path, typer.Option(help="JSONL for the triplets.")],
    split: Annotated[
        str | None, typer.Option(help="A name in the folder's qrels/. (default: train)")
    ] = None,
    per_query: Annotated[int, typer.Option(min=1, help="The most negatives of one query.")] = 4,
    near: Annotated[
        int, typer.Option(min=0, help="Ranks below the first relevant passage to look at.")
    ] = 10,
    include_unjudged: Annotated[
        bool,
        typer.Option(
            "--include-unjudged", help="Passages without a label too; some may be relevant."
        ),
    ] = False,
    margin: Annotated[
        float,
        typer.Option(min=0.0, max=0.99, help="Share of the positive's score that they must miss."),
    ] = 0.05,
    depth: Annotated[int, typer.Option(min=1, help="Candidates a query.")] = DEFAULT_DEPTH,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Mine what the retriever ranks high and the labels call wrong, as training triplets.

    Only judged passages are taken unless --include-unjudged is given, since unjudged is not
    irrelevant. Candidates are fused convexly here, whatever is used to serve: the margin needs
    scores with distances.
    """
    from calibration.labelling.hard_negatives import mine, triplets, write_triplets
    from calibration.replay import replay
    from ctxguard.fusion import Fusion
    from ctxguard.retrieval.passages import searchable_text

    check_writable(out, "--out")
    output = Output(as_json=as_json)
    labelled = read_labelled(data, split, "train")
    with output.doing("opening the index"):
        retriever = open_index(index, None).with_fusion(Fusion("convex"))
    labelled.counts(retriever)
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
    notes = [*labelled.notes, *(f"{n:,} {what}" for what, n in (+missing).items())]
    notes += [f"left out: {line}" for line in pools.skipped]
    if kinds["unjudged"]:
        notes.append(
            f"{kinds['unjudged']:,} negatives are unjudged: some may be relevant, and teach a "
            "reranker wrong"
        )
    if as_json:
        print_json(
            {
                "out": str(out),
                "triplets": written,
                "negatives": dict(sorted(kinds.items())),
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
    for note in notes:
        output.note(note)


def train_reranker(
    *,
    triplets: Annotated[Path, typer.Option(help="JSONL that `ctxguard hard-negatives` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the model; a new one.")],
    base: Annotated[
        str, typer.Option(help="Model to start from, by name or folder.")
    ] = _DEFAULT_MODEL,
    index: Annotated[
        Path | None, typer.Option(help="With --data: rerank what this index retrieves.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Labelled queries to measure on, held out of training.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="A name in the folder's qrels/. (default: test)")
    ] = None,
    depth: Annotated[int, typer.Option(min=2, help="Candidates to rerank, to measure.")] = 50,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pairs.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Pairs in a step.")] = 16,
    max_length: Annotated[
        int, typer.Option(min=8, help="Tokens of question and passage together.")
    ] = 256,
    learning_rate: Annotated[float, typer.Option(help="The highest of its schedule.")] = 5e-5,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, dropout and order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fine-tune a CrossEncoder on triplets, and measure on held-out queries whether it helps.

    Needs the extra `train`. No hub is needed, and nothing is reported to anyone. The bundled
    model is no reranker, and a few hundred answered questions do not make it one: measure, with
    --index and --data, or start from a CrossEncoder. Exit code 1 where the result harms.
    """
    if (index is None) != (data is None):
        raise typer.BadParameter("give --index and --data together", param_hint="--index")
    from calibration.labelling.hard_negatives import read_triplets
    from calibration.train import TrainingSettings, pairs_of
    from calibration.train import train_reranker as fine_tune

    output = Output(as_json=as_json)
    _refuse_other_content(out)
    settings = TrainingSettings(
        epochs=epochs,
        batch_size=batch_size,
        max_length=max_length,
        learning_rate=learning_rate,
        seed=seed,
    )
    rows, mended = read_triplets(triplets)
    notes = list(mended)
    pairs = pairs_of(rows)
    with output.passes() as begin:
        fine_tune(
            pairs,
            out,
            base=base,
            settings=settings,
            progress=begin("training", settings.steps(len(pairs))),
        )
    effect = None
    if index is not None and data is not None:
        with output.doing("opening the index"):
            retriever = open_index(index, None)
        effect = _measure(
            retriever,
            out,
            held_out=read_labelled(data, split, "test"),
            rows=rows,
            depth=depth,
            seed=seed,
            output=output,
            notes=notes,
        )
    else:
        notes.append(
            "not measured: give --index and --data to see whether it helps before using it"
        )
    if as_json:
        print_json(
            {
                "model": str(out),
                "base": base,
                "triplets": len(rows),
                "pairs": len(pairs),
                "settings": asdict(settings),
                "held_out": None if effect is None else _document(effect),
                "notes": notes,
            }
        )
    else:
        output.facts(
            [
                ("model", f"{out}, from {base}"),
                ("trained on", f"{len(pairs):,} pairs of {len(rows):,} triplets, {epochs} epochs"),
            ]
        )
        if effect is not None:
            _print(effect, output)
        for note in notes:
            output.note(note)
    if effect is not None and effect.harms:
        output.err.print("finding: on the held-out queries the reranker harms more than noise")
        raise typer.Exit(FINDING)


def _measure(
    retriever: "HybridRetriever",
    model: Path,
    *,
    held_out: "Labelled",
    rows: "Sequence[Triplet]",
    depth: int,
    seed: int,
    output: Output,
    notes: list[str],
) -> "RerankEffect":
    from calibration.replay import replay
    from calibration.train import measure_rerank, unseen
    from ctxguard.retrieval.passages import searchable_text
    from ctxguard.retrieval.reranker import CrossEncoderReranker

    notes += held_out.notes
    held_out.counts(retriever)
    dataset = unseen(held_out.dataset, rows)
    seen = len(held_out.dataset) - len(dataset)
    if seen:
        notes.append(
            f"{seen} questions of {dataset.name} are in the triplets too, and are not measured on"
        )
    with output.passes() as begin:
        pools = replay(
            retriever.on_route(Route.HYBRID),
            dataset.queries,
            depth=depth,
            progress=begin("replaying hybrid", len(dataset)),
        )
        return measure_rerank(
            pools,
            dataset,
            CrossEncoderReranker(model),
            lambda passage_id: searchable_text(retriever.passage(passage_id)),
            seed=seed,
            progress=begin("reranking", len(pools)),
        )


def _document(effect: "RerankEffect") -> dict[str, object]:
    return {
        "depth": effect.depth,
        "verdict": effect.verdict,
        **{
            name: {column: estimate.model_dump() for column, estimate in columns.items()}
            for name, columns in effect.metrics.items()
        },
    }


def _print(effect: "RerankEffect", output: Output) -> None:
    made = table(
        *("metric", "before>", "after>", "difference>", "95% interval>", "n>"),
        title=f"Held-out queries, {effect.depth} candidates reranked: {effect.verdict}",
    )
    for name, columns in effect.metrics.items():
        made.add_row(
            name,
            number(columns["before"].value),
            number(columns["after"].value),
            number(columns["difference"].value),
            interval(columns["difference"]),
            f"{columns['difference'].n:,}",
        )
    output.out.print(made)


def _refuse_other_content(out: Path) -> None:
    """Refuse what saving would refuse, before the training."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} is there already; name a new folder")

"""``ctxguard golden hard-negatives``: passages that mislead the retriever, as training triplets."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from ctxguard._support.settings import key, optional_key, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, check_writable, number
from ctxguard.cli._inputs import read_labelled
from ctxguard.cli._pools import replayed
from ctxguard.cli._system import open_index
from ctxguard.cli._tables import TextTable
from ctxguard.core.types import DEFAULT_DEPTH
from ctxguard.server.settings import IndexSystem

_SHOWN = 5


class HardNegatives(IndexSystem):
    """Settings of ``ctxguard golden hard-negatives``."""

    data: _options.LabelledQueries
    out: Path = setting("JSONL file for the triplets.", "FILE")
    unjudged_margin: float | None = optional_key(
        "Also take unlabelled passages that score this share below the best relevant one, such "
        "as 0.05; some may be relevant.",
        "SHARE",
        default="labelled passages only",
        ge=0,
        le=0.99,
    )
    as_json: _options.AsJson = False
    depth: _options.Depth = None
    per_query: int = key("Most negatives of one query.", "N", ge=1, value=4)
    near: int = key(
        "How many ranks below the first relevant passage to search.", "N", ge=0, value=10
    )


def hard_negatives(settings: HardNegatives) -> None:
    """Write passages that are ranked high but labelled not relevant, as training triplets.

    They are ranked by the ranker, or by convex fusion where the index has no signals; those that
    score furthest above a relevant passage are listed. Only labelled passages are taken unless
    the key unjudged-margin is given: an unlabelled passage may be relevant.
    """
    from calibration.data.hard_negatives import mine, triplets, write_triplets
    from ctxguard.core.fusion import Fusion
    from ctxguard.retrieval.index.passages import searchable_text

    out = settings.out
    check_writable(out, "--out")
    output = Output(as_json=settings.as_json)
    labelled = read_labelled(settings.data, "train")
    with output.doing("opening the index"):
        retriever = open_index(settings)
        # Reciprocal ranks have no margin between two scores.
        retriever = retriever.with_fusion(Fusion("ranker" if retriever.has_signals else "convex"))
    labelled, _ = labelled.against(retriever)
    dataset = labelled.dataset
    depth = settings.depth or DEFAULT_DEPTH
    pools = replayed(retriever, dataset, output, depth=depth)
    mining = mine(
        pools,
        dataset,
        per_query=settings.per_query,
        near=settings.near,
        unjudged_margin=settings.unjudged_margin,
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
    document = {
        "out": str(out),
        "triplets": written,
        "negatives": dict(sorted(kinds.items())),
        "most_misleading": [asdict(each) for each in worst],
        "answerable": mining.answerable,
        "without_negative": mining.without_negative,
        "data": dataset.name,
        "dataset_digest": dataset.digest(),
    }

    def show() -> None:
        of = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in sorted(kinds.items()))
        queries = f"{mining.answerable:,} answerable; {mining.without_negative:,} gave no negative"
        output.facts(
            [("triplets", f"{written:,} in {out}"), ("negatives", of), ("queries", queries)]
        )
        if worst:
            output.heading("Furthest above the best relevant passage")
            shown = TextTable("query", "passage", "rank>", "score above>")
            for each in worst:
                shown.add_row(each.query_id, each.passage_id, f"{each.rank}", number(each.lead))
            output.out.print(shown)

    output.result(document, show, notes)

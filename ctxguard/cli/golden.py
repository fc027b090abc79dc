"""``ctxguard golden``: labels frozen by digest, and hard negatives.

Reads labels; `freeze` writes a folder, `check` nothing, and `hard-negatives` searches the index and
writes a file.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard._support.settings import SettingsModel, optional, optional_key, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output
from ctxguard.cli._inputs import open_labelled, read_labelled, replayed
from ctxguard.cli._tables import facts
from ctxguard.core.types import DEFAULT_DEPTH
from ctxguard.server.system import IndexSystem

if TYPE_CHECKING:
    from calibration.data.golden import Snapshot


class FreezeCommand(SettingsModel):
    data: Path = setting(
        "Labelled queries: a BEIR folder, the file of one of its splits, or a JSONL file.",
        "DATA",
        argument=True,
    )
    out: Path = setting("New folder for the frozen set.", "FOLDER")
    split: str | None = optional(
        "Split to read from a BEIR folder and to write.",
        "NAME",
        default="train, or the only one of a folder",
    )
    relevant_from: _options.RelevantFrom = 1

    def __call__(self, output: Output) -> None:
        """The set is a BEIR folder, which every command with --data reads."""
        from calibration.data.golden import DEFAULT_SPLIT, freeze

        data = self.data
        if self.split is not None and data.is_dir():
            data = data / "qrels" / f"{self.split}.tsv"
        labelled = read_labelled(data, DEFAULT_SPLIT, self.relevant_from)
        snapshot = freeze(labelled.dataset, self.out, self.split or DEFAULT_SPLIT)
        notes = list(labelled.notes)
        if labelled.dataset.keywords:
            notes.append("keywords are left out: a BEIR folder has no place for them")
        _result(self.out, snapshot, output, notes=notes)


class CheckCommand(SettingsModel):
    folder: Path = setting("A frozen set.", "DIR", argument=True)

    def __call__(self, output: Output) -> None:
        """Compare the digest of each file with its frozen one."""
        from calibration.data.golden import changes, read_snapshot

        snapshot, changed = read_snapshot(self.folder), changes(self.folder)
        _result(self.folder, snapshot, output, changed)
        output.findings(changed)


class HardNegativesCommand(IndexSystem):
    data: _options.LabelledQueries
    out: Path = setting("JSONL file for the triplets.", "FILE", writes=True)
    unjudged_margin: float | None = optional_key(
        "Also take unlabelled passages that score this share below the best relevant one, such "
        "as 0.05; some may be relevant.",
        default="labelled passages only",
        ge=0,
        le=0.99,
    )
    depth: _options.Depth = None
    relevant_from: _options.RelevantFrom = 1

    def __call__(self, output: Output) -> None:
        """The ranker orders the passages, or convex fusion if the index has no signals. Only
        labelled passages are taken unless the key unjudged-margin is given: an unlabelled passage
        may be relevant.
        """
        from calibration.hard_negatives import mine, triplets, write_triplets
        from ctxguard.core.fusion import Fusion
        from ctxguard.retrieval.index.passages import searchable_text

        labelled, retriever = open_labelled(self, self.data, "train", output)
        # Reciprocal ranks have no margin between two scores.
        retriever = retriever.with_fusion(Fusion("ranker" if retriever.has_signals else "convex"))
        dataset = labelled.dataset
        pools = replayed(retriever, dataset, output, depth=self.depth or DEFAULT_DEPTH)
        mined = mine(pools, dataset, unjudged_margin=self.unjudged_margin)
        known, missing = set(retriever.passage_ids), Counter[str]()

        def text(passage_id: str) -> str | None:
            known_here = passage_id in known
            return searchable_text(retriever.passage(passage_id)) if known_here else None

        written = write_triplets(self.out, triplets(mined, dataset, text, missing))
        kinds = Counter(negative.kind for of_query in mined.values() for negative in of_query)
        without_negative = sum(not of_query for of_query in mined.values())
        notes = [*labelled.notes, *(f"{n:,} {what}" for what, n in (+missing).items())]
        notes += [f"left out: {line}" for line in pools.skipped]
        if kinds["unjudged"]:
            notes.append(
                f"{kinds['unjudged']:,} negatives are unlabelled: some may be relevant and would "
                "teach a reranker the opposite"
            )
        document = {
            "out": self.out,
            "triplets": written,
            "negatives": dict(sorted(kinds.items())),
            "answerable": len(mined),
            "without_negative": without_negative,
            "data": dataset.name,
            "dataset_digest": dataset.digest(),
        }
        by_kind = [f"{n:,} {kind.replace('_', ' ')}" for kind, n in sorted(kinds.items())]
        shown = facts(
            ("triplets", f"{written:,} in {self.out}"),
            ("negatives", ", ".join(by_kind)),
            ("queries", f"{len(mined):,} answerable; {without_negative:,} gave no negative"),
        )
        output.result(document, [shown], notes)


def _result(
    folder: Path,
    snapshot: "Snapshot",
    output: Output,
    changed: tuple[str, ...] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print a frozen set, and after a check also how it has changed."""
    state = "" if changed is None else f", {'changed' if changed else 'unchanged'}"
    document = {"golden": folder, **snapshot.model_dump(mode="json")}
    if changed is not None:
        document["changes"] = changed
    shown = facts(
        ("golden set", f"{folder}{state}"),
        ("digest", snapshot.digest),
        ("split", snapshot.split),
    )
    output.result(document, [shown], notes)

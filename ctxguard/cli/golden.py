"""``ctxguard golden``: labels with provenance, frozen by digest; coverage, hard negatives."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ctxguard._support.settings import SettingsModel, key, optional, optional_key, setting
from ctxguard.cli import _options
from ctxguard.cli._console import Output, interval, number, picked
from ctxguard.cli._inputs import (
    fitted,
    fusion_of,
    is_split,
    label_notes,
    on_route,
    open_labelled,
    read_labelled,
    replayed,
    served_depth,
    served_route,
)
from ctxguard.core.types import DEFAULT_DEPTH
from ctxguard.server.settings import IndexSystem

if TYPE_CHECKING:
    from calibration.data.dataset import Dataset
    from calibration.data.frozen_sets import Snapshot
    from calibration.data.golden import GoldenSet
    from ctxguard.core.types import Passage

_SHOWN_DISPUTES = 10
_SEED = 0


class FreezeCommand(SettingsModel):
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

    def __call__(self, output: Output) -> None:
        """Every label is kept with its provenance, those that disagree too."""
        from calibration.data.frozen_sets import freeze
        from calibration.data.golden_sources import DEFAULT_SPLIT, read_sources

        golden = read_sources(self.sources, source=self.source, split=self.split)
        snapshot = freeze(golden, self.out, self.split or DEFAULT_SPLIT)
        _result(self.out, snapshot, golden, output)


class CheckCommand(SettingsModel):
    folder: Path = setting("A frozen set.", "DIR", argument=True)
    as_json: _options.AsJson = False

    def __call__(self, output: Output) -> None:
        """The output says where the labels come from, which disagree, and how they are merged."""
        from calibration.data.frozen_sets import changes, read_snapshot
        from calibration.data.golden_sources import read_sources

        snapshot, changed = read_snapshot(self.folder), changes(self.folder)
        _result(self.folder, snapshot, read_sources([self.folder]), output, changed)
        output.findings(changed)


class CoverageCommand(IndexSystem):
    data: _options.LabelledQueries
    ks: list[Annotated[int, Field(ge=1)]] = key(
        "Cut-offs, as a list.", "LIST", "--k", default="1, 3, 5, 10 and 20", factory=list
    )
    profile: _options.ProfileFile = None
    route: _options.OneRoute = None
    out: Path | None = optional(
        "JSONL file for the unlabelled passages that matter most, to label.", "FILE", writes=True
    )
    as_json: _options.AsJson = False
    depth: _options.Depth = None
    limit: int = key("Most passages written to --out.", "N", ge=1, value=200)

    def __call__(self, output: Output) -> None:
        """Passages are ranked as a guard ranks them, with the key profile or without a profile.
        --out writes the unlabelled passages whose labels could change the figures most. Fill in
        grade (or distractor), annotator and date, and pass the file to `ctxguard golden freeze`.
        """
        from calibration.data.coverage import coverage, unjudged
        from calibration.data.text_files import write_lines
        from ctxguard.profile.schema import Profile

        ks = self.ks or [1, 3, 5, 10, 20]
        dataset, times_asked, notes = _questions(self.data)
        with output.doing("opening the index"):
            retriever = self.open_index()
        loaded = None if self.profile is None else Profile.load(self.profile)
        source = retriever if loaded is None else fitted(loaded, retriever)
        folder = self.data.parent.parent if is_split(self.data) else self.data
        notes += label_notes(dataset, folder / "corpus.jsonl", retriever)
        route = self.route or served_route(source, loaded)
        depth = served_depth(self.depth, max(ks), loaded)
        pools = replayed(on_route(source, route), dataset, output, depth=depth, name=route.value)
        labelled = sum(dataset.is_labelled(query.query_id) for query in dataset.queries)
        rows = coverage(pools, dataset, ks, seed=_SEED) if labelled else ()
        missing = unjudged(pools, dataset, max(ks), times_asked)
        notes += [f"left out: {line}" for line in pools.skipped]
        written = missing[: self.limit if self.out is not None else 0]
        if self.out is not None:
            questions = {query.query_id: query.text for query in dataset.queries}
            lines = [
                _to_label(questions[x.query_id], x, retriever.passage(x.passage_id))
                for x in written
            ]
            write_lines(self.out, lines)
        document = {
            "coverage": rows,
            "queries": len(dataset),
            "labelled_queries": labelled,
            "unjudged": len(missing),
            "written": len(written),
            "data": dataset.name,
            "dataset_digest": dataset.digest(),
            "route": route,
            "depth": depth,
            "fusion": fusion_of(source),
            "seed": _SEED,
        }

        def show() -> None:
            output.facts(
                ("queries", f"{len(dataset):,} of {dataset.name}: {labelled:,} have a label"),
                ("route", f"{route.value}, {depth} candidates a query"),
                ("fusion", source.fingerprint().get("fusion")),
                ("unjudged", f"{len(missing):,} passages among the first {max(ks)}, of all"),
            )
            if rows:
                figures = (
                    (
                        str(at.k),
                        number(at.judged.value),
                        interval(at.judged),
                        f"{at.judged.n:,}",
                        number(at.fully_judged),
                        f"{at.unjudged:,}",
                    )
                    for at in rows
                )
                columns = ("k>", "judged>", "95% interval>", "n>", "fully judged>", "unjudged>")
                output.table(columns, figures)
            else:
                output.note("no query has a label yet: there is no coverage to measure")
            if self.out is not None:
                output.facts(("to label", f"{len(written):,} passages in {self.out}"))

        output.result(document, show, notes)


class HardNegativesCommand(IndexSystem):
    data: _options.LabelledQueries
    out: Path = setting("JSONL file for the triplets.", "FILE", writes=True)
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

    def __call__(self, output: Output) -> None:
        """The ranker orders the passages, or convex fusion where the index has no signals. Only
        labelled passages are taken unless the key unjudged-margin is given: an unlabelled passage
        may be relevant.
        """
        from calibration.data.hard_negatives import mine, triplets, write_triplets
        from ctxguard.core.fusion import Fusion
        from ctxguard.retrieval.index.passages import searchable_text

        labelled, _, retriever = open_labelled(self, self.data, "train", output)
        # Reciprocal ranks have no margin between two scores.
        retriever = retriever.with_fusion(Fusion("ranker" if retriever.has_signals else "convex"))
        dataset = labelled.dataset
        pools = replayed(retriever, dataset, output, depth=self.depth or DEFAULT_DEPTH)
        mined = mine(
            pools,
            dataset,
            per_query=self.per_query,
            near=self.near,
            unjudged_margin=self.unjudged_margin,
        )
        known = set(retriever.passage_ids)
        missing: Counter[str] = Counter()

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

        def show() -> None:
            of = ", ".join(f"{n:,} {kind.replace('_', ' ')}" for kind, n in sorted(kinds.items()))
            without = f"{without_negative:,} gave no negative"
            output.facts(
                ("triplets", f"{written:,} in {self.out}"),
                ("negatives", of),
                ("queries", f"{len(mined):,} answerable; {without}"),
            )

        output.result(document, show, notes)


def _result(
    folder: Path,
    snapshot: "Snapshot",
    golden: "GoldenSet",
    output: Output,
    changed: tuple[str, ...] | None = None,
) -> None:
    """Print a frozen set; one that is checked with what was changed and the rules of merging."""
    state = "" if changed is None else f", {'changed' if changed else 'unchanged'}"
    disputed = [
        {
            **picked(label, "query_id", "passage_id", "value"),
            "labels": label.annotations,
        }
        for label in golden.disputed
    ]
    document = {"golden": folder, **snapshot.model_dump(mode="json"), "disputed": disputed}

    def show() -> None:
        output.facts(("golden set", f"{folder}{state}"), *_facts(snapshot))
        rows = [
            (
                label.query_id,
                label.passage_id,
                ", ".join(
                    f"{one.value} {one.annotator or one.source}" for one in label.annotations
                ),
                str(label.value),
            )
            for label in golden.disputed
        ]
        if rows:
            columns = ("query", "passage", "labels", "value used")
            output.table(columns, rows[:_SHOWN_DISPUTES], "Labels that disagree")
        if len(rows) > _SHOWN_DISPUTES:
            output.note(f"{len(rows) - _SHOWN_DISPUTES:,} more disagree; --json lists them all")
        if changed is not None:
            output.heading("How the labels of a passage become one")
            output.facts(*[("-", rule) for rule in snapshot.rules])
        output.notes(snapshot.notes)

    output.result(document if changed is None else {**document, "changes": changed}, show)


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


def _to_label(question: str, unjudged: Any, passage: "Passage") -> str:
    """A line for people to fill in."""
    row = {
        "query_id": unjudged.query_id,
        "query": question,
        "passage_id": unjudged.passage_id,
        "title": passage.title,
        "text": passage.text,
        "rank": unjudged.rank,
        "grade": None,
        "source": "human",
        "annotator": None,
        "date": None,
    }
    return json.dumps(row, ensure_ascii=False)

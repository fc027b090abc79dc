"""Reads inputs that several commands share: labelled queries, a profile, a system's candidates.

Reads these files, and calls the retriever.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ctxguard
from ctxguard.cli._console import Output
from ctxguard.cli._system import Source, System
from ctxguard.core.columns import SignalColumn
from ctxguard.core.types import Route
from ctxguard.errors import DataError, ProfileMismatchError

if TYPE_CHECKING:
    from calibration.data.dataset import Dataset
    from calibration.pools import Pools
    from calibration.retrievers import MultiRoute, RankingSource
    from ctxguard import Profile
    from ctxguard.core.types import Passage
    from ctxguard.server.system import IndexSystem

_OPTIMISTIC = "so figures on them are optimistic"


@dataclass(frozen=True)
class Labelled:
    """Labelled queries that a command has read.

    Attributes:
        split: Name of the split of a BEIR folder; None for a JSONL file, which has no splits.
        corpus: The folder's own corpus, to which the labels belong; None for a JSONL file.
        others: The other splits of the folder.
        notes: Repairs, choices and checks, one line each.
        n_unknown: How many labelled passages the searched corpus lacks; None if it is not known.
    """

    dataset: "Dataset"
    split: str | None = None
    corpus: Path | None = None
    others: "tuple[Dataset, ...]" = ()
    notes: tuple[str, ...] = ()
    n_unknown: int | None = None

    @property
    def document(self) -> dict[str, object]:
        """Describe the labels for a JSON document."""
        dataset, answerable = self.dataset, len(self.dataset.answerable)
        return {
            "data": dataset.name,
            "split": self.split,
            "dataset_digest": dataset.digest(),
            "queries": len(dataset),
            "answerable": answerable,
            "without_relevant": len(dataset) - answerable,
            **({} if self.n_unknown is None else {"unknown_passages": self.n_unknown}),
        }

    @property
    def in_words(self) -> str:
        """The number of queries with and without an answer."""
        n, answerable = len(self.dataset), len(self.dataset.answerable)
        return (
            f"{n:,} of {self.dataset.name}: {answerable:,} answerable, "
            f"{n - answerable:,} without a relevant passage"
        )

    def against(self, *sources: "Source") -> "Labelled":
        """Check that the labels belong to the first source's corpus; note what it lacks.

        A user's own retriever and a run have no corpus to check. They get the texts of the folder's
        ``corpus.jsonl`` that labels or runs name, and the labels are checked against these.
        """
        from calibration.data.dataset import named_passages, unknown_passages
        from calibration.data.label_check import check_ids, check_texts
        from calibration.retrievers import RankingSource, RecordedRankings

        dataset, notes, first = self.dataset, self.notes, sources[0]
        known: Container[str] | None = None
        external = [each for each in sources if isinstance(each, RankingSource)]
        if external:
            runs = [each.retriever for each in external]
            of_runs = [each.passage_ids for each in runs if isinstance(each, RecordedRankings)]
            known, unread = self._passages(named_passages(dataset).union(*of_runs))
            notes += unread
            for each in external:
                each.add_passages((known or {}).values())
        if isinstance(first, RankingSource):
            if known is None:
                unverified = (
                    "unverified: there is no corpus in which to look up the ids and texts of the "
                    "labelled passages"
                )
                return replace(self, notes=(*notes, unverified))
            notes += check_ids(dataset, known, str(self.corpus))
        else:
            if isinstance(first, ctxguard.HybridRetriever):
                known, present = first.labelled_ids, frozenset(first.passage_ids)
            else:  # an engine may hold billions: look only for ids that the labels use
                known = first.labelled_ids(named_passages(dataset))
                present = first.known_ids(known)
            notes += check_ids(dataset, known)
            if self.corpus is not None:
                notes += check_texts(dataset, self.corpus, present, first.passage)
        return replace(self, notes=notes, n_unknown=len(unknown_passages(dataset, known)))

    def texts(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the texts of the labelled passages that the corpus holds, and notes."""
        from calibration.data.dataset import named_passages

        found, notes = self._passages(named_passages(self.dataset))
        return {name: passage.text for name, passage in (found or {}).items()}, notes

    def _passages(
        self, wanted: "Container[str]"
    ) -> "tuple[dict[str, Passage] | None, tuple[str, ...]]":
        """Read some passages of the labels' corpus; None with a note if it cannot be read."""
        from calibration.data.readers import read_corpus

        if self.corpus is None or not self.corpus.is_file():
            return None, ()
        try:
            passages = read_corpus(self.corpus)
            return {each.passage_id: each for each in passages if each.passage_id in wanted}, ()
        except DataError as error:
            return None, (f"the labels are not checked against their corpus: {error}",)

    def shared_questions(self) -> Iterator[str]:
        """Yield a line for each other split that shares questions with this one."""
        from calibration.data.dataset import same_text

        for other in self.others:
            if pairs := same_text(self.dataset, other):
                first, second = pairs[0]
                n_shared = len({pair[0] for pair in pairs})
                yield (
                    f"{n_shared} of {len(self.dataset)} questions are also in {other.name} (the "
                    f"first, {first!r}, is {second!r} there)"
                )

    def seen_by(self, profile: "Profile") -> list[str]:
        """Return a line if the profile was calibrated on some of these questions."""
        from calibration.data.dataset import same_text

        made_on = profile.provenance.dataset_digest
        if self.dataset.digest() == made_on:
            return [f"the profile was calibrated on these queries, {_OPTIMISTIC}"]
        for other in self.others:
            if other.digest() == made_on and (pairs := same_text(other, self.dataset)):
                seen = f"{len({pair[1] for pair in pairs})} of these {len(self.dataset)} questions"
                line = f"the profile was calibrated on {other.name}, which contains {seen}"
                return [f"{line}, {_OPTIMISTIC}"]
        return []


def open_labelled(
    settings: "IndexSystem", data: Path, split: str, output: Output
) -> "tuple[Labelled, Any]":
    """Read labelled queries, open a command's system for them, and check that they fit."""
    labelled = read_labelled(data, split, getattr(settings, "relevant_from", 1))
    if getattr(settings, "run", None) is not None and labelled.dataset.keywords:
        note = "keywords are left out: a run has no texts to look for them in"
        without = replace(labelled.dataset, keywords={})
        labelled = replace(labelled, dataset=without, notes=(*labelled.notes, note))
    with output.doing("opening the retriever"):
        queries = labelled.dataset.queries
        source: Source = (
            settings.open(queries) if isinstance(settings, System) else settings.open_index()
        )
    return labelled.against(source), source


def read_labelled(data: Path, preferred: str, relevant_from: int = 1) -> Labelled:
    """Read labelled queries from a BEIR folder, the file of one split, or a JSONL file.

    Of a folder the preferred split is read, or else its only one.
    """
    from calibration.data.readers import default_split, read_beir, read_jsonl, splits

    taken: tuple[str, ...] = ()
    if data.suffix == ".tsv" and data.parent.name == "qrels":
        data, split = data.parent.parent, data.stem
    elif data.is_dir():
        split, taken = default_split(data, preferred)
    else:
        dataset = read_jsonl(data, relevant_from=relevant_from)
        return Labelled(dataset, notes=dataset.notes)
    dataset = read_beir(data, split, relevant_from=relevant_from)
    notes, others = [*taken, *dataset.notes], []
    for other in splits(data):
        if other != split:
            try:
                others.append(read_beir(data, other, relevant_from=relevant_from))
            except DataError as error:
                notes.append(f"questions shared with the split {other!r} are unknown: {error}")
    return Labelled(dataset, split, data / "corpus.jsonl", tuple(others), tuple(notes))


def fitted(profile: "Profile | None", source: "Source") -> "tuple[Source, tuple[str, ...]]":
    """Give a retriever the profile's fusion, if any; list the parts that were not compared."""
    from ctxguard.profile.comparison import compare_systems

    if profile is None:
        return source, ()
    fused = source.with_fusion(profile.fusion)
    comparison = compare_systems(profile, fused.fingerprint(), fused.corpus_sketch())
    if comparison.mismatches:
        raise ProfileMismatchError(comparison.mismatches)
    return fused, comparison.reservations


def on_route(source: "Source", route: Route) -> "Source":
    """Return an index that runs only these stages; a wrapped retriever is returned unchanged."""
    view: Source = source.on_route(route) if hasattr(source, "on_route") else source
    return view


def in_first_order(source: "Source") -> "MultiRoute | RankingSource":
    """Put the legs of a retriever in the order that calibration starts from."""
    from calibration.calibrate import default_fusion

    if not hasattr(source, "on_route"):
        return source
    several = cast("MultiRoute", source)
    return several.with_fusion(default_fusion(several))


def replayed(
    source: "Source",
    dataset: "Dataset",
    output: Output,
    *,
    depth: int,
    name: str = "hybrid",
    columns: Sequence[SignalColumn] = (),
) -> "Pools":
    """Send every query through a retriever once, with a progress bar."""
    from calibration.replay import replay

    with output.passes() as begin:
        progress = begin(f"replaying {name}", len(dataset))
        return replay(
            source,
            dataset.queries,
            depth=depth,
            progress=progress,
            columns=columns,
            labels=dataset,
        )


def notes_on_pools(pools: "Pools", route: Route, run: Path | None) -> list[str]:
    """Note queries that were left out or are missing from the run, and stages not the policy's."""
    from calibration.pools import notes_on_themselves

    notes = [f"left out: {line}" for line in pools.skipped]
    notes += notes_on_themselves([pools])
    if pools.route is not route:
        notes.append(
            f"the retriever answered with {pools.route.value}, but the policy measured is for "
            f"{route.value}: set the key route"
        )
    missing = [name for name, n in zip(pools.query_ids, pools.lengths, strict=True) if not n]
    if missing and run is not None:
        notes.append(
            f"the run has no candidates for {len(missing):,} queries, such as {missing[0]!r}: they "
            "count as empty contexts"
        )
    return notes

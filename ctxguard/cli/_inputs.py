"""The inputs of several commands: labelled queries, a profile, and a system's candidates."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ctxguard
from ctxguard.cli._console import Output
from ctxguard.cli._system import Source, System
from ctxguard.core.columns import SignalColumn
from ctxguard.core.types import DEFAULT_DEPTH, Route
from ctxguard.errors import ConfigurationError, DataError, ProfileMismatchError

if TYPE_CHECKING:
    from calibration.data.dataset import Dataset
    from calibration.pools import Pools
    from ctxguard import Profile
    from ctxguard.core.types import Passage
    from ctxguard.profile.comparison import SystemComparison
    from ctxguard.server.system import IndexSystem


@dataclass(frozen=True)
class Labelled:
    """Labelled queries with notes about them.

    Attributes:
        dataset: The queries and labels.
        split: Name of the split of a BEIR folder; None for a JSONL file, which has no splits.
        corpus: The folder's own corpus, to which the labels belong; None for a JSONL file.
        others: The other splits of the folder.
        notes: Repairs and choices made while reading, one line each.
    """

    dataset: "Dataset"
    split: str | None
    corpus: Path | None
    others: "tuple[Dataset, ...]"
    notes: tuple[str, ...]

    @property
    def document(self) -> dict[str, object]:
        """The name, the split and the digest, as JSON documents have them."""
        dataset = self.dataset
        return {"data": dataset.name, "split": self.split, "dataset_digest": dataset.digest()}

    def described(self, counts: Mapping[str, int]) -> str:
        """Put the counts of ``against`` in words."""
        return (
            f"{counts['queries']:,} of {self.dataset.name}: {counts['answerable']:,} answerable, "
            f"{counts['without_relevant']:,} without a relevant passage"
        )

    def against(self, *retrievers: "Source") -> "tuple[Labelled, dict[str, int]]":
        """Check that the labels belong to the corpus: of an index, else of the labels' folder.

        A user's own retriever and a run have no corpus to check. They get the texts of the folder's
        ``corpus.jsonl`` that labels or runs name.

        Args:
            retrievers: The labels are checked against the first.

        Returns:
            These labels with notes on what the corpus lacks, and the counts of queries and of
            labelled passages that it does not hold.

        Raises:
            DataError: the labels belong to another corpus.
        """
        from calibration.data.dataset import named_passages, unknown_passages
        from calibration.data.label_check import check_ids, check_texts
        from calibration.retrievers import RankingSource, RecordedRankings

        dataset, answerable = self.dataset, len(self.dataset.answerable)
        counts = {
            "queries": len(dataset),
            "answerable": answerable,
            "without_relevant": len(dataset) - answerable,
        }
        notes = self.notes
        found: dict[str, Passage] | None = None
        external = [each for each in retrievers if isinstance(each, RankingSource)]
        if external:
            runs = [each.retriever for each in external]
            of_runs = [each.passage_ids for each in runs if isinstance(each, RecordedRankings)]
            found, unread = self._passages(named_passages(dataset).union(*of_runs))
            notes += unread
            for each in external:
                each.add_passages((found or {}).values())
        retriever = retrievers[0]
        if isinstance(retriever, RankingSource):
            if found is None:
                return replace(self, notes=notes), counts
            counts["unknown_passages"] = len(unknown_passages(dataset, found))
            notes += check_ids(dataset, found, str(self.corpus))
            return replace(self, notes=notes), counts
        if isinstance(retriever, ctxguard.HybridRetriever):
            labelled, present = retriever.labelled_ids, frozenset(retriever.passage_ids)
        else:  # an engine may hold billions: look only for ids that the labels use
            labelled = retriever.labelled_ids(named_passages(dataset))
            present = retriever.known_ids(labelled)
        counts["unknown_passages"] = len(unknown_passages(dataset, labelled))
        notes += check_ids(dataset, labelled)
        if self.corpus is not None:
            notes += check_texts(dataset, self.corpus, present, retriever.passage)
        return replace(self, notes=notes), counts

    def texts(self) -> tuple[dict[str, str], list[str]]:
        """Return the texts of labelled passages that their corpus holds, and notes."""
        from calibration.data.dataset import named_passages

        found, notes = self._passages(named_passages(self.dataset))
        return {name: passage.text for name, passage in (found or {}).items()}, [*notes]

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


def open_labelled(
    settings: "IndexSystem", data: Path, split: str, output: Output
) -> "tuple[Labelled, dict[str, int], Any]":
    """Read labelled queries, and open a command's system for them.

    Args:
        settings: The command's settings: a `System`, or only the name of an index.
        data: See `read_labelled`.
        split: See `read_labelled`.
        output: Shows progress.

    Returns:
        The labels, the counts of ``against``, and the retriever.
    """
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
    return *labelled.against(source), source


def read_labelled(data: Path, preferred: str, relevant_from: int = 1) -> Labelled:
    """Read labelled queries.

    Args:
        data: A BEIR folder, the file of one of its splits, or a JSONL file.
        preferred: The split to read from a folder, if it has it; otherwise its only one.
        relevant_from: The least grade of a relevant passage.

    Raises:
        DataError: the data cannot be read, or the folder has several other splits; the message
            names file and line.
    """
    from calibration.data.readers import default_split, read_beir, read_jsonl, splits

    split: str | None = None
    taken: tuple[str, ...] = ()
    if data.suffix == ".tsv" and data.parent.name == "qrels":
        data, split = data.parent.parent, data.stem
    elif not data.is_dir():
        dataset = read_jsonl(data, relevant_from=relevant_from)
        return Labelled(dataset, None, None, (), dataset.notes)
    if split is None:
        split, taken = default_split(data, preferred)
    dataset = read_beir(data, split, relevant_from=relevant_from)
    notes = [*taken, *dataset.notes]
    others = []
    for other in splits(data):
        if other != split:
            try:
                others.append(read_beir(data, other, relevant_from=relevant_from))
            except DataError as error:
                notes.append(f"questions shared with the split {other!r} are unknown: {error}")
    return Labelled(dataset, split, data / "corpus.jsonl", tuple(others), tuple(notes))


def shared_questions(labelled: Labelled) -> tuple[str, ...]:
    """Write a line for each other split that contains questions of this one."""
    from calibration.data.dataset import same_text

    lines = []
    for other in labelled.others:
        pairs = same_text(labelled.dataset, other)
        if pairs:
            first, second = pairs[0]
            n_shared = len({pair[0] for pair in pairs})
            lines.append(
                f"{n_shared} of {len(labelled.dataset)} questions are also in {other.name} (the "
                f"first, {first!r}, is {second!r} there)"
            )
    return tuple(lines)


def seen_in_calibration(labelled: Labelled, profile: "Profile") -> tuple[str, ...]:
    """Write a line if the profile was calibrated on some of these questions."""
    from calibration.data.dataset import same_text

    made_on = profile.provenance.dataset_digest
    if labelled.dataset.digest() == made_on:
        line = "the profile was calibrated on these queries, so figures on them are optimistic"
        return (line,)
    for other in labelled.others:
        if other.digest() == made_on:
            seen = {pair[1] for pair in same_text(other, labelled.dataset)}
            line = (
                f"the profile was calibrated on {other.name}, which contains {len(seen)} of these "
                f"{len(labelled.dataset)} questions, so figures on them are optimistic"
            )
            return (line,) if seen else ()
    return ()


def compared(profile: "Profile", retriever: "Source") -> "SystemComparison":
    """Compare the profile's system with this retriever under the profile's fusion."""
    from ctxguard.profile.comparison import compare_systems

    fused = retriever.with_fusion(profile.fusion)
    return compare_systems(profile, fused.fingerprint(), fused.corpus_sketch())


def fitted(profile: "Profile", retriever: "Source") -> "Source":
    """Return the retriever with the profile's fusion.

    Raises:
        ProfileMismatchError: the profile was calibrated on another system.
    """
    mismatches = compared(profile, retriever).mismatches
    if mismatches:
        raise ProfileMismatchError(mismatches)
    return retriever.with_fusion(profile.fusion)


def on_route(retriever: "Source", route: Route) -> "Source":
    """Return an index with these stages; a wrapped retriever has no choice, and stays as it is."""
    view: Source = retriever.on_route(route) if hasattr(retriever, "on_route") else retriever
    return view


def served_route(retriever: "Source", profile: "Profile | None") -> Route:
    """Return the stages that answer; for a wrapped retriever, those of the profile."""
    if profile is None or retriever.route is not Route.EXTERNAL or len(profile.routes) != 1:
        return retriever.route
    return next(iter(profile.routes))


def replayed(
    source: "Source",
    dataset: "Dataset",
    output: Output,
    *,
    depth: int,
    name: str = "hybrid",
    columns: Sequence[SignalColumn] = (),
) -> "Pools":
    """Send every query through a retriever once, with a bar of progress."""
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


def served_depth(depth: int | None, k: int, profile: "Profile | None") -> int:
    """Return the depth: the one asked for, else the number a guard retrieves.

    Candidates are scored relative to one another, so the depth affects the order: to see the first
    k as served, retrieve at the serving depth.

    Raises:
        ConfigurationError: the depth asked for is less than k.
    """
    if depth is None:
        return max(k, DEFAULT_DEPTH if profile is None else profile.provenance.depth)
    if depth < k:
        raise ConfigurationError(f"depth {depth} is less than k = {k}")
    return depth


def notes_on_pools(pools: "Pools", route: Route, run: Path | None) -> list[str]:
    """Note queries left out or missing from the run, and stages that answered instead.

    Args:
        pools: The retrieved candidates.
        route: The stages whose policy applies.
        run: The run that it comes from; None for another retriever.
    """
    from calibration.pools import notes_on_themselves

    notes = [f"left out: {line}" for line in pools.skipped]
    notes += notes_on_themselves([pools])
    if pools.route is not route:
        notes.append(
            f"the retriever answered with {pools.route.value}, but the policy measured is that of "
            f"{route.value}: set the key route"
        )
    missing = [name for name, n in zip(pools.query_ids, pools.lengths, strict=True) if not n]
    if missing and run is not None:
        notes.append(
            f"the run has no candidates for {len(missing):,} queries, such as {missing[0]!r}: they "
            "count as empty contexts"
        )
    return notes

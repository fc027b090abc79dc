"""Inputs that several commands read: labelled queries, an index with its models, a profile."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ctxguard
from ctxguard.cli._system import Source
from ctxguard.core.types import DEFAULT_K
from ctxguard.errors import ConfigurationError, DataError, ProfileMismatchError

if TYPE_CHECKING:
    from calibration.data.dataset import Dataset
    from ctxguard import HybridRetriever, Profile
    from ctxguard.integrations.engines.retriever import EngineRetriever
    from ctxguard.profile.comparison import SystemComparison

DEFAULT_BASELINE = f"k={DEFAULT_K}"
"""Baseline of recall loss, the same as in calibration."""

_BASELINE = re.compile(r"k=([1-9]\d{0,5})")


@dataclass(frozen=True)
class Labelled:
    """Labelled queries with notes about them.

    Attributes:
        dataset: The queries and labels.
        split: Name of the split of a BEIR folder; None for a JSONL file, which has no splits.
        corpus: The folder's own corpus, which the labels belong to; None for a JSONL file.
        others: The other splits of the folder.
        notes: Repairs and choices made while reading, one line each.
    """

    dataset: "Dataset"
    split: str | None
    corpus: Path | None
    others: "tuple[Dataset, ...]"
    notes: tuple[str, ...]

    def described(self, counts: Mapping[str, int]) -> str:
        """The counts of ``against`` in words."""
        return (
            f"{counts['queries']:,} of {self.dataset.name}: {counts['answerable']:,} answerable, "
            f"{counts['without_relevant']:,} without a relevant passage"
        )

    def against(self, retriever: "Source") -> "tuple[Labelled, dict[str, int]]":
        """Check that the labels belong to the index; other systems do not tell theirs.

        Returns:
            These labels with notes on what the index lacks, and the counts of queries and of
            labelled passages that it does not hold.

        Raises:
            DataError: they belong to another corpus.
        """
        from calibration.data.dataset import unknown_passages
        from calibration.retrievers import RankingSource

        dataset = self.dataset
        answerable = len(dataset.answerable)
        counts = {
            "queries": len(dataset),
            "answerable": answerable,
            "without_relevant": len(dataset) - answerable,
        }
        if isinstance(retriever, RankingSource):
            return self, counts
        unknown = unknown_passages(dataset, _labelled_ids(dataset, retriever))
        counts["unknown_passages"] = len(unknown)
        notes = (*self.notes, *label_notes(dataset, self.corpus, retriever))
        return replace(self, notes=notes), counts


def _labelled_ids(
    dataset: "Dataset", retriever: "HybridRetriever | EngineRetriever"
) -> frozenset[str]:
    """The ids that labels may name; of an engine, whose ids may be billions, those that they do."""
    from calibration.data.dataset import named_passages

    if isinstance(retriever, ctxguard.HybridRetriever):
        return retriever.labelled_ids
    return retriever.labelled_ids(named_passages(dataset))


def _passage_ids(
    labelled: frozenset[str], retriever: "HybridRetriever | EngineRetriever"
) -> frozenset[str]:
    """The ids of passages; of an engine, those among the labelled ones."""

    if isinstance(retriever, ctxguard.HybridRetriever):
        return frozenset(retriever.passage_ids)
    return retriever.known_ids(labelled)


def label_notes(
    dataset: "Dataset", corpus: Path | None, retriever: "HybridRetriever | EngineRetriever"
) -> tuple[str, ...]:
    """Notes on labelled passages that the index lacks, or has with another text.

    Args:
        dataset: The labels.
        corpus: The file of their own corpus, to compare the texts with.
        retriever: The index.

    Raises:
        DataError: the labels belong to another corpus.
    """
    from calibration.data.label_check import check_ids, check_texts

    labelled = _labelled_ids(dataset, retriever)
    notes = check_ids(dataset, labelled)
    if corpus is not None:
        notes += check_texts(dataset, corpus, _passage_ids(labelled, retriever), retriever.passage)
    return notes


def baseline_k(baseline: str) -> int | None:
    """Parse a baseline: N for ``k=N``, None for ``pool``.

    Raises:
        ConfigurationError: it has another form.

    >>> baseline_k("k=10"), baseline_k("pool")
    (10, None)
    """
    if baseline == "pool":
        return None
    match = _BASELINE.fullmatch(baseline)
    if match is None:
        raise ConfigurationError(f"baseline {baseline!r} is neither pool nor k=N, such as k=10")
    return int(match[1])


def read_labelled(data: Path, preferred: str) -> Labelled:
    """Read labelled queries.

    Args:
        data: A BEIR folder, the file of one of its splits, or a JSONL file.
        preferred: The split to read from a folder, if it has it; otherwise its only one.

    Raises:
        DataError: the data cannot be read, or the folder has several other splits; the message
            names file and line.
    """
    from calibration.data.readers import default_split, read_beir, read_jsonl, splits

    split: str | None = None
    taken: tuple[str, ...] = ()
    if is_split(data):
        data, split = data.parent.parent, data.stem
    elif not data.is_dir():
        dataset = read_jsonl(data)
        return Labelled(dataset, None, None, (), dataset.notes)
    if split is None:
        split, taken = default_split(data, preferred)
    dataset = read_beir(data, split)
    notes = [*taken, *dataset.notes]
    others = []
    for other in splits(data):
        if other != split:
            try:
                others.append(read_beir(data, other))
            except DataError as error:
                notes.append(f"questions shared with the split {other!r} are unknown: {error}")
    return Labelled(dataset, split, data / "corpus.jsonl", tuple(others), tuple(notes))


def is_split(data: Path) -> bool:
    """Whether a path is the file of one split of a BEIR folder."""
    return data.suffix == ".tsv" and data.parent.name == "qrels"


def shared_questions(labelled: Labelled) -> tuple[str, ...]:
    """A line for each other split that contains questions of this one."""
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
    """A line if the profile is known to have been calibrated on some of these questions."""
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
    """The profile's system compared with this retriever under the profile's fusion."""
    from ctxguard.profile.comparison import compare_systems

    fused = retriever.with_fusion(profile.fusion)
    return compare_systems(profile, fused.fingerprint(), fused.corpus_sketch())


def fitted(profile: "Profile", retriever: "Source") -> "Source":
    """The retriever with the profile's fusion.

    Raises:
        ProfileMismatchError: the profile was calibrated on another system.
    """
    mismatches = compared(profile, retriever).mismatches
    if mismatches:
        raise ProfileMismatchError(mismatches)
    return retriever.with_fusion(profile.fusion)

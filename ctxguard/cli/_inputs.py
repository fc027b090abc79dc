"""What several commands read: labelled queries, an index with its models, a profile that fits."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxguard.errors import ConfigurationError, DataError, ProfileMismatchError

if TYPE_CHECKING:
    from calibration.labelling.datasets import Dataset
    from ctxguard.profile import Profile
    from ctxguard.retrieval.hybrid import HybridRetriever


DEFAULT_BASELINE = "k=10"
"""What recall loss is relative to, as calibration has it."""

_BASELINE = re.compile(r"k=([1-9]\d{0,5})")


@dataclass(frozen=True)
class Labelled:
    """Labelled queries, and what is to be said of them.

    Attributes:
        split: Of a BEIR folder; None for a JSONL file, which has no splits.
        others: The folder's other splits.
        notes: What was mended or chosen on the way, one readable line each.
    """

    dataset: "Dataset"
    split: str | None
    others: "tuple[Dataset, ...]"
    notes: tuple[str, ...]

    def described(self, counts: Mapping[str, int]) -> str:
        """What ``counts`` found, in words."""
        return (
            f"{counts['queries']:,} of {self.dataset.name}: {counts['answerable']:,} answerable, "
            f"{counts['without_relevant']:,} without a relevant passage; "
            f"{counts['unknown_passages']:,} labelled passages are not in the index"
        )

    def counts(self, retriever: "HybridRetriever") -> dict[str, int]:
        """How many queries and labels there are, and how many cannot be found here.

        Raises:
            DataError: the index holds none of the labelled passages.
        """
        from calibration.labelling.datasets import unknown_passages

        dataset = self.dataset
        labelled = {passage for grades in dataset.qrels.values() for passage in grades}
        unknown = unknown_passages(dataset, retriever.passage_ids)
        if labelled and labelled.issubset(unknown):
            raise DataError(
                f"{dataset.name}: the index holds none of the {len(labelled)} labelled passages, "
                f"first {unknown[0]!r}; these labels belong to another corpus"
            )
        answerable = len(dataset.answerable)
        return {
            "queries": len(dataset),
            "answerable": answerable,
            "without_relevant": len(dataset) - answerable,
            "unknown_passages": len(unknown),
        }


def baseline_k(baseline: str) -> int | None:
    """The k of a baseline written ``k=N``; None for the whole ``pool``.

    Raises:
        ConfigurationError: it is written otherwise.

    >>> baseline_k("k=10"), baseline_k("pool")
    (10, None)
    """
    if baseline == "pool":
        return None
    match = _BASELINE.fullmatch(baseline)
    if match is None:
        raise ConfigurationError(f"the baseline {baseline!r} is neither pool nor k=N, such as k=10")
    return int(match[1])


def read_labelled(data: Path, split: str | None, preferred: str) -> Labelled:
    """Labelled queries of a BEIR folder or of a JSONL file.

    Args:
        data: The folder or the file.
        split: None for the preferred one where there is one, else the only one.
        preferred: A split's name.

    Raises:
        DataError: what cannot be read, with file and line.
        ConfigurationError: no split is named and there are several, or a file has none.
    """
    from calibration.labelling.datasets import read_beir, read_jsonl, splits

    if not data.is_dir():
        if split is not None:
            raise ConfigurationError(
                f"--split {split}: {data} is a file, and only a BEIR folder has splits"
            )
        dataset = read_jsonl(data)
        return Labelled(dataset, None, (), dataset.notes)
    known = splits(data)
    notes = []
    if split is None:
        if preferred in known:
            split = preferred
        elif len(known) == 1:
            split = known[0]
            notes.append(f"{data} has no split {preferred!r}; {split!r}, its only one, is used")
        else:
            raise ConfigurationError(
                f"{data} has no split {preferred!r}; name one with --split: {', '.join(known)}"
            )
    dataset = read_beir(data, split)
    notes += dataset.notes
    others = []
    for other in known:
        if other != split:
            try:
                others.append(read_beir(data, other))
            except DataError as error:
                notes.append(f"the split {other!r} cannot be compared with this one: {error}")
    return Labelled(dataset, split, tuple(others), tuple(notes))


def shared_questions(labelled: Labelled) -> tuple[str, ...]:
    """Which other splits ask questions of this one, one readable line each."""
    from calibration.labelling.datasets import same_text

    lines = []
    for other in labelled.others:
        pairs = same_text(labelled.dataset, other)
        if pairs:
            first, second = pairs[0]
            lines.append(
                f"{len({pair[0] for pair in pairs})} of {len(labelled.dataset)} questions are in "
                f"{other.name} too (first: {first!r} there is {second!r})"
            )
    return tuple(lines)


def seen_in_calibration(labelled: Labelled, profile: "Profile") -> tuple[str, ...]:
    """Whether a profile was calibrated on some of these questions, as far as that can be known."""
    from calibration.labelling.datasets import same_text

    made_on = profile.provenance.dataset_digest
    if labelled.dataset.digest() == made_on:
        line = "the profile was calibrated on these very queries: figures on them are optimistic"
        return (line,)
    for other in labelled.others:
        if other.digest() == made_on:
            seen = {pair[1] for pair in same_text(other, labelled.dataset)}
            line = (
                f"the profile was calibrated on {other.name}, which asks {len(seen)} of these "
                f"{len(labelled.dataset)} questions too: figures on them are optimistic"
            )
            return (line,) if seen else ()
    return ()


def open_index(folder: Path, reranker: str | None) -> "HybridRetriever":
    """A saved index with its embedder, and a reranker where one is named."""
    from ctxguard.retrieval.hybrid import HybridRetriever
    from ctxguard.retrieval.reranker import CrossEncoderReranker

    return HybridRetriever.load(
        folder, reranker=None if reranker is None else CrossEncoderReranker(reranker)
    )


def differences(profile: "Profile", retriever: "HybridRetriever") -> tuple[str, ...]:
    """What differs between the profile's system and this one under the profile's fusion."""
    from ctxguard.profile import fingerprint_differences

    fused = retriever.with_fusion(profile.fusion)
    return fingerprint_differences(profile.fingerprint, fused.fingerprint())


def fitted(profile: "Profile", retriever: "HybridRetriever") -> "HybridRetriever":
    """The retriever under the profile's fusion.

    Raises:
        ProfileMismatchError: the profile was made on another system.
    """
    found = differences(profile, retriever)
    if found:
        raise ProfileMismatchError(found)
    return retriever.with_fusion(profile.fusion)


def cache_folder() -> Path:
    """Where ctxguard keeps what it can make again, by the XDG base directory specification."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "ctxguard"

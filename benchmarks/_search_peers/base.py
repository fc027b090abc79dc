"""What an adapter does for the benchmark, and what most of them share."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from benchmarks._search_data import Corpus

K = 10
DEPTH = 100

Legs = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Surroundings:
    """What an adapter may use.

    Attributes:
        folder: Empty, for files of its own.
        build_threads: How many threads a build may use where that can be set.
        threads: How many a search may use where that can be set; libraries that read it from the
            environment were told when the process started.
    """

    folder: Path
    build_threads: int
    threads: int


class SearchPeer:
    """One system under test; rows are positions in the corpus.

    What it writes, and what servers it starts work in, is the folder that it is given.

    Importing an adapter's module imports its system's libraries, so that the memory that they take
    by themselves is not counted as the index's.

    Attributes:
        packages: Distributions whose versions make its figures.
        setting: How it was set up, in a few words.
        clients: What four clients are: ``threads`` of one process over one instance, or
            ``processes`` that each reopen it, where an instance serves one thread only.
        reference: The exact answer that its top 10 is compared with, a name in `Exact`; None
            where it fuses nothing.
    """

    packages: ClassVar[tuple[str, ...]]
    setting: str
    clients: ClassVar[Literal["threads", "processes"]] = "threads"
    reference: ClassVar[Literal["united", "fused"] | None] = "fused"

    def build(self, corpus: Corpus, around: Surroundings) -> dict[str, float]:
        """Index the corpus; returns the seconds of what it did, by name."""
        raise NotImplementedError

    def search(self, at: int) -> list[int]:
        """The best ten rows for a query of the corpus, best first."""
        raise NotImplementedError

    def legs(self, at: int) -> Legs | None:  # noqa: ARG002
        """The best rows of the lexical and of the dense leg; None where it tells only the whole."""
        return None

    def floor_bytes(self) -> int | None:
        """Size of its vectors and postings alone; None where it does not tell."""
        return None

    def reopen(self) -> None:
        """Open what was built once more, in a process that was forked to be a client."""

    def close(self) -> None:
        """Stop what it started."""

"""Compares a system with the one that a profile was calibrated on (DESIGN.md §6). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from ctxguard.core.corpus_sketch import CorpusSketch
from ctxguard.core.types import Flag
from ctxguard.errors import ConfigurationError
from ctxguard.profile import reranker_probe
from ctxguard.profile.schema import Profile

DEFAULT_MAX_CORPUS_CHANGE = 0.3
"""The share of the corpus that may have changed since calibration.

On five collections a new profile was better at 0.7: in UDCG if passages were added around the
relevant ones, in recall if they were added at random. At 0.5 nothing was shown, with few repeats;
0.3 leaves a margin. Even at 0.7 the former profile had more UDCG than the first 5, so it still
applies beyond this share, flagged.
"""

_OF_THE_CORPUS = {"corpus_size", "corpus_digest"}
"""Entries of a fingerprint that change whenever the corpus does."""
_PROBED = {reranker_probe.FINGERPRINT_KEY: "reranker", reranker_probe.RETRIEVER_KEY: "retriever"}
"""Models, by the fingerprint entry that holds their scores of the probe texts."""


@dataclass(frozen=True, slots=True)
class ProfileCheck:
    """How a guard compares its profile with the system it wraps.

    Attributes:
        fingerprint: For a system without a ``fingerprint()``; None uses the system's own.
        corpus_sketch: Likewise; None if nothing tells how much of its corpus has changed.
        max_corpus_change: The share of the corpus, in [0, 1], that may have changed since
            calibration; beyond it the profile still applies and every answer is flagged
            ``corpus_changed``.
        strict: Raise if the profile was made for another system, on a corpus that has changed by
            more than ``max_corpus_change``, or is unverified, instead of flagging every answer.

    Raises:
        ConfigurationError: ``max_corpus_change`` is not a share.
    """

    fingerprint: Mapping[str, str] | None = None
    corpus_sketch: CorpusSketch | None = None
    max_corpus_change: float = DEFAULT_MAX_CORPUS_CHANGE
    strict: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_corpus_change <= 1.0:
            raise ConfigurationError(
                f"max_corpus_change {self.max_corpus_change!r} must lie in [0, 1]: it is a share"
            )


DEFAULT_CHECK = ProfileCheck()


@dataclass(frozen=True, slots=True)
class SystemComparison:
    """A system compared with the one that a profile was calibrated on.

    Attributes:
        mismatches: The differences that make it another system, one readable line each. The
            profile's thresholds do not apply to another system.
        reservations: Why the profile applies but may no longer hold, one readable line each.
        flags: Flags set on every answer under the profile.
    """

    mismatches: tuple[str, ...] = ()
    reservations: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """Everything that differs or cannot be compared; in strict mode any of it is refused."""
        return self.mismatches + self.reservations


def compare_systems(
    profile: Profile,
    fingerprint: Mapping[str, str],
    corpus: CorpusSketch | None,
    max_corpus_change: float = DEFAULT_MAX_CORPUS_CHANGE,
) -> SystemComparison:
    """Compare a system with the one that a profile was calibrated on.

    Fingerprints must be equal. Where both systems have a sketch of their corpus, it replaces the
    entries of the fingerprint that any change of the corpus changes: the profile holds up to a
    share of change, applies with a flag beyond it, and is another system's where no passage is the
    same. A profile without a sketch holds for exactly the corpus that its fingerprint names. A
    profile without a fingerprint applies, flagged ``unverified``, to a system without one.

    Args:
        fingerprint: Identifies the present system; empty if nothing does.
        corpus: A sketch of the system's corpus; None if it gives none.
    """
    expected, aside, change = profile.fingerprint, {*_PROBED}, 0.0
    mismatches: list[str] = []
    reservations: list[str] = []
    if profile.unverified:
        reservations.append(
            "system: it cannot be compared, because the profile was calibrated without a "
            "fingerprint"
        )
    for key, name in _PROBED.items():
        if (then := expected.get(key)) is not None:
            _compare_probed(name, then, fingerprint.get(key), mismatches, reservations)
    if profile.corpus is not None and corpus is not None:
        aside |= _OF_THE_CORPUS
        change = profile.corpus.changed_share(corpus)
        if change == 1.0:
            mismatches.append(
                f"corpus: none of the {profile.corpus.passages:,} passages is in this one"
            )
    elif profile.corpus is not None and "corpus_digest" not in fingerprint:
        reservations.append(
            "corpus: it cannot be compared, because this retriever has no corpus_sketch()"
        )
    same = (
        {key: value for key, value in each.items() if key not in aside}
        for each in (expected, fingerprint)
    )
    mismatches[:0] = fingerprint_differences(*same)
    if mismatches:
        return SystemComparison(tuple(mismatches), (), (Flag.PROFILE_MISMATCH,))
    flags: tuple[Flag, ...] = (Flag.UNVERIFIED,) if reservations else ()
    if profile.corpus is not None and corpus is not None and change > max_corpus_change:
        reservations.append(
            f"corpus: {change:.0%} has changed since calibration, but a profile is valid only up "
            f"to {max_corpus_change:.0%} ({corpus.passages:,} passages, were "
            f"{profile.corpus.passages:,})"
        )
        flags += (Flag.CORPUS_CHANGED,)
    return SystemComparison((), tuple(reservations), flags)


def fingerprint_differences(
    expected: Mapping[str, str], actual: Mapping[str, str]
) -> tuple[str, ...]:
    """List the differences between two systems, one readable line each.

    >>> fingerprint_differences({"embedder": "a", "corpus_size": "3"}, {"embedder": "b"})
    ("corpus_size is absent here, was '3'", "embedder is 'b', was 'a'")
    """
    lines = []
    for key in sorted(expected.keys() | actual.keys()):
        was, now = expected.get(key), actual.get(key)
        if was != now:
            here = "is absent here" if now is None else f"is {now!r}"
            lines.append(f"{key} {here}, was {'absent' if was is None else repr(was)}")
    return tuple(lines)


def _compare_probed(
    name: str, then: str, now: str | None, mismatches: list[str], reservations: list[str]
) -> None:
    """Add a line if a model differs, or cannot be compared."""
    apart = None if now is None else reranker_probe.difference(then, now)
    if now is None:
        reservations.append(f"{name}: its scores of the probe texts are not known here")
    elif apart is None:
        reservations.append(f"{name}: this release has other probe texts; calibrate again")
    elif apart > reranker_probe.MOST_DIFFERENCE:
        mismatches.append(
            f"{name}: its scores of the probe texts differ by {apart:.3g} of their standard "
            "deviation from those at calibration; only "
            f"{reranker_probe.MOST_DIFFERENCE:g} is allowed"
        )

"""Which passages of a sample are judged, and with what probability each of them is.

Every choice is made by a hash of an id, so it is the same wherever, whenever and in whatever order
it is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from ctxguard.core.types import DEFAULT_K
from ctxguard.errors import ConfigurationError

_WHOLE = 2**64


class HashSampler:
    """Selects texts at random, by a hash of each, independently of every other text.

    Args:
        purpose: Selections for different purposes are independent of each other.
        seed: Selects other texts at the same probability.

    >>> sampler = HashSampler("doctest")
    >>> [round(sampler.uniform(f"request-{i}"), 2) for i in range(3)]
    [0.23, 0.22, 0.53]
    >>> [sampler.selects(f"request-{i}", 0.5) for i in range(3)]
    [True, True, False]
    """

    def __init__(self, purpose: str, seed: str = "") -> None:
        key = blake2b(f"{purpose}\0{seed}".encode("utf-8", "surrogatepass"), digest_size=32)
        self._keyed = blake2b(key=key.digest(), digest_size=8)

    def uniform(self, text: str) -> float:
        """Hash ``text`` to a number that is uniform in [0, 1)."""
        return self._number(text) / _WHOLE

    def selects(self, text: str, probability: float) -> bool:
        """Tell whether ``text`` is selected; if so, every higher probability selects it too."""
        return self._number(text) < round(probability * _WHOLE)

    def _number(self, text: str) -> int:
        hashed = self._keyed.copy()
        hashed.update(text.encode("utf-8", "surrogatepass"))
        return int.from_bytes(hashed.digest(), "big")


def check_probability(name: str, probability: float) -> None:
    """Refuse what is no probability.

    Raises:
        ConfigurationError: no number, or one outside [0, 1].
    """
    try:
        is_one = 0.0 <= probability <= 1.0
    except TypeError:
        is_one = False
    if not is_one:
        raise ConfigurationError(f"{name} {probability!r} must lie in [0, 1]: it is a probability")


@dataclass(frozen=True, slots=True)
class JudgingRates:
    """How much of what was dropped is judged, beside all that was served. Rates lie in [0, 1].

    Attributes:
        dropped_rate: The probability with which each dropped passage is judged by itself. Pooled
            recall rests on it.
        full_pool_rate: The probability with which all dropped passages of a request are judged.
            The mean recall of requests and the rise of a policy in shadow rest on it.
        full_pool_rate_if_no_hit: The same for a request that was served nothing relevant, no
            lower than ``full_pool_rate``: whether the pool held anything can only be told from all
            of it. These requests are few.
        baseline_rate: The probability with which all of the retriever's first ``baseline_k`` are
            judged. The recall loss that a certificate bounds, and so the alarm, rests on it.
        baseline_k: What the certificate's recall loss is relative to, ≥ 1.

    Raises:
        ConfigurationError: at construction, for a value out of its range.
    """

    dropped_rate: float = 0.2
    full_pool_rate: float = 0.05
    full_pool_rate_if_no_hit: float = 1.0
    baseline_rate: float = 0.2
    baseline_k: int = DEFAULT_K

    def __post_init__(self) -> None:
        for name in ("dropped_rate", "full_pool_rate", "full_pool_rate_if_no_hit", "baseline_rate"):
            check_probability(f"judging rate {name}", getattr(self, name))
        if self.full_pool_rate_if_no_hit < self.full_pool_rate:
            raise ConfigurationError(
                f"judging rate full_pool_rate_if_no_hit {self.full_pool_rate_if_no_hit!r} must be "
                f"at least full_pool_rate {self.full_pool_rate!r}"
            )
        if self.baseline_k < 1:
            raise ConfigurationError(f"judging baseline_k {self.baseline_k!r} must be at least 1")

    def full_pool_probability(self, *, has_hit: bool) -> float:
        """Return the probability with which all dropped passages of a request are judged.

        Args:
            has_hit: Whether a relevant passage was served.
        """
        if self.dropped_rate == 1.0:
            return 1.0
        return self.full_pool_rate if has_hit else self.full_pool_rate_if_no_hit

    def first_probability(self, k: int) -> float:
        """Return the probability with which the retriever's first k are all judged by design.

        A pool that is judged because nothing relevant was served does not count.
        """
        if self.dropped_rate == 1.0:
            return 1.0
        baseline = self.baseline_rate if k <= self.baseline_k else 0.0
        return 1.0 - (1.0 - self.full_pool_rate) * (1.0 - baseline)

    def dropped_probability(self, *, has_hit: bool, in_baseline: bool) -> float:
        """Return the probability with which a dropped passage is judged, in any of the three ways.

        Args:
            has_hit: Whether a relevant passage was served.
            in_baseline: Whether the passage is one of the retriever's first ``baseline_k``.
        """
        full_pool = self.full_pool_probability(has_hit=has_hit)
        otherwise = full_pool + (1.0 - full_pool) * self.dropped_rate
        return otherwise + (1.0 - otherwise) * self.baseline_rate if in_baseline else otherwise


DEFAULT_RATES = JudgingRates()


class Inclusion(NamedTuple):
    """What of one request's dropped passages is judged.

    Attributes:
        sampled: Positions of those that are judged by themselves.
        full_pool: Whether all of them are.
        full_pool_if_no_hit: Whether all of them are if nothing relevant was served.
        baseline: Whether all of the retriever's first ``baseline_k`` are.
    """

    sampled: tuple[int, ...]
    full_pool: bool
    full_pool_if_no_hit: bool
    baseline: bool


class InclusionDesign:
    """Decides what of each request is judged.

    Args:
        rates: With what probabilities.
        seed: Of the random choices.
    """

    def __init__(self, rates: JudgingRates = DEFAULT_RATES, *, seed: str = "") -> None:
        self.rates = rates
        self._dropped = HashSampler("dropped", seed)
        self._pool = HashSampler("pool", seed)
        self._baseline = HashSampler("baseline", seed)

    def choose(
        self, request_id: str, passage_ids: Sequence[str], dropped: Sequence[int]
    ) -> Inclusion:
        """Decide what of one request is judged.

        Args:
            passage_ids: Of all candidates.
            dropped: Positions of the dropped ones among them.
        """
        rates = self.rates
        return Inclusion(
            sampled=tuple(
                [
                    position
                    for position in dropped
                    if self._dropped.selects(
                        f"{request_id}\0{passage_ids[position]}", rates.dropped_rate
                    )
                ]
            ),
            full_pool=self._pool.selects(request_id, rates.full_pool_rate),
            full_pool_if_no_hit=self._pool.selects(request_id, rates.full_pool_rate_if_no_hit),
            baseline=self._baseline.selects(request_id, rates.baseline_rate),
        )

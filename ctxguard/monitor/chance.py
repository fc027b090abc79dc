"""Random choices that a hash makes: the same wherever, whenever and in whatever order asked."""

from hashlib import blake2b

from ctxguard.errors import ConfigurationError


class Chance:
    """Chooses each text with one probability, independently of every other text.

    What a probability chooses, every higher one with the same purpose and seed chooses too.

    Args:
        probability: In [0, 1].
        purpose: Choices for different purposes are independent of each other.
        seed: Chooses other texts at the same probability.

    Raises:
        ConfigurationError: a probability outside [0, 1].

    >>> half = Chance(0.5, purpose="doctest")
    >>> [half.chooses(f"request-{i}") for i in range(4)]
    [True, True, False, True]
    """

    def __init__(self, probability: float, *, purpose: str, seed: str = "") -> None:
        if not 0.0 <= probability <= 1.0:
            raise ConfigurationError(
                f"{purpose} rate {probability!r} must lie in [0, 1]: it is a probability"
            )
        self.probability = probability
        self._below = round(probability * 2**64)
        key = blake2b(f"{purpose}\0{seed}".encode("utf-8", "surrogatepass"), digest_size=32)
        self._keyed = blake2b(key=key.digest(), digest_size=8)

    def chooses(self, text: str) -> bool:
        """Whether ``text`` is chosen."""
        hashed = self._keyed.copy()
        hashed.update(text.encode("utf-8", "surrogatepass"))
        return int.from_bytes(hashed.digest(), "big") < self._below

"""Random choices that a hash makes: the same wherever, whenever and in whatever order asked."""

from hashlib import blake2b

from ctxguard.errors import ConfigurationError

_WHOLE = 2**64


class Draw:
    """A uniform number for each text, independent of every other text's.

    Args:
        purpose: Draws for different purposes are independent of each other.
        seed: Gives every text another number.

    >>> [round(Draw("doctest")(f"request-{i}"), 2) for i in range(3)]
    [0.23, 0.22, 0.53]
    """

    def __init__(self, purpose: str, seed: str = "") -> None:
        key = blake2b(f"{purpose}\0{seed}".encode("utf-8", "surrogatepass"), digest_size=32)
        self._keyed = blake2b(key=key.digest(), digest_size=8)

    def __call__(self, text: str) -> float:
        """The number of ``text``, in [0, 1)."""
        return self.below_whole(text) / _WHOLE

    def below_whole(self, text: str) -> int:
        """The same as a whole number below 2**64."""
        hashed = self._keyed.copy()
        hashed.update(text.encode("utf-8", "surrogatepass"))
        return int.from_bytes(hashed.digest(), "big")

    def chooses(self, text: str, probability: float) -> bool:
        """Whether ``text`` is chosen; what a probability chooses, every higher one does too."""
        return self.below_whole(text) < round(probability * _WHOLE)


class Chance:
    """Chooses each text with one probability, independently of every other text.

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
        check_probability(f"{purpose} rate", probability)
        self.probability = probability
        self._below = round(probability * _WHOLE)
        self._draw = Draw(purpose, seed)

    def chooses(self, text: str) -> bool:
        """Whether ``text`` is chosen."""
        return self._draw.below_whole(text) < self._below


def check_probability(name: str, probability: float) -> None:
    """Refuse what is no probability.

    Raises:
        ConfigurationError: a value outside [0, 1].
    """
    if not 0.0 <= probability <= 1.0:
        raise ConfigurationError(f"{name} {probability!r} must lie in [0, 1]: it is a probability")

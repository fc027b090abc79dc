"""Deals requests to two modes at random, so that live traffic compares a policy with today's."""

from ctxguard.core.types import Mode


class Arms:
    """Enforces a share of requests, and has the others in shadow.

    An id is always dealt to the same arm, and stays enforced when the share grows. Which requests
    are sampled does not depend on their arm.

    Args:
        enforce_share: The share that is enforced, in [0, 1].

    Raises:
        ConfigurationError: a share outside [0, 1].

    >>> [Arms(0.5).of(f"request-{n}")[0].value for n in range(3)]
    ['enforce', 'shadow', 'enforce']
    """

    def __init__(self, enforce_share: float) -> None:
        # Here, since a guard without a share needs nothing of the monitor.
        from ctxguard.monitor.sampling.inclusion import HashSampler, check_probability

        check_probability("enforce_share", enforce_share)
        self._share = enforce_share
        self._hash = HashSampler("enforce")

    def of(self, identity: str) -> tuple[Mode, float]:
        """The mode of a session or request, and the probability with which it has that mode."""
        if self._hash.selects(str(identity), self._share):
            return Mode.ENFORCE, self._share
        return Mode.SHADOW, 1.0 - self._share

"""The verdicts SAFE, RISKY and DANGEROUS: whether contexts help more than they harm.

Pure: no I/O, no clock, no logging.
"""

from dataclasses import dataclass
from typing import Literal

from calibration.evaluate import CONFIDENCE
from ctxguard.core.interval import Interval
from ctxguard.errors import ConfigurationError

Verdict = Literal["SAFE", "RISKY", "DANGEROUS"]


@dataclass(frozen=True)
class VerdictRule:
    """The limits at which a candidate's contexts are called safe or dangerous.

    The share of harm is mean harm / (mean gain + mean harm) in strict UDCG. It depends on labels
    and ranks alone, so that no scale of scores can make a candidate look safe.

    Attributes:
        safe: Safe if the upper end of the share's interval is at most this, in [0, 1].
        dangerous: Dangerous if the lower end is at least this, in [safe, 1]. At 0.5 harm is as
            large as gain, so an empty context is as good.
        fewest: Minimum number of queries; with fewer a candidate is risky whatever its interval:
            a bootstrap of a few queries is too narrow.
    """

    safe: float = 0.33
    dangerous: float = 0.5
    fewest: int = 20

    def __post_init__(self) -> None:
        if not 0.0 <= self.safe <= self.dangerous <= 1.0:
            raise ConfigurationError(
                f"the limits safe {self.safe!r} and dangerous {self.dangerous!r} must rise within "
                "[0, 1]: they are shares of harm"
            )

    @property
    def sentences(self) -> tuple[str, ...]:
        """State the rule, one sentence for each verdict."""
        interval = f"the {CONFIDENCE:.0%} interval of the share of harm"
        empty = " (an empty context is as good)" if self.dangerous >= 0.5 else ""
        return (
            f"SAFE: {interval} ends at {self.safe:g} or below.",
            f"DANGEROUS: {interval} begins at {self.dangerous:g} or above{empty}.",
            f"RISKY: anything else, and everything measured on fewer than {self.fewest} queries.",
        )

    def verdict(self, share: Interval) -> Verdict | None:
        """Return the verdict on a share of harm; None without an interval.

        >>> VerdictRule().verdict(Interval(value=0.2, lower=0.1, upper=0.3, n=50))
        'SAFE'
        """
        if share.bounds is None:
            return None
        lower, upper = share.bounds
        if share.n < self.fewest:
            return "RISKY"
        if upper <= self.safe:
            return "SAFE"
        return "DANGEROUS" if lower >= self.dangerous else "RISKY"


DEFAULT_RULE = VerdictRule()

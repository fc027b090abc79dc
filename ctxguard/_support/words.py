"""Writes numbers for use in sentences. Pure."""

import re


def count(n: int, noun: str) -> str:
    """Say how many, in the singular if there is one.

    >>> count(1, "query"), count(1200, "query"), count(0, "day")
    ('1 query', '1,200 queries', '0 days')
    """
    if n != 1:
        noun = re.sub(r"(?<![aeiou])y$", "ie", noun) + "s"
    return f"{n:,} {noun}"


def figure(value: float, digits: int = 3, sign: str = "") -> str:
    """Write a number as people read it: at most three digits if it has a fraction.

    >>> figure(0.04786), figure(6.583), figure(65.83), figure(1566.4)
    ('0.048', '6.58', '65.8', '1,566')
    >>> figure(-0.0001, sign="+"), figure(9.996), figure(0.81, 2)
    ('+0.000', '10.0', '0.81')
    """
    # Rounded first: 9.996 becomes 10.0, with one decimal fewer. No zero is negative.
    size = abs(float(f"{value:.3g}"))
    whole = len(str(int(size))) if size >= 1.0 else 0
    digits = max(min(digits, 3 - whole), 0)
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}"


def amount(value: float) -> str:
    """Write how many passages or tokens a context holds on average.

    >>> amount(10.0), amount(6.583), amount(1566.4)
    ('10', '6.6', '1,566')
    """
    return figure(value, 1).removesuffix(".0")


def signed(value: float | None) -> str:
    """Write a difference with its sign and three digits; ``unknown`` for None."""
    return "unknown" if value is None else figure(value, sign="+")

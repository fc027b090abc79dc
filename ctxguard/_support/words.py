"""Numbers in sentences."""


def count(n: int, noun: str) -> str:
    """Say how many, in the singular where there is one.

    >>> count(1, "question"), count(1200, "question")
    ('1 question', '1,200 questions')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def signed(value: float | None) -> str:
    """Write a difference with its sign and three digits.

    >>> signed(0.0478649), signed(-0.0001), signed(None)
    ('+0.048', '+0.000', 'unknown')
    """
    return "unknown" if value is None else f"{round(value, 3) + 0.0:+.3f}"

"""Numbers in sentences."""


def count(n: int, noun: str) -> str:
    """Say how many, in the singular where there is one.

    >>> count(1, "question"), count(1200, "question")
    ('1 question', '1,200 questions')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"

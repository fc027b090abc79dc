"""Keyword relevance without labels: how early the words that an answer needs turn up.

Pure: no I/O, no clock, no logging.
"""

import re
from collections.abc import Sequence

from ctxguard.core.metrics.arithmetic import check_k, mean, share
from ctxguard.errors import ConfigurationError


def keyword_first_ranks(keywords: Sequence[str], texts: Sequence[str]) -> list[int | None]:
    """Return the 1-based rank of the first text that holds each keyword; None if none does.

    Matches whole words, ignoring case; any white space may separate the words of a phrase.

    Raises:
        ConfigurationError: a keyword is empty.

    >>> keyword_first_ranks(["cat", "tom cat"], ["Concatenate", "Tom\\n Cat and CAT"])
    [2, 2]
    """
    folded = [text.casefold() for text in texts]
    ranks: list[int | None] = []
    for keyword in keywords:
        words = keyword.casefold().split()
        if not words:
            raise ConfigurationError(f"keyword {keyword!r} is empty; leave it out")
        whole = re.compile(r"(?<!\w)" + r"\s+".join(map(re.escape, words)) + r"(?!\w)")
        ranks.append(
            next((rank for rank, text in enumerate(folded, 1) if whole.search(text)), None)
        )
    return ranks


def keyword_reciprocal_rank(first_ranks: Sequence[int | None]) -> float | None:
    """Return the mean over the keywords of 1 / first rank, 0 if not found; None without keywords.

    >>> keyword_reciprocal_rank([1, 2, None, None])
    0.375
    """
    return mean(1.0 / rank if rank else 0.0 for rank in first_ranks).value


def keyword_recall_at_k(first_ranks: Sequence[int | None], k: int) -> float | None:
    """Return the share of the keywords that the top k holds; None without keywords.

    >>> keyword_recall_at_k([1, 3, 5, None], k=3)
    0.5
    """
    check_k(k)
    return share(sum(rank is not None and rank <= k for rank in first_ranks), len(first_ranks))

"""Which passages of a question people grade where nothing is labelled: the heads of all routes.

Pure: rankings and grades in, passages out.
"""

import hashlib
from collections.abc import Container, Mapping, Sequence

FIRST = 5
"""Of today's order so many are graded always: fewer could not be compared with what is served."""
OF_OTHERS = 2
"""Of every other route likewise: what one route ranks high and another does not is what a choice
among them is about."""
HEAD = 7
"""All of these together, where the routes hardly agree."""
STEP = 4
"""Further passages are asked about in steps of so many."""
MOST = 20
"""No question asks for more."""

Steps = tuple[tuple[str, ...], ...]


def pooled(question: str, rankings: Sequence[Sequence[str]]) -> Steps:
    """Pool the candidates of a question, in the steps in which they are graded.

    Inside a step they stand by a hash of question and passage, so that nobody who grades sees who
    ranks them where.

    Args:
        question: Its text.
        rankings: Passage ids of each route, best first, today's first.

    >>> steps = pooled("?", [list("abcdefgh"), list("zyxw")])
    >>> sorted(steps[0]), sorted(steps[1])
    (['a', 'b', 'c', 'd', 'e', 'y', 'z'], ['f', 'g', 'h', 'x'])
    """
    today, *others = rankings
    first = _by_turns([each[:OF_OTHERS] for each in others])
    head = list(dict.fromkeys([*today[:FIRST], *first]))[:HEAD]
    all_in_turn = list(dict.fromkeys([*head, *first, *_by_turns([today[FIRST:], *others])]))[:MOST]
    starts = range(len(head), len(all_in_turn), STEP)
    steps = [all_in_turn[: len(head)], *(all_in_turn[at : at + STEP] for at in starts)]
    return tuple(tuple(sorted(step, key=lambda one: _order(question, one))) for step in steps)


def to_grade(steps: Steps, grades: Mapping[str, int]) -> list[str]:
    """List the passages that are to be graded as far as the grades so far tell, in order.

    The first step always; a further one once all before it are graded, while the last of them held
    a relevant passage. Where the first held none, one more is looked at.

    Args:
        steps: Those of `pooled`.
        grades: By passage id; more than 0 is relevant.

    >>> to_grade((("a", "b"), ("c",), ("d",)), {"a": 0, "b": 1, "c": 0})
    ['a', 'b', 'c']
    """
    asked: list[str] = []
    for place, step in enumerate(steps):
        asked += step
        is_relevant = any(grades.get(one, 0) > 0 for one in step)
        if not _all_in(step, grades) or (place > 0 and not is_relevant):
            break
    return asked


def _by_turns(rankings: Sequence[Sequence[str]]) -> list[str]:
    longest = max(map(len, rankings), default=0)
    return [each[rank] for rank in range(longest) for each in rankings if rank < len(each)]


def _all_in(step: Sequence[str], grades: Container[str]) -> bool:
    return all(one in grades for one in step)


def _order(question: str, passage_id: str) -> bytes:
    return hashlib.sha256(f"{question}\0{passage_id}".encode("utf-8", "replace")).digest()

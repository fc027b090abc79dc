"""Chooses the passages people grade for an unlabelled question: the top ones of every route.

Pure: rankings and grades in, passages out.
"""

import hashlib
from collections.abc import Mapping, Sequence

FIRST = 5
"""How many of today's first passages are always graded: fewer give nothing to compare with what is
served."""
OF_OTHERS = 2
"""The same for every other route: a choice between routes depends on passages that one ranks high
and another does not."""
HEAD = 7
"""The most passages of the first step, when the routes hardly agree."""
STEP = 4
"""The size of each further step."""
MOST = 20
"""The most passages graded for any question."""

Steps = tuple[tuple[str, ...], ...]


def pooled(question: str, rankings: Sequence[Sequence[str]]) -> Steps:
    """Pool the candidates of a question, in the steps in which they are graded.

    Within a step they are ordered by a hash of question and passage, so that graders cannot see
    their ranks. The rankings are passage ids of each route, best first; today's comes first.

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
    """List the passages to grade, in order, as far as the grades so far determine them.

    The first step is always graded; a further one once all before it are, if the last of these held
    a relevant passage (of a grade over 0). If the first held none, one more is graded.

    >>> to_grade((("a", "b"), ("c",), ("d",)), {"a": 0, "b": 1, "c": 0})
    ['a', 'b', 'c']
    """
    asked: list[str] = []
    for place, step in enumerate(steps):
        asked += step
        is_relevant = any(grades.get(one, 0) > 0 for one in step)
        if not grades.keys() >= set(step) or (place > 0 and not is_relevant):
            break
    return asked


def _by_turns(rankings: Sequence[Sequence[str]]) -> list[str]:
    longest = max(map(len, rankings), default=0)
    return [each[rank] for rank in range(longest) for each in rankings if rank < len(each)]


def _order(question: str, passage_id: str) -> bytes:
    return hashlib.sha256(f"{question}\0{passage_id}".encode("utf-8", "replace")).digest()

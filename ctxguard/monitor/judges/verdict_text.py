"""The verdicts on one sample as JSON, the form in which the store keeps them.

For each passage a list of its grade and of how one of grade 0 misleads; a third element, false,
follows if the grade stands for a missing label, and a fourth, the judge's score, if it gave one. A
passage that the judge gave no verdict on has null.
"""

import json
from collections.abc import Iterable, Mapping

from ctxguard.core.metrics import Negative
from ctxguard.errors import DataError
from ctxguard.monitor.judges.protocol import Judgment


def verdicts_to_json(verdicts: Mapping[str, Judgment], missing: Iterable[str] = ()) -> str:
    """Convert verdicts by passage id to JSON, for ``verdicts_from_json``.

    Args:
        verdicts: The valid ones.
        missing: Ids of passages that the judge gave no verdict on.

    >>> verdicts_to_json({"a": Judgment("a", 2)}, ["b"])
    '{"a":[2,null],"b":null}'
    """
    return json.dumps(
        {passage_id: _listed(verdict) for passage_id, verdict in verdicts.items()}
        | dict.fromkeys(missing),
        separators=(",", ":"),
    )


def _listed(verdict: Judgment) -> list[object]:
    score = None if verdict.score is None else round(verdict.score, 4)
    listed: list[object] = [verdict.grade, verdict.negative, verdict.judged, score]
    usual = [None, None, True, None]
    while len(listed) > 2 and listed[-1] == usual[len(listed) - 1]:
        listed.pop()
    return listed


def verdicts_from_json(text: str) -> dict[str, Judgment]:
    """Read the verdicts from a text of ``verdicts_to_json``, without missing ones.

    Raises:
        DataError: it is no such text.
    """
    try:
        return {
            passage_id: Judgment(
                passage_id, int(grade), None if negative is None else Negative(negative), *judged
            )
            for passage_id, verdict in json.loads(text or "{}").items()
            if verdict is not None
            for grade, negative, *judged in [verdict]
        }
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"verdicts cannot be read: {type(error).__name__}") from error

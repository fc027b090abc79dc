"""The verdicts on one sample as JSON, the form in which the store keeps them.

For each passage a list of its grade and of how one of grade 0 misleads; a third element, false,
follows if the grade stands for a missing label.
"""

import json
from collections.abc import Mapping

from ctxguard.core.metrics import Negative
from ctxguard.monitor.judges.protocol import Judgment


def verdicts_to_json(verdicts: Mapping[str, Judgment]) -> str:
    """Convert verdicts by passage id to JSON, for ``verdicts_from_json``.

    >>> verdicts_to_json({"a": Judgment("a", 2)})
    '{"a":[2,null]}'
    """
    return json.dumps(
        {
            passage_id: [verdict.grade, verdict.negative, *([] if verdict.judged else [False])]
            for passage_id, verdict in verdicts.items()
        },
        separators=(",", ":"),
    )


def verdicts_from_json(text: str) -> dict[str, Judgment]:
    """Read the verdicts from a text of ``verdicts_to_json``; empty for an empty text."""
    return {
        passage_id: Judgment(
            passage_id, int(grade), None if negative is None else Negative(negative), *judged
        )
        for passage_id, (grade, negative, *judged) in json.loads(text or "{}").items()
    }

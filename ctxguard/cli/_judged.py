"""Shared by the commands on judged samples: the table by k, the next step, and the order."""

from typing import TYPE_CHECKING, cast

from ctxguard._support.words import count
from ctxguard.cli._console import interval
from ctxguard.cli._tables import TextTable

if TYPE_CHECKING:
    from calibration.from_store import JudgedStore
    from calibration.retrievers import MultiRoute, RankingSource
    from ctxguard.cli._system import Source

RECALL_OF_JUDGED = "of the relevant passages among those judged, not of all that there are"

TO_GRADE = 400
"""How many passages people are first asked to grade."""


def in_first_order(source: "Source") -> "MultiRoute | RankingSource":
    """Put the legs of a retriever in the order that calibration starts from."""
    from calibration.calibrate import default_fusion

    if not hasattr(source, "on_route"):
        return source
    several = cast("MultiRoute", source)
    return several.with_fusion(default_fusion(several))


def by_k(found: "JudgedStore") -> dict[str, object]:
    """Return the table by k as a document."""
    from calibration.judged_candidates import table_by_k

    return {
        "requests": len(found.pools),
        "grades": int(found.is_graded.sum()),
        "failed": found.n_failed,
        "by_k": {
            "in_words": found.in_words,
            "is_corrected": found.is_corrected,
            "rows": [{"k": k, **row} for k, row in table_by_k(found).items()],
        },
    }


def table_of_k(found: "JudgedStore") -> TextTable:
    """Lay the table by k out for a terminal."""
    from calibration.judged_candidates import table_by_k

    rows = [[str(k), *map(interval, row.values())] for k, row in table_by_k(found).items()]
    columns = ["k>", "precision>", "MRR>", "UDCG>", "recall>"]
    return TextTable(columns, rows, found.in_words)


def next_step(found: "JudgedStore") -> list[str]:
    """Say what people should grade next, or that a profile can be made."""
    if not found.lacking:
        return ["`ctxguard calibrate --store` makes a profile of these samples"]
    if found.is_exact:
        lacking = count(found.lacking, "passage")
        return [f"it takes labels of about {lacking} more, of dropped ones too"]
    n = min(TO_GRADE, found.n_judged)
    grade = (
        f"a judge errs: have people grade {count(n, 'passage')} of these, by "
        f"`ctxguard label export -n {n}` or in the console; then `ctxguard calibrate --store` "
        "makes a profile"
    )
    return [grade]

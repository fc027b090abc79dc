"""Measures of a ranking or a context, one query at a time: RR, recall, AP, nDCG, UDCG.

Undefined is None, never 0; ``mean`` averages the defined values and reports their number.
Pure: no I/O, no clock, no logging.
"""

from ctxguard.core.metrics.arithmetic import (
    Mean,
    mean,
)
from ctxguard.core.metrics.keywords import (
    keyword_first_ranks,
    keyword_recall_at_k,
    keyword_reciprocal_rank,
)
from ctxguard.core.metrics.relevance import (
    Gain,
    average_precision,
    context_precision,
    context_recall,
    dcg,
    hit_rate_at_k,
    judged_precision,
    ndcg,
    precision_at_k,
    recall_at_k,
    reciprocal_rank,
)
from ctxguard.core.metrics.utility import (
    DEFAULT_UTILITIES,
    PRESETS,
    REFERENCE_PENALTY,
    RELAXED_UTILITIES,
    STRICT_UTILITIES,
    Negative,
    Udcg,
    Utilities,
    distractor_rate,
    harm_undiscounted,
    heuristic_utilities,
    strict_utilities,
    udcg,
    udcg_reference,
)

__all__ = [
    "DEFAULT_UTILITIES",
    "PRESETS",
    "REFERENCE_PENALTY",
    "RELAXED_UTILITIES",
    "STRICT_UTILITIES",
    "Gain",
    "Mean",
    "Negative",
    "Udcg",
    "Utilities",
    "average_precision",
    "context_precision",
    "context_recall",
    "dcg",
    "distractor_rate",
    "harm_undiscounted",
    "heuristic_utilities",
    "hit_rate_at_k",
    "judged_precision",
    "keyword_first_ranks",
    "keyword_recall_at_k",
    "keyword_reciprocal_rank",
    "mean",
    "ndcg",
    "precision_at_k",
    "recall_at_k",
    "reciprocal_rank",
    "strict_utilities",
    "udcg",
    "udcg_reference",
]

"""Contexts as the guard would leave them."""

from collections.abc import Sequence

from ctxguard.core.context import Context
from ctxguard.core.decision import decide
from ctxguard.core.policies import RatioPolicy
from ctxguard.core.types import Hit, Mode, Ranking, Route, ScoreKind


def make_context(
    passage_ids: Sequence[str],
    n_kept: int,
    *,
    request_id: str = "r",
    query: str = "q",
    mode: Mode = Mode.ENFORCE,
) -> Context:
    """Build a context whose first ``n_kept`` candidates were kept, as the guard would leave it."""
    hits = [Hit(name, 100.0 - rank, text=name) for rank, name in enumerate(passage_ids)]
    ranking = Ranking.from_hits(hits, ScoreKind.RATIO)
    decision = decide(ranking, RatioPolicy(k=max(n_kept, 1), min_keep=min(n_kept, 1)))
    kept = decision.order[:n_kept]
    return Context(
        request_id=request_id,
        query=query,
        route=Route.EXTERNAL,
        mode=mode,
        passages=tuple([ranking.passages[position] for position in kept]),
        decision=decision,
    )

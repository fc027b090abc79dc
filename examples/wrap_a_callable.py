"""Wrap a search function that you have: the guard filters what it returns and explains each drop.

python examples/wrap_a_callable.py
"""

from handbook import search

from ctxguard import ContextGuard, Hit, RatioPolicy


def retrieve(query: str, *, depth: int) -> list[Hit]:
    """The engine's results as hits; higher scores are better."""
    return [Hit(passage_id, score, text) for passage_id, score, text in search(query, depth)]


# "ratio": BM25 scores have a true zero, so they can be compared by their share of the best.
# A policy set by hand; calibrate_on_your_labels.py shows how to have it chosen from labels.
guard = ContextGuard(retrieve, score_kind="ratio", policy=RatioPolicy(k=5, min_ratio=0.5))

context = guard.retrieve("descale with hard water")

print(context.text)
print()
for candidate in context.decisions:
    if candidate.kept:
        print(f"kept     {candidate.passage_id}  ({candidate.relative_score:.0%} of the best)")
    else:
        needed = ", ".join(f"{t.setting} = {t.value:.3g}" for t in candidate.kept_if)
        print(f"dropped  {candidate.passage_id}  {candidate.reason}; kept if {needed}")

assert set(context.kept_ids) == {"descale-hard", "descale"}
assert any(not candidate.kept for candidate in context.decisions)

"""Filter results that another program has retrieved already: no retriever is wrapped.

python examples/filter_results_at_hand.py
"""

import json

from handbook import search

from ctxguard import ContextGuard, Hit, RatioPolicy

# What an application has at hand after its own search, here as it might come from a service.
query = "can I return goods from the sale"
response = json.dumps([{"id": i, "score": s, "text": t} for i, s, t in search(query, 20)])

guard = ContextGuard(score_kind="ratio", policy=RatioPolicy(k=5, min_ratio=0.5))
hits = [Hit(row["id"], row["score"], row["text"]) for row in json.loads(response)]
context = guard.filter(query, hits)

print(f"{len(hits)} results, {len(context.passages)} kept: {', '.join(context.kept_ids)}")
print({str(reason): n for reason, n in context.dropped_by_reason.items()})

assert context.kept_ids[0] == "returns-sale"
assert len(context.passages) < len(hits)

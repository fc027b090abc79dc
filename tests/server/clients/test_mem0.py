"""mem0's Cohere reranker."""

from collections.abc import Sequence
from functools import partial

import pytest
from cases import DEFAULT, QUERY, Case, check, each_case, truth

pytest.importorskip("mem0")
reranker = pytest.importorskip("mem0.reranker.cohere_reranker")


def rerank(
    url: str, documents: Sequence[str], top_n: int, *, model: str = "m"
) -> list[tuple[int, float]]:
    from mem0.configs.rerankers.cohere import CohereRerankerConfig

    with pytest.MonkeyPatch.context() as patched:
        # As the environment variable CO_API_URL does when cohere is imported.
        patched.setattr(reranker.cohere, "Client", partial(reranker.cohere.Client, base_url=url))
        client = reranker.CohereReranker(CohereRerankerConfig(api_key="unused", model=model))
    given = [{"id": at, "memory": text} for at, text in enumerate(documents)]
    found = client.rerank(QUERY, given, None if top_n == DEFAULT else top_n)
    assert all(each["memory"] == documents[each["id"]] for each in found)
    return [(each["id"], each["rerank_score"]) for each in found]


@each_case
def test_every_score_is_its_documents(case: Case, plain: str, guarded: str) -> None:
    check(rerank, case, plain, guarded)


@each_case
def test_the_alias_leaves_out_what_is_dropped(case: Case, guarded: str) -> None:
    """And all copies of a text but one."""
    found = rerank(guarded, case.documents, DEFAULT, model="ctxguard:omit")
    pairs = zip(case.documents, truth(guarded, case.documents), strict=True)
    kept = {text for text, score in pairs if score > 0.0}
    assert sorted(case.documents[at] for at, _ in found) == sorted(kept)

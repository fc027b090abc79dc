"""Programs that no package holds, modelled by what their public source does with an answer.

Each model is a few lines of ours. It pairs scores with documents, rescales and falls back as the
program does, and shows what the program would serve.

============ =================================================================================
program      read in
============ =================================================================================
Open WebUI   open-webui 0.12.4: retrieval/models/external.py and utils.py (RerankCompressor)
Dify         dify_plugin 0.1.0 to 0.7.4: interfaces/model/openai_compatible/rerank.py;
             langgenius/dify-official-plugins: models/jina, models/openai_api_compatible
RAGFlow      infiniflow/ragflow: rag/llm/rerank_model.py
LibreChat    danny-avila/agents: src/tools/search/rerankers.ts
Vercel SDK   vercel/ai: packages/cohere/src/reranking and packages/ai/src/rerank
LangChain.js langchain-ai/langchainjs: libs/providers/langchain-cohere/src/rerank.ts
Continue     continuedev/continue: core/llm/llms/Cohere.ts and HuggingFaceTEI.ts,
             core/context/retrieval/pipelines/RerankerRetrievalPipeline.ts
R2R          r2r 3.6.6: core/providers/embeddings/litellm.py
============ =================================================================================
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cases import CASES, DEFAULT, QUERY, Case, each_case, post, truth

Served = list[tuple[int, float]]
"""Documents and their scores as the program shows or compares them."""

LEAST = 1e-6
"""The smallest score of a kept document."""


def open_webui(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Pairs scores with documents by position, after it has sorted the results by index."""
    if not documents:
        return []
    answer = post(
        f"{url}/v1/rerank", model="m", query=QUERY, documents=documents, top_n=len(documents)
    )
    scores = [each["relevance_score"] for each in sorted(answer["results"], key=_index)]
    pairs = list(zip(range(len(documents)), scores, strict=False))
    if threshold:
        pairs = [(at, score) for at, score in pairs if score >= threshold]
    return sorted(pairs, key=lambda pair: pair[1], reverse=True)[:top_n]


def dify(
    url: str, documents: Sequence[str], top_n: int, threshold: float, *, model: str = "m"
) -> Served:
    """Compares the scores as they are, by either of the two providers."""
    results = _dify_asked(url, documents, top_n, model)
    pairs = [(each["index"], each["relevance_score"]) for each in results]
    return [pair for pair in pairs if pair[1] >= threshold][:top_n]


def dify_min_max(
    url: str, documents: Sequence[str], top_n: int, threshold: float, *, model: str = "m"
) -> Served:
    """Rescales by the least and the greatest score that came back."""
    results = _dify_asked(url, documents, top_n, model)
    scores = rescaled([each["relevance_score"] for each in results]) if documents else []
    pairs = [(each["index"], score) for each, score in zip(results, scores, strict=True)]
    return [pair for pair in pairs if pair[1] >= threshold][:top_n]


def rescaled(scores: list[float]) -> list[float]:
    """Equal scores, and so one alone, become 0.0; there is no least of none."""
    least, greatest = min(scores), max(scores)
    return [(score - least) / ((greatest - least) or 1.0) for score in scores]


def _dify_asked(url: str, documents: Sequence[str], top_n: int, model: str) -> list[dict[str, Any]]:
    if not documents:
        return []
    asked = {"query": QUERY, "documents": documents, "top_n": top_n, "return_documents": True}
    results: list[dict[str, Any]] = post(f"{url}/v1/rerank", model=model, **asked)["results"]
    assert all(each["document"]["text"] == documents[each["index"]] for each in results)
    return results


def ragflow(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Gives documents that have no result a zero; rescales scores only beyond 0 and 1."""
    if not documents:
        return []
    results = post(
        f"{url}/v1/rerank",
        model="m",
        query=QUERY,
        documents=documents,
        return_documents="true",
        return_len="true",
    )["results"]
    scores = [0.0] * len(documents)
    for each in results:
        scores[each["index"]] = each["relevance_score"]
    if min(scores) < 0.0 or max(scores) > 1.0:
        scores = rescaled(scores)
    pairs = [(at, score) for at, score in enumerate(scores) if score >= threshold]
    return sorted(pairs, key=lambda pair: pair[1], reverse=True)[:top_n]


def librechat(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Has no threshold, and goes on with the first documents where nothing came back."""
    del threshold
    if not documents:
        return []
    results = post(
        f"{url}/v1/rerank",
        model="jina-reranker-v2-base-multilingual",
        query=QUERY,
        documents=documents,
        top_n=top_n,
        return_documents=True,
    )["results"]
    assert all(each["document"]["text"] == documents[each["index"]] for each in results)
    if not results:
        return [(at, 0.0) for at in range(len(documents))][:top_n]
    return [(each["index"], each["relevance_score"]) for each in results]


def vercel(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Takes results by their index; the threshold is its user's own line."""
    if not documents:
        return []
    answer = post(f"{url}/v2/rerank", model="m", query=QUERY, documents=documents, top_n=top_n)
    assert isinstance(answer["id"], str)
    assert "billed_units" not in answer["meta"]
    pairs = [(each["index"], each["relevance_score"]) for each in answer["results"]]
    return [pair for pair in pairs if pair[1] >= threshold]


def langchain_js(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Takes results by their index; the threshold is its user's own line."""
    if not documents:
        return []
    answer = post(f"{url}/v1/rerank", model="m", query=QUERY, documents=documents, top_n=top_n)
    pairs = [(each["index"], each["relevance_score"]) for each in answer["results"]]
    return [pair for pair in pairs if pair[1] >= threshold]


def continue_cohere(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Pairs scores with documents by position; has no threshold."""
    del threshold
    asked = {"model": "m", "query": QUERY, "documents": documents}
    results = post(f"{url}/v1/rerank", **asked)["results"] if documents else []
    return _continue([each["relevance_score"] for each in sorted(results, key=_index)], top_n)


def continue_tei(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """The same by the protocol of TEI."""
    del threshold
    asked = {"texts": documents, "return_text": False, "raw_scores": False, "truncate": True}
    options = {"truncation_direction": "Right"}
    results = post(f"{url}/rerank", query=QUERY, **asked, **options) if documents else []
    return _continue([each["score"] for each in sorted(results, key=_index)], top_n)


def _continue(scores: list[float], top_n: int) -> Served:
    """The last of all in ascending order, here best first."""
    pairs = sorted(enumerate(scores), key=lambda pair: pair[1])
    return pairs[-top_n:][::-1] if top_n else []


def r2r(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Asks for all by the protocol of TEI, takes results by their index; has no threshold."""
    del threshold
    asked = {"query": QUERY, "texts": documents, "model-id": "m"}
    results = post(f"{url}/rerank", **asked) if documents else []
    return [(each["index"], each["score"]) for each in results][:top_n]


def _index(result: dict[str, Any]) -> int:
    index: int = result["index"]
    return index


Program = Callable[..., Served]

PROGRAMS = [
    *(open_webui, dify, dify_min_max, ragflow, librechat, vercel),
    *(langchain_js, continue_cohere, continue_tei, r2r),
]
WITH_THRESHOLD = [open_webui, dify, dify_min_max, ragflow, vercel, langchain_js]
"""These serve what was kept, and nothing else, with a threshold just above zero."""


def asked(case: Case) -> int:
    return 4 if case.top_n == DEFAULT else case.top_n


@pytest.mark.parametrize("program", PROGRAMS)
@each_case
def test_no_document_gets_the_score_of_another(program: Program, case: Case, guarded: str) -> None:
    """Rescaled or not, the order of the documents is that of their own scores."""
    served = program(guarded, case.documents, asked(case), 0.0)
    scores = truth(guarded, case.documents)
    assert len({at for at, _ in served}) == len(served) <= max(asked(case), 0)
    own = [scores[at] for at, _ in served]
    assert own == sorted(own, reverse=True)
    shown = [score for _, score in served]
    assert shown == sorted(shown, reverse=True)
    if program is not dify_min_max:
        assert shown == own


@pytest.mark.parametrize("program", WITH_THRESHOLD)
@each_case
def test_its_own_threshold_leaves_out_what_is_dropped(
    program: Program, case: Case, guarded: str
) -> None:
    scores = truth(guarded, case.documents)
    served = program(guarded, case.documents, asked(case), LEAST)
    assert all(scores[at] > 0.0 for at, _ in served)
    n_kept = min(sum(score > 0.0 for score in scores), asked(case))
    if program is not dify_min_max:
        assert len(served) == n_kept


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_dify_s_rescaling_drops_the_last_of_the_kept(guarded: str) -> None:
    """Where nothing with a score of zero came back, the least of the kept becomes zero."""
    fewer = case_of("fewer")
    assert len(dify_min_max(guarded, fewer.documents, 3, LEAST)) == 2
    assert len(dify(guarded, fewer.documents, 3, LEAST)) == 3


@pytest.mark.parametrize("case", ["one document", "only one is relevant"])
def test_dify_s_rescaling_gives_a_single_kept_document_zero(case: str, guarded: str) -> None:
    documents = case_of(case).documents
    ((kept, score),) = dify_min_max(guarded, documents, 3, 0.0, model="ctxguard:omit")
    assert score == 0.0
    assert truth(guarded, documents)[kept] > 0.0
    assert dify_min_max(guarded, documents, 3, LEAST, model="ctxguard:omit") == []


def test_dify_s_rescaling_fails_where_nothing_is_kept() -> None:
    """So a profile for it keeps at least one, as it does by default."""
    with pytest.raises(ValueError, match="empty"):
        rescaled([])


@pytest.mark.parametrize("program", [dify, dify_min_max])
def test_dify_without_a_threshold_serves_what_the_alias_keeps(
    program: Program, guarded: str
) -> None:
    documents = case_of("as many as there are").documents
    served = program(guarded, documents, 12, 0.0, model="ctxguard:omit")
    scores = truth(guarded, documents)
    assert {at for at, _ in served} == {at for at, score in enumerate(scores) if score > 0.0}


def test_ragflow_rescales_only_what_lies_beyond_0_and_1(plain: str, guarded: str) -> None:
    """All scores of the service lie between; a reranker's own may not."""
    documents = case_of("as many as there are").documents
    assert dict(ragflow(guarded, documents, 12, 0.0)) == dict(enumerate(truth(guarded, documents)))
    logits = ("a (3.0)", "b (2.0)", "c (0.0)")
    assert [score for _, score in ragflow(plain, logits, 3, 0.0)] == [1.0, 2 / 3, 0.0]


def test_librechat_serves_dropped_documents_where_it_asks_for_all(guarded: str) -> None:
    documents = case_of("only one is relevant").documents
    assert len(librechat(guarded, documents, 5, 0.0)) == 3
    assert len(librechat(guarded, documents, 2, 0.0)) == 1


@pytest.mark.parametrize("program", [continue_cohere, continue_tei, r2r])
def test_programs_that_always_ask_for_all_fill_up_with_dropped_documents(
    program: Program, guarded: str
) -> None:
    documents = case_of("only one is relevant").documents
    served = program(guarded, documents, 2, 0.0)
    assert [score > 0.0 for _, score in served] == [True, False]


def test_leaving_dropped_documents_out_would_shift_open_webui_s_scores(guarded: str) -> None:
    """Why all are answered where a client asks for all, and ``ctxguard:omit`` is neither for it nor
    for Continue."""
    case = case_of("as many as there are")
    answer = post(
        f"{guarded}/v1/rerank", model="ctxguard:omit", query=QUERY, documents=case.documents
    )
    by_position = [each["relevance_score"] for each in sorted(answer["results"], key=_index)]
    scores = truth(guarded, case.documents)
    assert len(by_position) < len(scores)
    assert by_position != scores[: len(by_position)]

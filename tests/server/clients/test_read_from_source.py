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
from functools import partial
from typing import Any

import pytest
from cases import CASES, DEFAULT, QUERY, Case, each_case, post, truth

Served = list[tuple[int, float]]
"""Documents and their scores as the program shows or compares them."""

LEAST = 1e-6
"""The smallest score of a kept document."""


def results_of(url: str, documents: Sequence[str], **asked: Any) -> Any:
    """The results of a request, without one where there is no document."""
    if not documents:
        return []
    texts = "texts" if url.endswith("/rerank") and "/v" not in url else "documents"
    answer = post(url, query=QUERY, **{texts: documents}, **asked)
    results = answer if isinstance(answer, list) else answer["results"]
    for each in results:
        if "document" in each:
            assert each["document"]["text"] == documents[each["index"]]
    return results


def pairs_of(results: Any) -> Served:
    return [(each["index"], each.get("relevance_score", each.get("score"))) for each in results]


def by_position(results: Any) -> list[float]:
    """The scores in the order of their indexes, whichever documents they are of."""
    return [score for _, score in sorted(pairs_of(results))]


def best(pairs: Served) -> Served:
    return sorted(pairs, key=lambda pair: pair[1], reverse=True)


def above(pairs: Served, threshold: float) -> Served:
    return [pair for pair in pairs if pair[1] >= threshold]


def open_webui(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Pairs scores with documents by position, after it has sorted the results by index."""
    results = results_of(f"{url}/v1/rerank", documents, model="m", top_n=len(documents))
    return best(above(list(enumerate(by_position(results))), threshold))[:top_n]


def by_index(
    url: str,
    documents: Sequence[str],
    top_n: int,
    threshold: float,
    *,
    path: str = "/v1/rerank",
    **asked: object,
) -> Served:
    """Takes results by their index, and compares the scores as they are."""
    options = {"model": "m", "top_n": top_n, **asked}
    return above(pairs_of(results_of(url + path, documents, **options)), threshold)


dify = partial(by_index, return_documents=True)


def dify_min_max(
    url: str, documents: Sequence[str], top_n: int, threshold: float, **asked: object
) -> Served:
    """Rescales by the least and the greatest score that came back."""
    pairs = dify(url, documents, top_n, 0.0, **asked)
    scores = rescaled([score for _, score in pairs]) if documents else []
    return above([(at, score) for (at, _), score in zip(pairs, scores, strict=True)], threshold)


def rescaled(scores: list[float]) -> list[float]:
    """Equal scores, and so one alone, become 0.0; there is no least of none."""
    least, greatest = min(scores), max(scores)
    return [(score - least) / ((greatest - least) or 1.0) for score in scores]


def ragflow(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Gives documents that have no result a zero; rescales scores only beyond 0 and 1."""
    if not documents:
        return []
    asked = {"model": "m", "return_documents": "true", "return_len": "true"}
    found = dict(pairs_of(results_of(f"{url}/v1/rerank", documents, **asked)))
    scores = [found.get(at, 0.0) for at in range(len(documents))]
    if min(scores) < 0.0 or max(scores) > 1.0:
        scores = rescaled(scores)
    return best(above(list(enumerate(scores)), threshold))[:top_n]


def librechat(url: str, documents: Sequence[str], top_n: int, _threshold: float) -> Served:
    """Has no threshold, and goes on with the first documents where nothing came back."""
    model = "jina-reranker-v2-base-multilingual"
    pairs = by_index(url, documents, top_n, 0.0, model=model, return_documents=True)
    return pairs or [(at, 0.0) for at in range(len(documents))][:top_n]


def continues(
    url: str, documents: Sequence[str], top_n: int, _threshold: float, *, path: str, **asked: object
) -> Served:
    """Pairs scores with documents by position, and takes the last in ascending order."""
    results = results_of(url + path, documents, **asked)
    pairs = sorted(enumerate(by_position(results)), key=lambda pair: pair[1])
    return pairs[-top_n:][::-1] if top_n else []


def r2r(url: str, documents: Sequence[str], top_n: int, _threshold: float) -> Served:
    """Asks for all by the protocol of TEI, takes results by their index; has no threshold."""
    return pairs_of(results_of(f"{url}/rerank", documents, **{"model-id": "m"}))[:top_n]


Program = Callable[..., Served]

# The threshold of those that take results by their index is their user's own line.
WITH_THRESHOLD: dict[str, Program] = {
    "Open WebUI": open_webui,
    "Dify": dify,
    "Dify, rescaling": dify_min_max,
    "RAGFlow": ragflow,
    "Vercel SDK": partial(by_index, path="/v2/rerank"),
    "LangChain.js": by_index,
}
"""These serve what was kept, and nothing else, with a threshold just above zero."""
ASKING_FOR_ALL: dict[str, Program] = {
    "Continue, Cohere": partial(continues, path="/v1/rerank", model="m"),
    "Continue, TEI": partial(
        continues,
        path="/rerank",
        return_text=False,
        raw_scores=False,
        truncate=True,
        truncation_direction="Right",
    ),
    "R2R": r2r,
}
PROGRAMS = {**WITH_THRESHOLD, **ASKING_FOR_ALL, "LibreChat": librechat}


def asked(case: Case) -> int:
    return 4 if case.top_n == DEFAULT else case.top_n


@pytest.mark.parametrize("name", PROGRAMS)
@each_case
def test_no_document_gets_anothers_score(name: str, case: Case, guarded: str) -> None:
    """Rescaled or not, the order of the documents is that of their own scores."""
    served = PROGRAMS[name](guarded, case.documents, asked(case), 0.0)
    scores = truth(guarded, case.documents)
    assert len({at for at, _ in served}) == len(served) <= max(asked(case), 0)
    own = [scores[at] for at, _ in served]
    assert own == sorted(own, reverse=True)
    shown = [score for _, score in served]
    assert shown == sorted(shown, reverse=True)
    if name != "Dify, rescaling":
        assert shown == own


@pytest.mark.parametrize("name", WITH_THRESHOLD)
@each_case
def test_own_threshold_drops_the_dropped(name: str, case: Case, guarded: str) -> None:
    scores = truth(guarded, case.documents)
    served = WITH_THRESHOLD[name](guarded, case.documents, asked(case), LEAST)
    assert all(scores[at] > 0.0 for at, _ in served)
    if name != "Dify, rescaling":
        assert len(served) == min(sum(score > 0.0 for score in scores), asked(case))


def documents_of(name: str) -> tuple[str, ...]:
    return next(case.documents for case in CASES if case.name == name)


def test_dify_rescaling_drops_last_kept(guarded: str) -> None:
    """The least of the kept becomes zero where nothing with a score of zero came back."""
    fewer = documents_of("fewer")
    assert len(dify(guarded, fewer, 3, LEAST)) == 3
    assert len(dify_min_max(guarded, fewer, 3, LEAST)) == 2
    for case in ("one document", "only one is relevant"):
        documents = documents_of(case)
        ((kept, score),) = dify_min_max(guarded, documents, 3, 0.0, model="ctxguard:omit")
        assert score == 0.0 < truth(guarded, documents)[kept]
        assert dify_min_max(guarded, documents, 3, LEAST, model="ctxguard:omit") == []


@pytest.mark.parametrize("program", [dify, dify_min_max])
def test_dify_without_threshold_serves_the_kept(program: Program, guarded: str) -> None:
    documents = documents_of("as many as there are")
    served = program(guarded, documents, 12, 0.0, model="ctxguard:omit")
    scores = truth(guarded, documents)
    assert {at for at, _ in served} == {at for at, score in enumerate(scores) if score > 0.0}


def test_ragflow_rescales_only_outside_unit_interval(plain: str, guarded: str) -> None:
    """All scores of the service lie between; a reranker's own may not."""
    documents = documents_of("as many as there are")
    assert dict(ragflow(guarded, documents, 12, 0.0)) == dict(enumerate(truth(guarded, documents)))
    logits = ("a (3.0)", "b (2.0)", "c (0.0)")
    assert [score for _, score in ragflow(plain, logits, 3, 0.0)] == [1.0, 2 / 3, 0.0]


def test_librechat_asking_for_all_serves_dropped(guarded: str) -> None:
    documents = documents_of("only one is relevant")
    assert len(librechat(guarded, documents, 5, 0.0)) == 3
    assert len(librechat(guarded, documents, 2, 0.0)) == 1


@pytest.mark.parametrize("name", ASKING_FOR_ALL)
def test_asking_for_all_fills_with_dropped(name: str, guarded: str) -> None:
    served = ASKING_FOR_ALL[name](guarded, documents_of("only one is relevant"), 2, 0.0)
    assert [score > 0.0 for _, score in served] == [True, False]


def test_omitting_would_shift_open_webui_scores(guarded: str) -> None:
    """Why all are answered where a client asks for all, and ``ctxguard:omit`` is neither for it nor
    for Continue."""
    documents = documents_of("as many as there are")
    shifted = by_position(results_of(f"{guarded}/v1/rerank", documents, model="ctxguard:omit"))
    scores = truth(guarded, documents)
    assert len(shifted) < len(scores)
    assert shifted != scores[: len(shifted)]

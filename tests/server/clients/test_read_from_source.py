"""Programs that no package holds, modelled by what their public source does with an answer.

Each model is a few lines of ours. It pairs scores with documents, rescales and falls back as the
program does, and shows what the program would serve.

=========== ==================================================================================
program     read in
=========== ==================================================================================
Open WebUI  open-webui/open-webui: retrieval/models/external.py and utils.py (RerankCompressor)
Dify        langgenius/dify-plugin-sdks: interfaces/model/openai_compatible/rerank.py, of two
            releases; langgenius/dify-official-plugins: models/jina; langgenius/dify:
            core/rag/rerank/rerank_model.py
RAGFlow     infiniflow/ragflow: rag/llm/rerank_model.py
LibreChat   danny-avila/agents: src/tools/search/rerankers.ts
Vercel SDK  vercel/ai: packages/cohere/src/reranking and packages/ai/src/rerank
=========== ==================================================================================
"""

import math
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


def dify_jina(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Compares the scores as they are."""
    return _dify(url, documents, top_n, threshold, lambda scores: scores)


def dify_min_max(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Rescales by the least and the greatest score that came back; of one alone, from 0."""

    def rescale(scores: list[float]) -> list[float]:
        least, greatest = (0.0, scores[0]) if len(scores) == 1 else (min(scores), max(scores))
        return [(score - least) / ((greatest - least) or 1.0) for score in scores]

    return _dify(url, documents, top_n, threshold, rescale)


def dify_sigmoid(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Takes scores for logits."""
    return _dify(
        url, documents, top_n, threshold, lambda scores: [1 / (1 + math.exp(-s)) for s in scores]
    )


def _dify(
    url: str,
    documents: Sequence[str],
    top_n: int,
    threshold: float,
    rescale: Callable[[list[float]], list[float]],
) -> Served:
    if not documents:
        return []
    results = post(
        f"{url}/v1/rerank",
        model="m",
        query=QUERY,
        documents=documents,
        top_n=top_n,
        return_documents=True,
    )["results"]
    assert all(each["document"]["text"] == documents[each["index"]] for each in results)
    scores = rescale([each["relevance_score"] for each in results])
    pairs = [(each["index"], score) for each, score in zip(results, scores, strict=True)]
    return [pair for pair in pairs if pair[1] >= threshold][:top_n]


def ragflow(url: str, documents: Sequence[str], top_n: int, threshold: float) -> Served:
    """Gives documents that have no result a zero."""
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


def _index(result: dict[str, Any]) -> int:
    index: int = result["index"]
    return index


Program = Callable[[str, Sequence[str], int, float], Served]

PROGRAMS = [open_webui, dify_jina, dify_min_max, dify_sigmoid, ragflow, librechat, vercel]
WITH_THRESHOLD = {
    open_webui: LEAST,
    dify_jina: LEAST,
    dify_min_max: LEAST,
    dify_sigmoid: math.nextafter(0.5, 1.0),
    ragflow: LEAST,
    vercel: LEAST,
}
"""The threshold at which each serves what was kept, and nothing else."""


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
    if program not in (dify_min_max, dify_sigmoid):
        assert shown == own


@pytest.mark.parametrize("program", WITH_THRESHOLD)
@each_case
def test_its_own_threshold_leaves_out_what_is_dropped(
    program: Program, case: Case, guarded: str
) -> None:
    scores = truth(guarded, case.documents)
    served = program(guarded, case.documents, asked(case), WITH_THRESHOLD[program])
    assert all(scores[at] > 0.0 for at, _ in served)
    n_kept = min(sum(score > 0.0 for score in scores), asked(case))
    if program is not dify_min_max:
        assert len(served) == n_kept


def test_dify_s_rescaling_drops_the_last_of_the_kept(guarded: str) -> None:
    """Where nothing with a score of zero came back, the least of the kept becomes zero."""
    fewer = next(case for case in CASES if case.name == "fewer")
    assert len(dify_min_max(guarded, fewer.documents, 3, LEAST)) == 2
    assert len(dify_jina(guarded, fewer.documents, 3, LEAST)) == 3


def test_librechat_serves_dropped_documents_where_it_asks_for_all(guarded: str) -> None:
    case = next(case for case in CASES if case.name == "only one is relevant")
    assert len(librechat(guarded, case.documents, 5, 0.0)) == 3
    assert len(librechat(guarded, case.documents, 2, 0.0)) == 1


def test_leaving_dropped_documents_out_would_shift_open_webui_s_scores(guarded: str) -> None:
    """Why all are answered where a client asks for all, and ``ctxguard:omit`` is not for it."""
    case = next(case for case in CASES if case.name == "as many as there are")
    answer = post(
        f"{guarded}/v1/rerank", model="ctxguard:omit", query=QUERY, documents=case.documents
    )
    by_position = [each["relevance_score"] for each in sorted(answer["results"], key=_index)]
    scores = truth(guarded, case.documents)
    assert len(by_position) < len(scores)
    assert by_position != scores[: len(by_position)]

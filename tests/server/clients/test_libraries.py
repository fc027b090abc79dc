"""Client libraries by their own code: Cohere, Haystack, LangChain, LiteLLM, LlamaIndex and mem0.

Each is asked for documents and their scores, where it is installed.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from cases import CASES, DEFAULT, QUERY, Ask, Case, check, each_case, truth

from_package = pytest.importorskip
Pairs = list[tuple[int, float]]


def _number(top_n: int, name: str = "top_n") -> dict[str, Any]:
    return {} if top_n == DEFAULT else {name: top_n}


def pairs_of(results: Any, documents: Sequence[str]) -> Pairs:
    """The pairs of results as attributes, whose documents are their own where they have one."""
    for each in results:
        if (document := getattr(each, "document", None)) is not None:
            assert document.text == documents[each.index]
    return [(each.index, each.relevance_score) for each in results]


def cohere(
    url: str, documents: Sequence[str], top_n: int, *, name: str = "ClientV2", **options: Any
) -> Pairs:
    client = getattr(from_package("cohere"), name)("unused", base_url=url)
    asked = {"model": "m", "query": QUERY, "documents": list(documents), **_number(top_n)}
    return pairs_of(client.rerank(**asked, **options).results, documents)


def cohere_async(url: str, documents: Sequence[str], top_n: int) -> Pairs:
    async def ask() -> Any:
        asked = {"model": "m", "query": QUERY, "documents": list(documents), **_number(top_n)}
        async with from_package("cohere").AsyncClientV2("unused", base_url=url) as client:
            return await client.rerank(**asked)

    return pairs_of(asyncio.run(ask()).results, documents)


def haystack(
    documents: Sequence[str], top_n: int, ranker: str, *, awaited: bool = False, **options: Any
) -> Pairs:
    """Asks the ranker, such as ``cohere.CohereRanker``."""
    library = from_package("haystack")
    module, _, name = ranker.partition(".")
    rankers = from_package(f"haystack_integrations.components.rankers.{module}")
    secret = from_package("haystack.utils").Secret.from_token("unused")
    made = getattr(rankers, name)(api_key=secret, **options)
    given = [library.Document(id=str(at), content=text) for at, text in enumerate(documents)]
    number = _number(top_n, "top_k")
    call = made.run_async if awaited else made.run
    answer = call(QUERY, given, **number)
    found = (asyncio.run(answer) if awaited else answer)["documents"]
    assert all(each.content == documents[int(each.id)] for each in found)
    return [(int(each.id), each.score) for each in found]


def haystack_cohere(url: str, documents: Sequence[str], top_n: int, **options: Any) -> Pairs:
    return haystack(documents, top_n, "cohere.CohereRanker", api_base_url=url, **options)


def haystack_jina(url: str, documents: Sequence[str], top_n: int, **options: Any) -> Pairs:
    base = f"{url}/v1/rerank"
    return haystack(documents, top_n, "jina.JinaRanker", base_url=base, **options)


def langchain(url: str, documents: Sequence[str], top_n: int) -> Pairs:
    library = from_package("langchain_cohere")
    document = from_package("langchain_core.documents").Document
    reranker = library.CohereRerank(
        model="m", base_url=url, cohere_api_key="unused", **_number(top_n)
    )
    given = [document(text, metadata={"at": at}) for at, text in enumerate(documents)]
    found = reranker.compress_documents(given, QUERY)
    assert all(each.page_content == documents[each.metadata["at"]] for each in found)
    return [(each.metadata["at"], each.metadata["relevance_score"]) for each in found]


def langchain_all(url: str, documents: Sequence[str], top_n: int) -> Pairs:
    """Without a number, whatever the case says, and with a limit on tokens."""
    library = from_package("langchain_cohere")
    reranker = library.CohereRerank(model="m", base_url=url, cohere_api_key="unused")
    found = reranker.rerank(list(documents), QUERY, top_n=None, max_tokens_per_doc=512)
    return [(each["index"], each["relevance_score"]) for each in found]


def litellm(
    url: str,
    documents: Sequence[str],
    top_n: int,
    *,
    provider: str,
    call: str = "rerank",
    **options: object,
) -> Pairs:
    asked = {"query": QUERY, "documents": list(documents), **_number(top_n), **options}
    connection = {"model": f"{provider}/m", "api_base": url, "api_key": "unused"}
    found = getattr(from_package("litellm"), call)(**connection, **asked)
    results = (asyncio.run(found) if asyncio.iscoroutine(found) else found).results
    for each in results:
        if "document" in each:
            assert each["document"]["text"] == documents[each["index"]]
    return [(each["index"], each["relevance_score"]) for each in results]


def _llama_index(reranker: Any, documents: Sequence[str]) -> Pairs:
    schema = from_package("llama_index.core.schema")
    nodes = [
        schema.NodeWithScore(node=schema.TextNode(id_=str(at), text=text), score=0.0)
        for at, text in enumerate(documents)
    ]
    found = reranker.postprocess_nodes(nodes, query_str=QUERY)
    assert all(each.node.text == documents[int(each.node.node_id)] for each in found)
    return [(int(each.node.node_id), each.score) for each in found]


def llama_index_cohere(url: str, documents: Sequence[str], top_n: int) -> Pairs:
    library = from_package("llama_index.postprocessor.cohere_rerank")
    reranker = library.CohereRerank(api_key="unused", base_url=url, **_number(top_n))
    return _llama_index(reranker, documents)


def llama_index_jina(url: str, documents: Sequence[str], top_n: int) -> Pairs:
    library = from_package("llama_index.postprocessor.jinaai_rerank")
    reranker = library.JinaRerank(api_key="unused", base_url=f"{url}/v1", **_number(top_n))
    return _llama_index(reranker, documents)


def mem0(url: str, documents: Sequence[str], top_n: int, *, model: str = "m") -> Pairs:
    reranker = from_package("mem0.reranker.cohere_reranker")
    config = from_package("mem0.configs.rerankers.cohere").CohereRerankerConfig
    with pytest.MonkeyPatch.context() as patched:
        # As the environment variable CO_API_URL does when cohere is imported.
        patched.setattr(reranker.cohere, "Client", partial(reranker.cohere.Client, base_url=url))
        client = reranker.CohereReranker(config(api_key="unused", model=model))
    given = [{"id": at, "memory": text} for at, text in enumerate(documents)]
    found = client.rerank(QUERY, given, None if top_n == DEFAULT else top_n)
    assert all(each["memory"] == documents[each["id"]] for each in found)
    return [(each["id"], each["rerank_score"]) for each in found]


LIBRARIES: dict[str, Ask] = {
    "Cohere, first version": partial(cohere, name="Client", return_documents=True),
    "Cohere, second version": cohere,
    "Cohere, asynchronous": cohere_async,
    "Haystack, Cohere": haystack_cohere,
    "Haystack, Cohere asynchronous": partial(haystack_cohere, awaited=True),
    "Haystack, Jina": haystack_jina,
    "LangChain": langchain,
    "LangChain, all": langchain_all,
    "LiteLLM, Cohere": partial(litellm, provider="cohere"),
    "LiteLLM, Jina": partial(litellm, provider="jina_ai"),
    "LiteLLM, vLLM": partial(litellm, provider="hosted_vllm"),
    # It reads a document as a text; Cohere, Jina and vLLM send an object.
    "LiteLLM, Infinity": partial(litellm, provider="infinity", return_documents=False),
    "LlamaIndex, Cohere": llama_index_cohere,
    "LlamaIndex, Jina": llama_index_jina,
    "mem0": mem0,
}


@pytest.mark.parametrize("name", LIBRARIES)
@each_case
def test_every_score_is_its_documents(name: str, case: Case, plain: str, guarded: str) -> None:
    check(LIBRARIES[name], case, plain, guarded)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_asynchronous_calls_of_litellm_too(case: Case, plain: str, guarded: str) -> None:
    check(partial(litellm, provider="cohere", call="arerank"), case, plain, guarded)


@each_case
def test_threshold_above_zero_drops_the_dropped(case: Case, guarded: str) -> None:
    found = haystack_jina(guarded, case.documents, DEFAULT, score_threshold=1e-6)
    kept = [at for at, score in enumerate(truth(guarded, case.documents)) if score > 0.0]
    assert sorted(at for at, _ in found) == kept


@each_case
def test_mem0_by_alias_drops_the_dropped(case: Case, guarded: str) -> None:
    """And all copies of a text but one."""
    found = mem0(guarded, case.documents, DEFAULT, model="ctxguard:omit")
    pairs = zip(case.documents, truth(guarded, case.documents), strict=True)
    kept = {text for text, score in pairs if score > 0.0}
    assert sorted(case.documents[at] for at, _ in found) == sorted(kept)

"""The request and answer formats of endpoints, one row each, for the clients and the service.

=========== ======================================================================================
form        spoken by
=========== ======================================================================================
cohere      Cohere v1 and v2, Jina, vLLM, Infinity, LiteLLM, Together, SiliconFlow, llama.cpp
voyage      Voyage: docs.voyageai.com/reference/reranker-api
tei         Text Embeddings Inference: its openapi.json, also llama.cpp
score       vLLM's scores of pairs: docs.vllm.ai, Score API
chat        any endpoint with chat completions and structured output
decisions   ``POST /decisions``: OpenAI (types of openai 3.52), Fireworks, SGLang, LiteLLM
systemone   ``POST /systemone``: TypeSafe, Upstage, Fireworks, vLLM, Ollama and open servers
=========== ======================================================================================

Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ctxguard.core.types import ScoreKind

RerankProtocol = Literal["cohere", "voyage", "tei", "score"]
"""The name of a form of reranking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankForm:
    """How to write the requests and read the answers of one form.

    Attributes:
        paths: Its paths; the others end with the first.
        query, documents, most: Fields of a request with the query, the documents and the number of
            results.
        always: Further fields of every request.
        options: Options that a request may have.
        marks: Fields of a request that tell it from the other forms.
        results: Field of the answer with the results; None if the answer is the list itself.
        score: Field of a result with its score.
        echo: Field of the request that asks for the documents back.
        echoed: Field of a result with its document.
        echoes_object: Whether that is an object with ``text``, instead of the text.
        each, envelope: Further fields of every result, and of the answer.
        in_order: Whether results are in the order of the documents, instead of best first.
        kind: The kind of the scores.
    """

    paths: tuple[str, ...] = ("/rerank", "/v1/rerank", "/v2/rerank")
    query: str = "query"
    documents: str = "documents"
    most: str | None = None
    always: Mapping[str, object] = field(default_factory=dict)
    options: frozenset[str] = frozenset({"model"})
    marks: frozenset[str] = frozenset()
    results: str | None = "data"
    score: str = "score"
    echo: str | None = None
    echoed: str = "document"
    echoes_object: bool = False
    each: Mapping[str, object] = field(default_factory=dict)
    envelope: Mapping[str, object] = field(default_factory=dict)
    in_order: bool = False
    kind: ScoreKind = ScoreKind.PROBABILITY


FORMS: Mapping[RerankProtocol, RerankForm] = {
    "cohere": RerankForm(
        most="top_n",
        options=frozenset({"model", "max_tokens_per_doc"}),
        results="results",
        score="relevance_score",
        echo="return_documents",
        echoes_object=True,
    ),
    "voyage": RerankForm(
        most="top_k",
        marks=frozenset({"top_k", "truncation"}),
        score="relevance_score",
        echo="return_documents",
        envelope={"object": "list"},
    ),
    "tei": RerankForm(
        documents="texts",
        always={"raw_scores": True, "truncate": True},
        options=frozenset(),
        marks=frozenset({"texts"}),
        results=None,
        echo="return_text",
        echoed="text",
        kind=ScoreKind.LOGIT,
    ),
    "score": RerankForm(
        paths=("/score", "/v1/score"),
        query="text_1",
        documents="text_2",
        marks=frozenset({"text_1", "text_2"}),
        each={"object": "score"},
        envelope={"object": "list", "created": 0},
        in_order=True,
    ),
}


MARKS = {mark: form for form in FORMS.values() for mark in form.marks}
"""The form of a request, by a field that only it has; requests without one have Cohere's form."""


CHAT_PATH = "/chat/completions"


def json_object(properties: Mapping[str, object]) -> dict[str, object]:
    """Build the JSON schema of an object that has these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def structured(name: str, schema: Mapping[str, object]) -> dict[str, object]:
    """Build a request for structured output, in the strict form of chat completions."""
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionForm:
    """How to ask named questions about some material, and read the answers.

    Attributes:
        path: Path below the endpoint's base URL.
        material: Field of the request with the material.
        kind: Type of a question whose answer is a probability.
        value: Field of an answer with it.
        is_listed: Whether questions and answers are lists, instead of objects by name.
    """

    path: str
    material: str
    kind: str
    value: str
    is_listed: bool


QUESTION_FORMS: Mapping[str, QuestionForm] = {
    "decisions": QuestionForm(
        path="/decisions", material="input", kind="predicate", value="probability", is_listed=True
    ),
    "systemone": QuestionForm(
        path="/systemone", material="state", kind="noul", value="noul", is_listed=False
    ),
}

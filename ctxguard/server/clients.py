"""What clients of rerankers ask before they rerank: which models there are, and their limits."""

from typing import Any, Literal

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ctxguard import __version__
from ctxguard.server.metrics import Endpoint
from ctxguard.server.openapi import Operation
from ctxguard.server.rerank import DEFAULT_MODEL, FULL, OMIT
from ctxguard.server.settings import ServiceSettings
from ctxguard.server.wire import answer


class Model(TypedDict):
    """A name that a request may give as its model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(TypedDict):
    """All of them, as OpenAI and vLLM list them."""

    object: Literal["list"]
    data: list[Model]


class Info(TypedDict):
    """The reranker and its limits, as TEI tells them."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str


def operations(settings: ServiceSettings) -> list[Operation]:
    """``/v1/models`` and ``/info`` of a service with a reranker."""
    name = settings.rerank_model or settings.reranker or DEFAULT_MODEL
    models: Models = {
        "object": "list",
        "data": [
            {"id": each, "object": "model", "created": 0, "owned_by": DEFAULT_MODEL}
            for each in (name, OMIT, FULL)
        ],
    }
    info: Info = {
        "model_id": name,
        "model_sha": None,
        "model_dtype": "float32",
        "model_type": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
        "max_concurrent_requests": settings.max_in_flight,
        "max_client_batch_size": settings.max_documents,
        "auto_truncate": True,
        "version": __version__,
    }

    async def tell_models(_: Request) -> Response:
        return answer(models)

    async def tell_info(_: Request) -> Response:
        return answer(info)

    return [
        Operation(
            "/v1/models",
            "GET",
            tell_models,
            Endpoint.OTHER,
            "Names that a request may give as its model",
            TypeAdapter(Models),
        ),
        Operation(
            "/info",
            "GET",
            tell_info,
            Endpoint.OTHER,
            "The reranker and its limits, as TEI tells them",
            TypeAdapter(Info),
        ),
    ]

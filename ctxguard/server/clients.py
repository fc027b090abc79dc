"""Answers clients that ask for models and limits before they rerank."""

from functools import partial
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from ctxguard import __version__
from ctxguard.server.metrics import Endpoint
from ctxguard.server.openapi import Operation
from ctxguard.server.rerank import DEFAULT_MODEL, FULL, OMIT
from ctxguard.server.settings import ServiceSettings
from ctxguard.server.wire import answer


def operations(settings: ServiceSettings) -> list[Operation]:
    """``/v1/models`` and ``/info`` of a service with a reranker."""
    name = settings.rerank_model or settings.reranker or DEFAULT_MODEL
    models = {
        "object": "list",
        "data": [
            {"id": each, "object": "model", "created": 0, "owned_by": DEFAULT_MODEL}
            for each in (name, OMIT, FULL)
        ],
    }
    info = {
        "model_id": name,
        "model_sha": None,
        "model_dtype": "float32",
        "model_type": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
        "max_concurrent_requests": settings.max_in_flight,
        "max_client_batch_size": settings.max_documents,
        "auto_truncate": True,
        "version": __version__,
    }

    return [
        Operation(
            path,
            "GET",
            partial(_told, document),
            Endpoint.OTHER,
            summary,
            TypeAdapter(dict[str, Any]),
        )
        for path, document, summary in (
            ("/v1/models", models, "Names that a request may give as its model"),
            ("/info", info, "The reranker and its limits, as TEI tells them"),
        )
    ]


async def _told(document: object, _: Request) -> Response:
    return answer(document)

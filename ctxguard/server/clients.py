"""Answers clients that ask for models and limits before they rerank."""

from ctxguard import __version__
from ctxguard.server.rerank import DEFAULT_MODEL, FULL, OMIT
from ctxguard.server.settings import ServiceSettings


def documents(settings: ServiceSettings) -> dict[str, tuple[str, object]]:
    """A summary and the answer of each path, for a service with a reranker."""
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
    return {
        "/v1/models": ("Names that a request may give as its model", models),
        "/info": ("The reranker and its limits, as TEI tells them", info),
    }

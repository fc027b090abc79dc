"""Models that are opened once for several tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def models_opened_once() -> Iterator[None]:
    """Models of one folder share what is opened: opening it takes seconds each time."""
    from ctxguard.retrieval.models.embedder import SentenceTransformerEmbedder
    from ctxguard.retrieval.models.reranker import CrossEncoderReranker

    models: dict[Any, Any] = {}

    def once(opened: Any) -> Any:
        def opened_once(model: Any, *purpose: str) -> Any:
            key = (opened, model.files, getattr(model, "_runtime", None), *purpose)
            if key not in models:
                models[key] = opened(model, *purpose)
            return models[key]

        return opened_once

    with pytest.MonkeyPatch.context() as patch:
        for owner in (SentenceTransformerEmbedder, CrossEncoderReranker):
            patch.setattr(owner, "_open", once(owner._open))
        yield


@pytest.fixture(scope="session", autouse=True)
def open_models_once() -> Iterator[None]:
    """For folders whose tests run commands in this process."""
    with models_opened_once():
        yield

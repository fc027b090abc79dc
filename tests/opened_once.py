"""Models that are opened once for several tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def models_opened_once() -> Iterator[None]:
    """Models of one folder share what is opened: opening it takes seconds each time."""
    from ctxguard.retrieval.models.graph import GraphModel

    graphs: dict[Any, Any] = {}
    opened = GraphModel._opened

    def opened_once(model: GraphModel) -> Any:
        key = (model.folder, model._output, model._requested)
        if key not in graphs:
            graphs[key] = opened(model)
        return graphs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphModel, "_opened", opened_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def open_models_once() -> Iterator[None]:
    """For folders whose tests run commands in this process."""
    with models_opened_once():
        yield

"""A fixture for folders whose tests run commands in this process."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def open_models_once() -> Iterator[None]:
    """The commands that run in this process share a model: opening it takes seconds each time."""
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

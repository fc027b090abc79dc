"""Copies of pydantic models without validation are those of ``model_copy``."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, PrivateAttr

from ctxguard.integrations.documents import copied


class Plain(BaseModel):
    name: str
    metadata: dict[str, Any] = {}


class Rich(Plain):
    model_config = ConfigDict(frozen=True, extra="allow")
    _seen: int = PrivateAttr(default=3)


@pytest.mark.parametrize("model", [Plain(name="a"), Rich(name="a", other=[1])])
def test_a_copy_is_that_of_pydantic_and_leaves_the_model_alone(model: Plain) -> None:
    before = model.model_dump()
    changes = {"metadata": {"ctxguard": 1}}
    ours, theirs = copied(model, **changes), model.model_copy(update=changes)
    assert type(ours) is type(theirs)
    assert ours == theirs
    assert ours.model_dump() == theirs.model_dump()
    assert ours.model_fields_set == theirs.model_fields_set
    assert ours.__pydantic_private__ == theirs.__pydantic_private__
    ours.__dict__["name"] = "b"
    if ours.__pydantic_extra__ is not None:
        ours.__pydantic_extra__["other"] = 2
    if ours.__pydantic_private__ is not None:
        ours.__pydantic_private__["_seen"] = 4
    assert model.model_dump() == before
    assert getattr(model, "_seen", 3) == 3

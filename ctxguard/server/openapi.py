"""Writes the OpenAPI document from the operations and the types of their bodies. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from ctxguard.server.limits import EndpointRule
from ctxguard.server.metrics import Endpoint
from ctxguard.server.problems import MEDIA_TYPE
from ctxguard.server.wire import Operation

_JSON = "application/json"
_TOKEN = "token"  # noqa: S105 - the name of the scheme


class FieldFault(TypedDict):
    """A part of a body that is at fault."""

    loc: list[str | int]
    msg: str


class ProblemDocument(TypedDict, total=False):
    """A fault of a request, as a problem document (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    errors: list[FieldFault]


def openapi(
    operations: Sequence[Operation], version: str, rules: Mapping[Endpoint, EndpointRule]
) -> dict[str, Any]:
    """Write the OpenAPI 3.1 document of these operations."""
    adapters: dict[int, TypeAdapter[Any]] = {0: TypeAdapter(ProblemDocument)}
    for each in operations:
        if each.asks is not None:
            adapters[id(each.asks)] = each.asks
        if each.answers is not None and id(each.answers) not in adapters:
            adapters[id(each.answers)] = TypeAdapter(each.answers)
    schemas, definitions = TypeAdapter.json_schemas(
        [(key, "validation", adapter) for key, adapter in adapters.items()],
        ref_template="#/components/schemas/{model}",
    )
    schema_of = {key: schema for (key, _), schema in schemas.items()}
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        described = _described(each, schema_of, needs_token=rules[each.what].token is not None)
        paths[each.path] = {"get" if each.asks is None else "post": described}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ctxguard",
            "version": version,
            "summary": "The rerank protocol with calibrated decisions, and decisions on their own.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {_TOKEN: {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(
    operation: Operation, schema_of: Mapping[int, Any], *, needs_token: bool
) -> dict[str, Any]:
    content = (
        {"text/plain": {"schema": {"type": "string"}}}
        if operation.answers is None
        else {_JSON: {"schema": schema_of[id(operation.answers)]}}
    )
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.path.strip("/").replace("/", "_").replace(".", ""),
        "responses": {
            "200": {"description": "Answered", "content": content},
            "default": {
                "description": "A problem, whose type says which",
                "content": {MEDIA_TYPE: {"schema": schema_of[0]}},
            },
        },
        "security": [{_TOKEN: []}] if needs_token else [],
    }
    if operation.asks is not None:
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": schema_of[id(operation.asks)]}},
        }
    return described

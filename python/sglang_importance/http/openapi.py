"""Our routes' bodies, parameters and refusals for ``/openapi.json``.

The routes read bodies and queries themselves, so FastAPI cannot see them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "a field is wrong, missing or unknown: `detail` names it"},
    403: {"description": "a page of another site asks a server that has no key"},
    503: {"description": "the scheduler could not take up the question: ask again"},
}
"""Refusals that every route may answer with; `detail` is one line."""


def json_body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route that takes a JSON body."""
    content = {"application/json": {"schema": _schema(model)}}
    wrong_type = {"description": "the body is not sent as application/json"}
    return {"requestBody": {"required": required, "content": content}, "responses": {"415": wrong_type}}


def parameters(model: type[BaseModel], place: Literal["query", "path"] = "query") -> dict[str, Any]:
    """``openapi_extra`` of a route that takes parameters in its query or its path."""
    schema = _schema(model)
    required = schema.get("required", [])
    described = [
        {"in": place, "name": name, "required": name in required, "schema": each}
        for name, each in schema["properties"].items()
    ]
    return {"parameters": described}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    assert "$defs" not in schema, f"{model.__name__} names other schemas, which have no place here"
    return schema

"""What our routes take, for ``/openapi.json``: they read it themselves, so FastAPI does not know."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def json_body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route that takes a JSON body."""
    content = {"application/json": {"schema": _schema(model)}}
    return {"requestBody": {"required": required, "content": content}}


def query_parameters(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that takes query parameters."""
    schema = _schema(model)
    required = schema.get("required", [])
    parameters = [
        {"in": "query", "name": name, "required": name in required, "schema": each}
        for name, each in schema["properties"].items()
    ]
    return {"parameters": parameters}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    assert "$defs" not in schema, f"{model.__name__} names other schemas, which have no place here"
    return schema

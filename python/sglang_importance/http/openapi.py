"""What our routes take, for the server's OpenAPI document.

Routes validate bodies and queries themselves: what is wrong is answered with 400 and the field's name, where
FastAPI would answer with 422 and a list. FastAPI therefore has to be told of the models.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "a field is wrong, missing or unknown: `detail` names it"},
    403: {"description": "a page of another site asks a server that has no key"},
    503: {"description": "too many callers at once: ask again"},
}
"""What every route may answer beside its document; `detail` is one line."""


def takes_body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is a ``model``."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    wrong_type = {"description": "the body is not sent as application/json"}
    return {"requestBody": {"required": required, "content": content}, "responses": {"415": wrong_type}}


def takes_query(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose query is a ``model``."""
    schema = model.model_json_schema()
    required = schema.get("required", ())
    return {
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": name in required,
                "description": field.pop("description", ""),
                "schema": field,
            }
            for name, field in schema["properties"].items()
        ]
    }

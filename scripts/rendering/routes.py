"""The HTTP API, from the models of its routes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmark.serving.measured import table as _table

_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "maxItems": "at most",
}


def _document() -> dict[str, Any]:
    """The OpenAPI document of our routes alone."""
    from fastapi import FastAPI

    from sgl_importance.options.importance_options import ImportanceOptions
    from sglang_importance.http.routes import install_routes

    app = FastAPI()
    install_routes(app, ImportanceOptions(policy="importance"))
    return app.openapi()


def http_routes() -> str:
    """Every route: what it answers, and the fields that it takes."""
    return "\n\n".join(
        "\n\n".join(_route(method, path, operation))
        for path, operations in _document()["paths"].items()
        for method, operation in operations.items()
    )


def http_refusals() -> str:
    """Status codes that any route may answer beside its document."""
    from sglang_importance.http.openapi import REFUSALS

    return _table(["status", "when"], [[str(code), each["description"]] for code, each in REFUSALS.items()])


def routes_with_kv_fields() -> str:
    """sglang's own routes that compute: where the fields about KV stand, and where the report does."""
    from sglang.srt.entrypoints.http_server import app

    from sglang_importance.http.requests.route_families import CARRYING, NATIVE, REFUSING

    paths: dict[str, str] = {}
    for route in app.router.routes:
        if (endpoint := getattr(route, "endpoint", None)) is not None:
            paths[endpoint.__name__] = f"`{route.path}`"  # type: ignore[attr-defined]  # it has both
    lines = [
        [
            paths[name],
            _words(family.places),
            f"`{family.answer.path}`",
            "by index" if family.has_messages else "",
        ]
        for name, family in CARRYING.items()
    ]
    lines += [
        [paths[name], _words([place]), "`meta_info.kv_importance`", ""] for name, place in NATIVE.items()
    ]
    lines += [[paths[name], f"refused: use `{instead}`", "", ""] for name, instead in REFUSING.items()]
    return _table(["route", "the fields stand", "the report stands", "messages in `block_types`"], lines)


def _words(places: Iterable[str]) -> str:
    return " or ".join(f"in `{place}`" if place else "at the top" for place in places)


def _route(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"## {method.upper()} {path}"
    yield operation["description"].replace("``", "`")
    query = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
    if query:
        yield _fields("parameter", {each["name"]: each["schema"] for each in query}, ())
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        yield _fields("field", schema["properties"], schema.get("required", ()))


def _fields(title: str, fields: dict[str, Any], required: Any) -> str:
    lines = [
        [
            f"`{name}`",
            _type(field),
            "required" if name in required else _default(field),
            field.get("description", "").replace("``", "`").replace("\n", " "),
        ]
        for name, field in fields.items()
    ]
    return _table([title, "type", "default", "meaning"], lines)


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if value is None else f"`{value}`"


def _type(field: dict[str, Any]) -> str:
    """In words, with its bounds; null is left out, since an absent field means the same."""
    (field,) = [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    words = [f"list of {field['items']['type']}s" if field["type"] == "array" else field["type"]]
    words += [f"{name} {field[key]:,.12g}" for key, name in _BOUNDS.items() if key in field]
    if field.get("minItems") == 1 or field.get("minLength") == 1:
        words.append("not empty")
    return ", ".join(words)

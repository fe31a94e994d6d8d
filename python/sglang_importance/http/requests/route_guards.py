"""Our look at the requests of sglang's own routes, in front of each: no field about KV is dropped there.

A route that sglang adds, and nobody has put into ``route_families`` yet, refuses them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import ORJSONResponse
from fastapi.routing import APIRoute
from sglang.srt.entrypoints.openai.protocol import ErrorResponse

from sgl_importance.placement.hints.hints import FIELD, BadHint
from sglang_importance.http.adapter_namespaces import check_extra_key
from sglang_importance.http.requests.cache_control import last_breakpoint
from sglang_importance.http.requests.carried_fields import CarriedFields
from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.kv_fields import (
    TOP,
    KvFields,
    read_fields,
    refuse_all,
    refuse_elsewhere,
)
from sglang_importance.http.requests.request_hints import read_native_hints
from sglang_importance.http.requests.route_families import (
    CARRYING,
    CLOSING,
    NATIVE,
    NOT_COMPUTING,
    REFUSING,
    Family,
)
from sglang_importance.http.requests.session_route import closing
from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.upstream.server_options import importance_options

Endpoint = Callable[..., Awaitable[Any]]

_OTHERS = "/v1/chat/completions"
ADAPTER = "lora_path"
_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
_NESTED_ERRORS = ("/v1/messages", "/v1/responses")
"""sglang's handler of errors gives their answers the form that their clients read."""


def guard_routes(app: FastAPI) -> None:
    """Puts every route of sglang's that takes a body back into its place, with our look in front.

    Raises:
        ValueError: the app lacks a route that is to carry the fields.
    """
    routes = app.router.routes
    names = set()
    for index, route in enumerate(routes):
        if not isinstance(route, APIRoute) or not {"POST", "PUT", "PATCH"} & (route.methods or set()):
            continue
        name = route.endpoint.__name__
        names.add(name)
        if name in CARRYING:
            routes[index] = _anew(route, _carrying(route.endpoint, CARRYING[name]))
        elif name in NATIVE:
            look = partial(_look_at_native, NATIVE[name])
            routes[index] = _anew(route, route.endpoint, [_in_front(look)])
        elif name == CLOSING:
            routes[index] = _anew(route, closing(route.endpoint))
        elif name not in NOT_COMPUTING:
            look = partial(refuse_all, route=route.path, instead=REFUSING.get(name, _OTHERS))
            routes[index] = _anew(route, route.endpoint, [_in_front(look)])
    if missing := (CARRYING.keys() | NATIVE.keys()) - names:
        raise ValueError(f"sglang has no route {', '.join(sorted(missing))}")


def _anew(route: APIRoute, endpoint: Endpoint, dependencies: Sequence[Any] = ()) -> APIRoute:
    return type(route)(
        route.path,
        endpoint,
        methods=route.methods,
        response_class=route.response_class,
        dependencies=[*dependencies, *route.dependencies],
        include_in_schema=route.include_in_schema,
    )


def _in_front(look: Callable[[dict[str, Any]], None]) -> Any:
    async def dependency(request: Request) -> None:
        if importance_options(tokenizer_manager().server_args) is None:
            return
        try:
            _check_rank(request)
            look(await _body(request))
        except ValueError as error:
            raise HTTPException(status_code=400, detail=str(error)) from None

    return Depends(dependency)


def _check_rank(request: Request) -> None:
    """sglang reads the header only behind the conversion of a request, and some of its routes answer 500."""
    arguments: Any = tokenizer_manager().server_args  # sglang puts its fields together at import
    named = request.headers.get("x-data-parallel-rank")
    ranks = range(max(arguments.dp_size, 1))
    if named is not None and named not in map(str, ranks):
        raise ValueError(
            f"X-Data-Parallel-Rank: wants a rank from 0 to {ranks[-1]} (--dp-size), not {named[:40]!r}"
        )


async def _body(request: Request) -> dict[str, Any]:
    """The body's fields; none where it is no object, or cannot be read: sglang says so."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        body = dict(await request.form()) if media_type in _FORMS else await request.json()  # both are kept
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _look_at_native(place: str, body: dict[str, Any]) -> None:
    refuse_elsewhere(body, (place,))
    holder = body if place == TOP else body.get(place)
    if not isinstance(holder, dict):
        return
    check_extra_key(f"{place}.extra_key".lstrip("."), holder.get("extra_key"))
    if hints := holder.get(FIELD):
        # FastAPI drops what stands in an envelope of hints and does not belong there.
        read_native_hints(hints, _num_prompts(body) if place == TOP else len(body.get("instances") or ()))


def _num_prompts(body: dict[str, Any]) -> int | None:
    """The number of prompts in a batch of ``/generate``; None where there is a single prompt, or none."""
    text, ids = body.get("text"), body.get("input_ids")
    if isinstance(text, list):
        return len(text)
    if text is None and isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    return None


def _carrying(endpoint: Endpoint, family: Family) -> Endpoint:
    @wraps(endpoint)
    async def carry(**arguments: Any) -> Any:
        if importance_options(tokenizer_manager().server_args) is None:
            return await endpoint(**arguments)
        (raw_request,) = (each for each in arguments.values() if isinstance(each, Request))
        (request,) = (each for each in arguments.values() if each is not raw_request)
        try:
            _check_rank(raw_request)
            carried = await _carried(family, request, raw_request)
        except ValueError as error:
            return _refused(raw_request, error)
        if carried is None:
            return await endpoint(**arguments)
        carried.attach(raw_request)
        answer = await endpoint(**arguments)
        hints = carried.fields.hints
        if hints is None or not hints.report:
            return answer
        return family.answer.with_reports(answer, carried.reports)

    carry.__signature__ = signature(endpoint, eval_str=True)  # type: ignore[attr-defined]  # FastAPI reads it
    return carry


async def _carried(family: Family, request: Any, raw_request: Request) -> CarriedFields | None:
    body = await _body(raw_request)
    fields = read_fields(body, family.places, takes_lists=family.takes_lists)
    check_extra_key("extra_key", fields.extra_key)
    if body.get(ADAPTER) and ADAPTER not in type(request).model_fields:
        raise BadField(ADAPTER, "is not read here, and the model would answer without: use " + _OTHERS)
    kept_up_to = last_breakpoint(body) if family.has_breakpoints and _leaves_retain_open(fields) else None
    if not fields.given() and fields.session_id is None and kept_up_to is None:
        return None
    messages = family.messages(request, raw_request)
    if fields.hints is not None:
        messages.check(fields.hints)
        _check_report(fields, request)
    return CarriedFields(fields, messages, getattr(request, "n", None) or 1, kept_up_to)


def _leaves_retain_open(fields: KvFields) -> bool:
    """Whether no hint says how long the prompt is to be kept."""
    hints = fields.hints
    return hints is None or not (hints.retain or hints.drop_after_use)


def _check_report(fields: KvFields, request: Any) -> None:
    in_background = getattr(request, "background", False) and not request.stream
    if in_background and fields.hints is not None and fields.hints.report:
        raise BadHint(f"{FIELD}.report", "an answer in the background has no place for it: leave one out")


def _refused(raw_request: Request, error: ValueError) -> ORJSONResponse:
    if raw_request.url.path.startswith(_NESTED_ERRORS):
        raise HTTPException(status_code=400, detail=str(error)) from None
    document = ErrorResponse(
        message=str(error), type="BadRequest", param=getattr(error, "field", None), code=400
    )
    return ORJSONResponse(document.model_dump(), status_code=400)

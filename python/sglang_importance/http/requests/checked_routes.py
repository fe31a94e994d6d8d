"""Every route that computes looks at its request first, and answers 400 before a stream begins.

sglang begins a stream with 200 before it looks at the request, and what is wrong comes as an event in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from inspect import iscoroutinefunction
from types import NoneType
from typing import Any, get_args

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from fastapi.responses import Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_importance.http.requests.begun_streams import begin
from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.fields.body_check import TABLES, check_body
from sglang_importance.http.requests.fields.operator_tables import NEEDS
from sglang_importance.http.requests.fields.server_facts import ServerFacts, facts_of
from sglang_importance.http.requests.long_lists import check_long_lists
from sglang_importance.http.requests.route_families import UNHANDLED
from sglang_importance.http.requests.unreadable import UNREADABLE, refusal
from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.upstream.server_options import importance_options

Endpoint = Callable[..., Awaitable[Any]]

PROFILING = frozenset({"start_profile_async", "stop_profile_async"})
"""They say by RuntimeError that there is a profile already, or none."""


def check_routes(app: FastAPI) -> None:
    """Puts our look in front of every route of an app that takes a request which sglang computes."""
    for route in app.router.routes:
        if not isinstance(route, APIRoute):
            continue
        endpoint: Any = route.dependant.call
        bodies = _bodies(route)
        if bodies or endpoint.__name__ in NEEDS:
            assert iscoroutinefunction(endpoint), route.path
            # The route keeps its methods, dependencies and place: FastAPI calls what stands here.
            route.dependant.call = _checked(endpoint, bodies)
        if {"POST", "PUT", "PATCH"} & (route.methods or set()):
            more = (RuntimeError,) if endpoint.__name__ in PROFILING else ()
            route.app = _refusing(route.app, app, (ValueError, *UNREADABLE, *more))
        if bodies:
            _look_in_front(route)
    app.exception_handlers[ValueError] = _refuse_query


async def _refuse_query(request: Request, error: Exception) -> Response:
    """Of any route, also of routers that the app includes: a query string that it cannot read."""
    if not _is_ours() or not request.query_params:
        raise error
    handle: Any = request.app.exception_handlers[HTTPException]
    response: Response = await handle(request, refusal(error))
    return response


def _check_flags(endpoint: Endpoint, server: ServerFacts) -> None:
    """
    Raises:
        BadField: the server cannot do what the route is for, and would end.
    """
    has, without = NEEDS.get(endpoint.__name__, (None, ""))
    if has is not None and not has(server):
        raise BadField(endpoint.__name__.removesuffix("_async"), without)


def _look_in_front(route: APIRoute) -> None:
    """Before FastAPI lets the route's model read the body, its long lists are looked at."""
    bodies = route.dependant.body_params
    model = bodies[0].field_info.annotation if len(bodies) == 1 else None

    async def refuse_long_lists(request: Request) -> None:
        if not _is_ours() or "json" not in request.headers.get("content-type", "json").lower():
            return
        try:
            body = await request.json()  # read before, and kept
        except ValueError:
            return  # sglang says so
        try:
            check_long_lists(body, model, facts_of(tokenizer_manager()).context_length)
        except BadField as error:
            raise HTTPException(status_code=400, detail=str(error)) from None

    depends = Depends(refuse_long_lists)
    route.dependant.dependencies.insert(
        0, get_parameterless_sub_dependant(depends=depends, path=route.path_format)
    )


def _bodies(route: APIRoute) -> list[str]:
    """Names of the parameters that are requests for something to compute."""
    return [each.name for each in route.dependant.body_params if _class_name(each) in TABLES]


def _class_name(body: Any) -> str:
    """Of a parameter that is a body, which may be left out."""
    kind = body.field_info.annotation
    kinds = [each for each in get_args(kind) if each is not NoneType]
    return getattr(kinds[0] if len(kinds) == 1 else kind, "__name__", "")


def _is_ours() -> bool:
    return importance_options(tokenizer_manager().server_args) is not None


def _checked(endpoint: Endpoint, bodies: list[str]) -> Endpoint:
    @wraps(endpoint)
    async def check_and_answer(**values: Any) -> Any:
        is_ours = _is_ours()
        if is_ours:
            manager = tokenizer_manager()
            in_flight: Mapping[str, Any] = getattr(manager, "rid_to_state", {})
            try:
                _check_flags(endpoint, facts_of(manager))
                for name in bodies:
                    if values[name] is not None:
                        check_body(values[name], facts_of(manager), in_flight)
            except BadField as error:
                raise HTTPException(status_code=400, detail=str(error)) from None
        answer = await endpoint(**values)
        if is_ours and endpoint.__name__ in UNHANDLED and isinstance(answer, StreamingResponse):
            await begin(answer)
        return answer

    return check_and_answer


def _refusing(answer: ASGIApp, app: FastAPI, errors: tuple[type[Exception], ...]) -> ASGIApp:
    """Turns errors of sglang's readers and converters into 400; its own handlers do not know them."""

    async def answer_or_refuse(scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def note(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await answer(scope, receive, note)
        except errors as error:
            if began or not _is_ours():
                raise
            handle: Any = app.exception_handlers[HTTPException]  # sglang's, which knows each route's shape
            response = await handle(Request(scope, receive), refusal(error))
            await response(scope, receive, send)

    return answer_or_refuse

"""Every route that computes looks at its request first, and answers 400 before a stream begins.

sglang begins a stream with 200 before it looks at the request, and what is wrong comes as an event in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.routing import APIRoute

from sglang_importance.http.requests.fields.body_check import TABLES, check_body
from sglang_importance.http.requests.fields.refusal import BadField
from sglang_importance.http.requests.fields.server_facts import facts_of
from sglang_importance.http.requests.unreadable import UNREADABLE, unreadable
from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.upstream.server_options import importance_options

Endpoint = Callable[..., Awaitable[Any]]


def check_routes(app: FastAPI) -> None:
    """Puts our look in front of every route of an app that takes a request which sglang computes."""
    for route in app.router.routes:
        if isinstance(route, APIRoute) and (bodies := _bodies(route)):
            endpoint = route.dependant.call
            assert iscoroutinefunction(endpoint), route.path
            # The route keeps its methods, dependencies and place: FastAPI calls what stands here.
            route.dependant.call = _checked(endpoint, bodies)


def _bodies(route: APIRoute) -> list[str]:
    """Names of the parameters that are requests for something to compute."""
    return [
        each.name for each in route.dependant.body_params if _class_name(each.field_info.annotation) in TABLES
    ]


def _class_name(annotation: Any) -> str:
    return getattr(annotation, "__name__", "")


def _checked(endpoint: Endpoint, bodies: list[str]) -> Endpoint:
    @wraps(endpoint)
    async def check_and_answer(**values: Any) -> Any:
        manager = tokenizer_manager()
        if importance_options(manager.server_args) is None:
            return await endpoint(**values)
        try:
            for name in bodies:
                _check(values[name], manager)
            return await endpoint(**values)
        except BadField as error:
            raise HTTPException(status_code=400, detail=str(error)) from None
        except UNREADABLE as error:
            raise HTTPException(status_code=400, detail=unreadable(error)) from error

    return check_and_answer


def _check(body: Any, manager: Any) -> None:
    in_flight: Mapping[str, Any] = getattr(manager, "rid_to_state", {})
    check_body(body, facts_of(manager), in_flight)

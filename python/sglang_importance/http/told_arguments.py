"""sglang's routes that tell a server's arguments, keys and all, to whoever may call them.

Where a server has but an ``--admin-api-key``, that is everybody, a page of another site too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from sglang_importance.http.server_state import server_arguments
from sglang_importance.upstream.server_keys import without_keys

TELLING = frozenset({"server_info", "get_server_info"})


def hide_keys(app: FastAPI) -> None:
    """Takes the keys out of what these routes of sglang's app answer.

    Raises:
        ValueError: the app lacks one of them.
    """
    found = set()
    for route in app.router.routes:
        if isinstance(route, APIRoute) and (name := route.endpoint.__name__) in TELLING:
            found.add(name)
            call: Any = route.dependant.call
            # The route stays as it is: FastAPI calls what stands here.
            route.dependant.call = _without_keys(call)
    if missing := TELLING - found:
        raise ValueError(f"sglang has no route {', '.join(sorted(missing))}")


def _without_keys(endpoint: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    @wraps(endpoint)
    async def tell() -> Any:
        return without_keys(await endpoint(), server_arguments())

    return tell

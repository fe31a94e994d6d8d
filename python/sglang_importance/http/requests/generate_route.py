"""``/generate`` refuses what is wrong with hints before it answers.

sglang begins a stream with 200 before it looks at the request, and what is wrong comes as an event in it. By
then FastAPI has also dropped what stands in an envelope of hints and does not belong there.
"""

from __future__ import annotations

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.routing import APIRoute

from sgl_importance.placement.hints.hints import FIELD
from sglang_importance.http.requests.request_hints import read_native_hints
from sglang_importance.http.server_state import tokenizer_manager
from sglang_importance.upstream.server_options import importance_options

PATH = "/generate"


def check_generate(app: FastAPI) -> None:
    """Puts sglang's route back into its app with our look at the request in front.

    Raises:
        ValueError: the app has no such route, or several.
    """
    (route,) = (route for route in app.router.routes if isinstance(route, APIRoute) and route.path == PATH)
    app.router.routes.remove(route)
    assert route.methods is not None, "only a WebSocket's route has none"
    app.add_api_route(
        PATH,
        route.endpoint,
        methods=list(route.methods),
        response_class=route.response_class,
        dependencies=[Depends(refuse_unusable)],
    )


async def refuse_unusable(request: Request) -> None:
    """A dependency of the route.

    Raises:
        HTTPException: 400, a hint cannot be followed; names the field.
    """
    manager = tokenizer_manager()
    if importance_options(manager.server_args) is None:
        return
    try:
        body = await request.json()  # read before, and kept
    except ValueError:
        return  # sglang says so
    if not isinstance(body, dict):
        return
    try:
        if hints := body.get(FIELD):
            read_native_hints(hints, _num_prompts(body))
    except ValueError as error:
        raise HTTPException(status_code=400, detail=str(error)) from None


def _num_prompts(body: dict[str, object]) -> int | None:
    """The number of prompts in a batch; None where there is a single prompt, or none."""
    text, ids = body.get("text"), body.get("input_ids")
    if isinstance(text, list):
        return len(text)
    if text is None and isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    return None

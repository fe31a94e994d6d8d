"""Routes that we add to sglang's own HTTP server, under its own API key, closed to pages of other sites."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import Route

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http.openapi import REFUSALS, json_body, parameters
from sglang_importance.http.pins_route import PinBody, UnpinBody, get_pins, post_pin, post_unpin
from sglang_importance.http.prewarm_route import add_prewarm_routes, install_prewarm
from sglang_importance.http.prompt_tokens import Prompt
from sglang_importance.http.same_origin import refuse_other_sites
from sglang_importance.http.scheduler_client import OfRank
from sglang_importance.http.tree_route import (
    EventsQuery,
    ImportanceBody,
    NodePath,
    SnapshotQuery,
    TreeQuery,
    WhyQuery,
    get_events,
    get_kv_importance,
    get_node,
    get_node_prompt,
    get_tree,
    get_why,
    post_find,
    post_importance,
    post_why,
)
from sglang_importance.http.ui import install_ui

PREFIX = "/kv_importance"
TAG = "importance"


def install_routes(app: FastAPI, options: ImportanceOptions, *, is_alone: bool = True) -> None:
    """Adds the routes; the API key middleware of the server covers them.

    Args:
        app: sglang's.
        options: what the operator chose.
        is_alone: whether no other process answers HTTP; else nothing is pre-warmed.
    """
    routes = APIRouter(
        prefix=PREFIX,
        tags=[TAG],
        dependencies=[Depends(refuse_other_sites)],
        route_class=app.router.route_class,  # sglang's own
        responses=REFUSALS,
    )
    routes.get("", openapi_extra=parameters(SnapshotQuery))(get_kv_importance)
    routes.post("/importance", openapi_extra=json_body(ImportanceBody) | parameters(OfRank))(post_importance)
    routes.post("/pin", openapi_extra=json_body(PinBody))(post_pin)
    routes.post("/unpin", openapi_extra=json_body(UnpinBody))(post_unpin)
    routes.get("/pins", openapi_extra=parameters(OfRank))(get_pins)
    routes.get("/tree", openapi_extra=parameters(TreeQuery))(get_tree)
    of_node = {
        "parameters": [
            each for part in (parameters(NodePath, "path"), parameters(OfRank)) for each in part["parameters"]
        ]
    }
    routes.get("/node/{node_id}", openapi_extra=of_node)(get_node)
    routes.get("/node/{node_id}/prompt", openapi_extra=of_node)(get_node_prompt)
    routes.post("/find", openapi_extra=json_body(Prompt) | parameters(OfRank))(post_find)
    routes.get("/events", openapi_extra=parameters(EventsQuery))(get_events)
    routes.get("/why", openapi_extra=parameters(WhyQuery))(get_why)
    routes.post("/why", openapi_extra=json_body(Prompt) | parameters(OfRank))(post_why)
    add_prewarm_routes(routes)
    # Not by include_router: sglang's metrics and its key check look at the routes of the app itself for a
    # request's path template and auth level, and find neither in a router below it.
    app.router.routes += routes.routes
    # What none of them answers (404, 405, a slash too many) is one path to the metrics, whatever its name.
    app.router.routes.append(Route(PREFIX + "/{unknown:path}", routes))
    if is_alone:
        install_prewarm(app, options)
    install_ui(app)

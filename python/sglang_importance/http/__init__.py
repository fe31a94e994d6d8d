"""Routes that we add to sglang's own HTTP server, under its own API key, closed to pages of other sites."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import Route

from sgl_importance.options import ImportanceOptions
from sglang_importance.http import importance_route as importance
from sglang_importance.http import pins_route as pins
from sglang_importance.http import snapshot_route as snapshot
from sglang_importance.http import tree_route as tree
from sglang_importance.http.openapi import json_body, query_parameters
from sglang_importance.http.prewarm_route import add_prewarm_routes, install_prewarm
from sglang_importance.http.prompt_tokens import Prompt
from sglang_importance.http.same_origin import refuse_other_sites
from sglang_importance.http.ui import install_ui

PREFIX = "/kv_importance"
TAG = "importance"


def install_routes(app: FastAPI, options: ImportanceOptions) -> None:
    """Adds the routes; the API key middleware of the server covers them."""
    routes = APIRouter(
        prefix=PREFIX,
        tags=[TAG],
        dependencies=[Depends(refuse_other_sites)],
        route_class=app.router.route_class,  # sglang's own
    )
    routes.get("", openapi_extra=query_parameters(snapshot.SnapshotQuery))(snapshot.get_kv_importance)
    routes.post("/importance", openapi_extra=json_body(importance.ImportanceBody))(importance.post_importance)
    routes.post("/pin", openapi_extra=json_body(pins.PinBody))(pins.post_pin)
    routes.post("/unpin", openapi_extra=json_body(pins.UnpinBody))(pins.post_unpin)
    routes.get("/pins")(pins.get_pins)
    routes.get("/tree", openapi_extra=query_parameters(tree.TreeQuery))(tree.get_tree)
    routes.get("/node/{node_id}")(tree.get_node)
    routes.get("/node/{node_id}/prompt")(tree.get_node_prompt)
    routes.post("/find", openapi_extra=json_body(Prompt))(tree.post_find)
    routes.get("/events", openapi_extra=query_parameters(tree.EventsQuery))(tree.get_events)
    add_prewarm_routes(routes)
    # Not by include_router: sglang's metrics and its key check look at the routes of the app itself for a
    # request's path template and auth level, and find neither in a router below it.
    app.router.routes += routes.routes
    # What none of them answers (404, 405, a slash too many) is one path to the metrics, whatever its name.
    app.router.routes.append(Route(PREFIX + "/{unknown:path}", routes))
    install_prewarm(app, options)
    install_ui(app)

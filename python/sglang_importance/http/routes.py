"""Routes that we add to sglang's own HTTP server, under its own API key, closed to pages of other sites."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI

from sgl_importance.options import ImportanceOptions
from sglang_importance.http import importance_route, pins_route, snapshot_route, tree_route
from sglang_importance.http.openapi import REFUSALS, json_body, query_parameters
from sglang_importance.http.prewarm_route import add_prewarm_routes, install_prewarm
from sglang_importance.http.prompt_tokens import Prompt
from sglang_importance.http.same_origin import refuse_other_sites
from sglang_importance.http.ui import install_ui

TAG = "importance"


def install_routes(app: FastAPI, options: ImportanceOptions) -> None:
    """Adds the routes; the API key middleware of the server covers them."""
    routes = APIRouter(
        prefix="/kv_importance",
        tags=[TAG],
        dependencies=[Depends(refuse_other_sites)],
        route_class=app.router.route_class,  # sglang's own
        responses=REFUSALS,
    )
    routes.get("", openapi_extra=query_parameters(snapshot_route.SnapshotQuery))(
        snapshot_route.get_kv_importance
    )
    routes.post("/importance", openapi_extra=json_body(importance_route.ImportanceBody))(
        importance_route.post_importance
    )
    routes.post("/pin", openapi_extra=json_body(pins_route.PinBody))(pins_route.post_pin)
    routes.post("/unpin", openapi_extra=json_body(pins_route.UnpinBody))(pins_route.post_unpin)
    routes.get("/pins")(pins_route.get_pins)
    routes.get("/tree", openapi_extra=query_parameters(tree_route.TreeQuery))(tree_route.get_tree)
    routes.get("/node/{node_id}")(tree_route.get_node)
    routes.get("/node/{node_id}/prompt")(tree_route.get_node_prompt)
    routes.post("/find", openapi_extra=json_body(Prompt))(tree_route.post_find)
    routes.get("/events", openapi_extra=query_parameters(tree_route.EventsQuery))(tree_route.get_events)
    add_prewarm_routes(routes)
    app.include_router(routes)
    install_prewarm(app, options)
    install_ui(app)

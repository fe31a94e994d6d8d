"""Routes that we add to sglang's own HTTP server, under its own API key, closed to pages of other sites."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI

from sgl_importance.options import ImportanceOptions
from sglang_importance.http import importance_route, pins_route, snapshot_route, tree_route
from sglang_importance.http.prewarm_route import add_prewarm_routes, install_prewarm
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
    )
    routes.get("")(snapshot_route.get_kv_importance)
    routes.post("/importance")(importance_route.post_importance)
    routes.post("/pin")(pins_route.post_pin)
    routes.post("/unpin")(pins_route.post_unpin)
    routes.get("/pins")(pins_route.get_pins)
    routes.get("/tree")(tree_route.get_tree)
    routes.get("/node/{node_id}")(tree_route.get_node)
    routes.get("/node/{node_id}/prompt")(tree_route.get_node_prompt)
    routes.post("/find")(tree_route.post_find)
    routes.get("/events")(tree_route.get_events)
    add_prewarm_routes(routes)
    app.include_router(routes)
    install_prewarm(app, options)
    install_ui(app)

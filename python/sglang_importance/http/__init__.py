"""Routes that we add to sglang's own HTTP server, under its own API key."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI

from sgl_importance.options import ImportanceOptions
from sglang_importance.http import importance, pins, snapshot, tree
from sglang_importance.http.prewarm import install_prewarm
from sglang_importance.http.ui import install_ui

TAG = "importance"


def install_routes(app: FastAPI, options: ImportanceOptions) -> None:
    """Adds the routes; the API key middleware of the server covers them."""
    app.get("/kv_importance", tags=[TAG])(snapshot.get_kv_importance)
    app.post("/kv_importance/importance", tags=[TAG])(importance.post_importance)
    app.post("/kv_importance/pin", tags=[TAG])(pins.post_pin)
    app.post("/kv_importance/unpin", tags=[TAG])(pins.post_unpin)
    app.get("/kv_importance/pins", tags=[TAG])(pins.get_pins)
    own_site: dict[str, Any] = {"tags": [TAG], "dependencies": [Depends(tree.refuse_other_sites)]}
    app.get("/kv_importance/tree", **own_site)(tree.get_tree)
    app.get("/kv_importance/node/{node_id}", **own_site)(tree.get_node)
    app.get("/kv_importance/node/{node_id}/prompt", **own_site)(tree.get_node_prompt)
    app.post("/kv_importance/find", **own_site)(tree.post_find)
    app.get("/kv_importance/events", tags=[TAG])(tree.get_events)
    install_prewarm(app, options)
    install_ui(app)

"""Routes that we add to sglang's own HTTP server, under its own API key."""

from __future__ import annotations

from fastapi import FastAPI

from sglang_importance.http import snapshot

TAG = "importance"


def install_routes(app: FastAPI) -> None:
    """Adds the routes; the API key middleware of the server covers them."""
    app.get("/kv_importance", tags=[TAG])(snapshot.get_kv_importance)

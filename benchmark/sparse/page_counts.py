"""What a server with tiered pages counts."""

from __future__ import annotations

from typing import Any

from support.servers import ServerProcess


class PageCounts:
    """Counts of pages, in all layers, between two looks at a server."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        pages: dict[str, Any] = self._server.get("/kv_importance?limit=1")["pages"]
        return pages

    def since(self, *names: str) -> dict[str, Any]:
        """By name, as under ``pages`` of ``GET /kv_importance``."""
        now = self._now()
        return {name: now[name] - self._before[name] for name in names}

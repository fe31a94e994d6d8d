"""Keeps web pages of other sites from reading prompts, and from pinning, through their visitor's browser.

sglang's own CORS rule lets any page send and read anything, and offers no option. A server without a key that
can be reached from a desk is then open to every page that is looked at there.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from sglang.srt.entrypoints.http_server import get_global_state


async def refuse_other_sites(request: Request) -> None:
    """A dependency of every route. Programs pass: only browsers name who asks, and pages cannot change that.

    Where the server has a key, whoever sends it has chosen the page that does.

    Raises:
        HTTPException: 403, a page of another site asks a server that has no key.
    """
    if not _is_own(request) and not _has_key():
        raise HTTPException(
            status_code=403,
            detail="pages of other sites are not answered: use this server's own /kv_importance/ui, "
            "or start it with --api-key",
        )


def _is_own(request: Request) -> bool:
    headers = request.headers
    # Right behind a proxy that renames the host too; sent where the page came by https or from this machine.
    asking = headers.get("sec-fetch-site")
    if asking is not None:
        return asking in ("none", "same-origin")
    origin = headers.get("origin")
    return origin is None or _host_of(origin) == headers.get("host", "").lower()


def _host_of(origin: str) -> str | None:
    """Host and port; None where it is no URL, as no browser sends it."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _has_key() -> bool:
    state = get_global_state()
    if state is None:
        return False
    arguments: Any = state.tokenizer_manager.server_args
    return bool(arguments.api_key or arguments.admin_api_key)

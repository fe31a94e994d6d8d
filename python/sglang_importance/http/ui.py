"""``GET /kv_importance/ui``: the live page. Its files hold no data, so they are served without a key.

A browser cannot send a key before a page has asked for one. sglang's key check is a middleware that knows no
open paths of ours, so the page is answered in front of all middleware; what it shows comes from routes that
the check covers.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_importance.ui.page_files import HEADERS, MEDIA_TYPES, SHARED, parts_in

PATH = "/kv_importance/ui"
FILES = Path(__file__).parents[1] / "ui"


class OpenPage:
    """Answers the page's files, and passes everything else on.

    Args:
        app: what all other requests go to.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = {f"{PATH}/{name}": file for name, file in parts_in(SHARED, FILES).items()}
        self._files[PATH] = FILES / "index.html"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            file = self._files.get(path)
            if path == f"{PATH}/":  # where the page's own addresses would lead elsewhere
                query = scope.get("query_string", b"").decode("latin-1")
                answer = RedirectResponse(f"../{Path(PATH).name}{'?' if query else ''}{query}")
            elif file is not None:
                answer = FileResponse(file, media_type=MEDIA_TYPES[file.suffix], headers=HEADERS)
        await answer(scope, receive, send)


def install_ui(app: FastAPI) -> None:
    """Puts the page in front of the application, which is built when the first request comes.

    A tokenizer worker has built it before: it asks for our parts while its application starts.
    """
    if app.middleware_stack is not None:
        app.middleware_stack = OpenPage(app.middleware_stack)
        return
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: OpenPage(build())  # type: ignore[method-assign]  # on this app

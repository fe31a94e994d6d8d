"""One server with importance for the whole folder: observing only what a question asks for. Its live page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.config_file import config_flags
from support.live_page import API_KEY, WIDE
from support.servers import ServerProcess
from support.waiting import HANG_SECONDS

PAGE_SIZE = 16


@pytest.fixture(scope="session")
def server(probe_model: Path) -> Iterator[ServerProcess]:
    flags = [
        *("--kv-policy", "importance", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "8192"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        # The question's last tokens are what looks for the record; with a short half-life one question shows.
        *config_flags(signal={"window": 2, "half_life_queries": 0.25}),
    ]
    with ServerProcess(*flags, model=probe_model, api_key=API_KEY) as process:
        yield process


@pytest.fixture(scope="session")
def hinting(probe_model: Path) -> Iterator[ServerProcess]:
    """A server whose small pool decides who stays."""
    flags = ["--kv-policy", "importance", "--page-size", str(PAGE_SIZE)]
    with ServerProcess(*flags, "--max-total-tokens", "2048", model=probe_model) as process:
        yield process


@pytest.fixture(scope="module")
def asked(server: ServerProcess) -> ServerProcess:
    """The server, after questions about four documents, all asked again."""
    for _ in range(2):
        for seed in range(200, 204):
            document = make_document(300, seed)
            for name in list(document.records)[:2]:
                server.generate(encode(document.messages(name)), max_new_tokens=2)
    return server


@pytest.fixture
def open_page(browser: Any, asked: ServerProcess) -> Iterator[Callable[..., Any]]:
    """Opens the page with the key in place; afterwards nothing may have gone wrong in it."""
    problems: list[str] = []
    pages = []

    def open_(*, key: str | None = API_KEY, limit: int | None = None, **options: Any) -> Any:
        page = browser.new_page(**({"viewport": WIDE} | options))
        pages.append(page)
        page.set_default_timeout(1000 * HANG_SECONDS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        page.on("request", lambda sent: problems.append(sent.url) if API_KEY in sent.url else None)
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('kv-importance-api-key', '{key}')")
        if limit is not None:
            page.route(
                "**/kv_importance/tree?*",
                lambda route: route.continue_(url=route.request.url.replace("limit=120", f"limit={limit}")),
            )
        page.goto(f"{asked.base_url}/kv_importance/ui")
        return page

    open_.problems = problems  # type: ignore[attr-defined]
    yield open_
    for page in pages:
        page.close()
    assert problems == []

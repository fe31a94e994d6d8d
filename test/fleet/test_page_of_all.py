"""The page of a fleet in a real Chromium, on two real servers that ask for a key."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.cli.fleet_page import FleetPage
from sgl_importance.cli.fleet_view import FleetView

from support.live_page import API_KEY, NARROW, WIDE, confirm
from support.servers import ServerProcess
from support.waiting import wait_until

pytestmark = pytest.mark.server

PAGE = 16
SHARED = [number % 90 + 5 for number in range(20 * PAGE + 3)]
NOBODY = "http://127.0.0.1:9"  # no free one: a server of another test might take it meanwhile


@pytest.fixture(scope="module")
def servers(browser: Any, probe_model: Path) -> Iterator[list[ServerProcess]]:
    """Two servers; the first has the shared prompt three times, the second once more."""
    flags = (
        *("--kv-policy", "importance", "--page-size", str(PAGE), "--max-total-tokens", "4096"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--kv-importance-prewarm", "off"),
    )
    servers = [ServerProcess(*flags, model=probe_model, api_key=API_KEY) for _ in range(2)]
    try:
        for server in servers:
            server.spawn()
        for server in servers:
            server.wait_ready()
        for number in (0, 0, 0, 1, 1):
            servers[number].generate(SHARED, max_new_tokens=2)
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def fleet_page(servers: list[ServerProcess]) -> Iterator[FleetPage]:
    with FleetPage(FleetView([*(server.base_url for server in servers), NOBODY]), 0) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        yield page
        page.shutdown()
        thread.join()


@pytest.fixture
def open_page(browser: Any, fleet_page: FleetPage) -> Iterator[Callable[..., Any]]:
    """Opens the page with the key in place; afterwards nothing may have gone wrong in it."""
    problems: list[str] = []
    pages = []

    def open_(*, key: str | None = API_KEY, **options: Any) -> Any:
        page = browser.new_page(**({"viewport": WIDE} | options))
        pages.append(page)
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        page.on("request", lambda sent: problems.append(sent.url) if API_KEY in sent.url else None)
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('kv-importance-api-key', '{key}')")
        page.goto(fleet_page.url)
        return page

    open_.problems = problems  # type: ignore[attr-defined]
    yield open_
    for page in pages:
        page.close()
    assert problems == []


def row_of(page: Any, server: ServerProcess) -> list[str]:
    row = page.locator(f'[data-member="{server.base_url}"]')
    row.wait_for()
    return row.locator("td").all_inner_texts()


def test_it_shows_every_server_and_their_sums(open_page: Any, servers: list[ServerProcess]) -> None:
    page = open_page()
    documents = [server.get("/kv_importance") for server in servers]
    for server, document in zip(servers, documents, strict=True):
        cells = row_of(page, server)
        assert cells[0] == f"{document['hits']['requests']:,}"
        device = document["tiers"]["device"]
        assert cells[1].startswith(f"{device['used_tokens']:,} of {device['total_tokens']:,}")
        share = 100 * document["hits"]["hit_tokens"]["device"] / document["hits"]["prompt_tokens"]
        assert cells[2] == f"{share:.0f} %"
        assert cells[5:] == ["not used", "0.0 %", "importance", "none"]
        link = page.locator(f'[data-member="{server.base_url}"] a')
        assert link.get_attribute("href") == f"{server.base_url}/kv_importance/ui"
    prompt_tokens = sum(document["hits"]["prompt_tokens"] for document in documents)
    assert f"of {prompt_tokens:,} prompt tokens" in page.locator('[data-tier="device"]').inner_text()
    assert page.locator("#trouble").inner_text().startswith(f"no server at {NOBODY}")


def test_the_hottest_prefix_is_pinned_and_unpinned_on_all(
    open_page: Any, servers: list[ServerProcess]
) -> None:
    page = open_page()
    row = page.locator("[data-prefix]").first
    row.wait_for()
    # Of three requests to one and two to the other, all but the first on each found it.
    assert row.locator("td").all_inner_texts()[:3] == [f"{20 * PAGE}", "3", "2 + 1"]
    row.get_by_role("button", name="Pin").click()
    confirm(page, "Cancel")
    row.get_by_role("button", name="Pin").click()
    page.locator("#confirm-ttl").select_option("3600")
    confirm(page, "Pin")
    page.get_by_text("Done, but not everywhere: no server at").wait_for()
    pin = page.locator("[data-pin]")
    pin.wait_for()
    assert pin.locator("td").all_inner_texts()[:2] == [f"{20 * PAGE}", "2 of 3"]
    for server in servers:
        (held,) = server.get("/kv_importance/pins")["pins"]
        assert held["pin_id"] == pin.get_attribute("data-pin")
        assert held["tokens"] == 20 * PAGE
        assert 3500 < held["expires_in_seconds"] <= 3600
    pin.get_by_role("button", name="Unpin").click()
    confirm(page, "Unpin")
    page.get_by_text("Nothing is pinned.").wait_for()
    assert not any(server.get("/kv_importance/pins")["pins"] for server in servers)


def test_it_asks_for_the_key_as_a_server_s_page_does(open_page: Any, servers: list[ServerProcess]) -> None:
    page = open_page(key=None)
    page.locator("#key").wait_for()
    page.locator("#key").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("The server refused this key").wait_for()
    page.locator("#key").fill(API_KEY)
    page.keyboard.press("Enter")
    row_of(page, servers[0])
    refused = [problem for problem in open_page.problems if "401" in problem]
    assert len(refused) == 2
    open_page.problems[:] = [problem for problem in open_page.problems if "401" not in problem]


def test_a_prompt_s_text_is_text(open_page: Any) -> None:
    """Whatever a prompt holds is shown as it is, and never becomes part of the page."""
    page = open_page()
    page.locator("[data-prefix]").first.wait_for()
    page.route("**/fleet", lambda route: route.fulfill(json=with_markup(route.fetch().json())))
    page.get_by_text("<img src=x onerror=alert(1)>").first.wait_for()
    assert page.locator("img").count() == 0


def with_markup(document: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(document["hottest"][0]["label"])
    return json.loads(json.dumps(document).replace(text, json.dumps("<img src=x onerror=alert(1)>")))


def test_it_fits_a_narrow_screen(open_page: Any, servers: list[ServerProcess]) -> None:
    page = open_page(viewport=NARROW)
    row_of(page, servers[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def test_a_server_that_comes_back_is_shown_again(
    open_page: Any, fleet_page: FleetPage, servers: list[ServerProcess]
) -> None:
    page = open_page()
    row_of(page, servers[1])
    one, *others = fleet_page.view.urls
    fleet_page.view.urls = [one, NOBODY]
    try:
        page.locator(f'[data-member="{servers[1].base_url}"]').wait_for(state="detached")
    finally:
        fleet_page.view.urls = [one, *others]
    wait_until(lambda: row_of(page, servers[1]))

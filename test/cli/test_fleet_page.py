"""The server of a fleet's page: whom it answers, and what it makes of requests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sgl_importance.cli.fleet_command import app
from sgl_importance.cli.fleet_page import LARGEST_BODY, FleetPage
from sgl_importance.cli.fleet_view import FleetView

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def page() -> Iterator[FleetPage]:
    with FleetPage(FleetView([NOBODY, f"{NOBODY}/"]), 0) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        yield page
        page.shutdown()
        thread.join()


@pytest.fixture
def client(page: FleetPage) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page.url, trust_env=False, timeout=60) as client:
        yield client


def test_its_files_are_served_with_their_types_and_nothing_else(client: httpx.Client) -> None:
    start = client.get("/")
    assert start.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in start.headers["content-security-policy"]
    for name, media_type in (("fleet.js", "text/javascript"), ("page.css", "text/css"), ("dom.js", "text/")):
        file = client.get(f"/ui/{name}")
        assert file.status_code == 200
        assert file.headers["content-type"].startswith(media_type)
    for path in ("/ui/fleet.html", "/ui/page_files.py", "/ui/../__init__.py", "/ui/", "/nothing"):
        assert client.get(path).status_code == 404, path


def test_a_server_that_is_down_is_named(client: httpx.Client) -> None:
    shown = client.get("/fleet").json()
    assert shown["servers"] == [NOBODY]
    assert shown["unreached"][NOBODY].startswith(f"no server at {NOBODY}")
    assert shown["members"] == shown["pins"] == shown["hottest"] == []
    answer = client.post("/unpin", json={"pin_id": "some"})
    assert answer.status_code == 502
    assert answer.json()["message"].startswith("no server at")


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Host": "elsewhere.example"},
    ],
)
def test_pages_of_other_sites_are_not_answered(client: httpx.Client, headers: dict[str, str]) -> None:
    for answer in (
        client.get("/fleet", headers=headers),
        client.post("/unpin", json={"pin_id": "some"}, headers=headers),
    ):
        assert answer.status_code == 403
        assert "only its own page" in answer.json()["message"]


def test_its_own_page_and_programs_are_answered(
    client: httpx.Client, page: FleetPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = {"Sec-Fetch-Site": "same-origin", "Origin": page.url}
    local = f"localhost:{page.server_port}"
    by_name = {"Host": local, "Origin": f"http://{local}"}
    for headers in (browser, by_name, {}):
        assert client.get("/fleet", headers=headers).status_code == 200
    without_port = {"Host": "127.0.0.1", "Origin": "http://127.0.0.1"}
    assert client.get("/fleet", headers=without_port).status_code == 403
    monkeypatch.setattr(page, "server_port", 80)
    assert client.get("/fleet", headers=without_port).status_code == 200


@pytest.mark.parametrize("key", ["clé", "ключ", "a\x01"])
def test_a_key_that_no_header_carries_is_refused(client: httpx.Client, key: str) -> None:
    headers = {b"Authorization": f"Bearer {key}".encode()}
    for answer in (
        client.get("/fleet", headers=headers),
        client.post("/unpin", json={"pin_id": "some"}, headers=headers),
    ):
        assert answer.status_code == 401
        assert "no header carries" in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pin", {}),
        ("/pin", {"prefix": 3}),
        ("/pin", {"prefix": "x", "ttl_seconds": "long"}),
        ("/pin", {"prefix": "x", "ttl_seconds": True}),
        ("/unpin", {}),
        ("/unpin", {"pin_id": None}),
        ("/unpin", []),
    ],
)
def test_bad_bodies_are_refused(client: httpx.Client, path: str, body: Any) -> None:
    assert client.post(path, json=body).status_code == 400


def test_a_prefix_that_was_never_shown_is_refused(client: httpx.Client) -> None:
    assert client.post("/pin", json={"prefix": "0" * 16}).status_code == 404


def test_bodies_without_an_end_are_refused(page: FleetPage, client: httpx.Client) -> None:
    assert client.post("/unpin", content=b"x" * (LARGEST_BODY + 1)).status_code == 400
    assert client.post("/unpin", content=b"[" * 50_000).status_code == 400
    for length in (b"-1", b"many", b"", b"9" * 5000):
        with socket.create_connection(("127.0.0.1", page.server_port), timeout=60) as raw:
            host = f"127.0.0.1:{page.server_port}".encode()
            raw.sendall(
                b"POST /unpin HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: " + length + b"\r\n\r\n"
            )
            assert raw.recv(1 << 12).startswith(b"HTTP/1.1 400")


def test_a_port_that_is_taken_has_one_line(page: FleetPage) -> None:
    result = CliRunner().invoke(app, ["page", "--port", str(page.server_port), NOBODY])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "give another --port" in line

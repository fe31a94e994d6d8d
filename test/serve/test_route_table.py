"""What sglang's own middleware sees of our routes: their path templates, and who may ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from sglang.srt.utils.auth import add_api_key_middleware

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http.routes import PREFIX, install_routes

try:
    from sglang.srt.observability import http_request_metrics
except ImportError:  # before 0.5.23
    from sglang.srt.utils.common import add_prometheus_track_response_middleware as count_requests
else:

    def count_requests(app: FastAPI) -> None:
        http_request_metrics.init_http_request_metrics()
        http_request_metrics.add_http_request_metrics_middleware(app)


ADMIN_KEY, USER_KEY = "admin", "user"


def our_app() -> FastAPI:
    app = FastAPI()
    install_routes(app, ImportanceOptions(policy="importance"))
    return app


def operations() -> Iterator[tuple[str, str]]:
    """Method and path of each of our operations, with something for every parameter of the path."""
    for path, methods in our_app().openapi()["paths"].items():
        for method in methods:
            yield method.upper(), path.replace("{node_id}", "17").replace("{job_id}", "x")


# ---- metrics ----


@pytest.fixture(scope="module")
def counted() -> TestClient:
    """Our routes behind sglang's counting of requests, whose series can be registered once in a process."""
    app = our_app()
    count_requests(app)
    return TestClient(app, raise_server_exceptions=False)


def endpoints() -> set[str]:
    series = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return {sample.labels["endpoint"] for sample in series if "endpoint" in sample.labels}


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/node/{}", "/node/{}/prompt", "/prewarm/{}", "/node/{}/x", "/ui/{}", "/{}", "/pins/", "/"]
)
def test_what_a_caller_puts_into_a_path_is_no_label(counted: TestClient, path: str, method: str):
    for word in ("1", "99999", "-1", "none", "%00", "%2Fetc", "ü"):
        counted.request(method, PREFIX + path.format(word), follow_redirects=False)
    templates = set(our_app().openapi()["paths"])
    assert endpoints() <= {*templates, PREFIX + "/{unknown:path}"}


def test_metrics_name_the_template(counted: TestClient):
    counted.get(f"{PREFIX}/node/12/prompt")
    assert PREFIX + "/node/{node_id}/prompt" in endpoints()


# ---- the live page ----


@pytest.mark.parametrize("query", ["", "?dp_rank=1"])
def test_the_page_is_found_with_a_slash_too(query: str):
    client = TestClient(our_app(), root_path="/behind")
    moved = client.get(f"/behind{PREFIX}/ui/{query}", follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (307, f"../ui{query}")
    assert client.get(f"{PREFIX}/ui/{query}").text == client.get(f"{PREFIX}/ui").text


# ---- what no route answers ----


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/node/1/2/3", 404),
        ("POST", "/node/1", 405),
        ("DELETE", "/pins", 405),
        ("HEAD", "/pins", 405),
        ("GET", "/pins/", 307),
        ("GET", "/", 307),
    ],
)
def test_what_no_route_answers(method: str, path: str, status: int):
    client = TestClient(our_app(), raise_server_exceptions=False)
    answer = client.request(method, PREFIX + path, follow_redirects=False)
    assert answer.status_code == status
    if status == 307:
        assert answer.headers["location"].endswith((PREFIX + path).rstrip("/"))


@pytest.mark.parametrize("node", ["x", "1.9", "%00", "9" * 5000])
@pytest.mark.parametrize("path", ["/node/{}", "/node/{}/prompt"])
def test_a_node_that_is_none_is_one_line_without_our_code(path: str, node: str):
    client = TestClient(our_app(), raise_server_exceptions=False)
    answer = client.get(PREFIX + path.format(node))
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("node_id: ")
    assert "\n" not in answer.json()["detail"]


# ---- keys ----


def status(api_key: str | None, admin_key: str | None, sent: str | None, method: str, path: str) -> int:
    app = our_app()
    add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_key)
    client = TestClient(app, raise_server_exceptions=False)  # without a scheduler what is let through fails
    headers = {"authorization": f"Bearer {sent}"} if sent else {}
    return client.request(method, path, headers=headers).status_code


@pytest.mark.parametrize(("method", "path"), [*operations()])
def test_keys_guard_every_operation(method: str, path: str):
    """sglang's rule of what its administrator may do: the admin key where there is one, else the key."""
    for api_key, admin_key, accepted in (
        (USER_KEY, None, USER_KEY),
        (None, ADMIN_KEY, ADMIN_KEY),
        (USER_KEY, ADMIN_KEY, ADMIN_KEY),
    ):
        for sent in (None, USER_KEY, ADMIN_KEY, "made-up"):
            answered = status(api_key, admin_key, sent, method, path)
            assert (answered != 401) == (sent == accepted), (api_key, admin_key, sent, answered)

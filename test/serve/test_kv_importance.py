"""GET /kv_importance and /metrics of a real server."""

from __future__ import annotations

import httpx
import pytest

from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.servers import ServerProcess

pytestmark = pytest.mark.server

NODE_FIELDS = {
    *(
        "id",
        "parent",
        "depth_tokens",
        "tokens",
        "tiers",
        "body_mass",
        "peak",
        "lift",
        "self_mass",
        "cross_mass",
    ),
    *("queries", "accesses", "answer_end", "age", "p_reuse", "loss", "pinned"),
}


@pytest.fixture(scope="module")
def asked(server: ServerProcess) -> ServerProcess:
    """The server, after three questions about each of two documents."""
    for seed in (100, 101):
        document = make_document(400, seed)
        for name in list(document.records)[:3]:
            server.generate(encode(document.messages(name)), max_new_tokens=4)
    return server


def test_nodes_are_described_in_order_of_loss(asked: ServerProcess):
    snapshot = asked.get("/kv_importance", limit=1000)
    nodes = snapshot["nodes"]
    assert (snapshot["version"], snapshot["policy"], snapshot["page_size"]) == (1, "importance", 16)
    assert all(set(node) == NODE_FIELDS for node in nodes)
    losses = [node["loss"] for node in nodes]
    assert losses == sorted(losses, reverse=True)
    by_id = {node["id"]: node for node in nodes}
    for node in nodes:
        assert 0 <= node["age"] <= snapshot["clock"]
        parent = by_id.get(node["parent"])
        if parent is not None:
            assert parent["depth_tokens"] + parent["tokens"] == node["depth_tokens"]
            assert parent["p_reuse"] >= node["p_reuse"]


def test_tiers_add_up(asked: ServerProcess):
    snapshot = asked.get("/kv_importance", limit=1000)
    device = snapshot["tiers"]["device"]
    on_device = sum(node["tokens"] for node in snapshot["nodes"] if "device" in node["tiers"])
    assert device["used_tokens"] == on_device
    assert device["total_tokens"] == 8192
    assert snapshot["tiers"]["host"]["used_tokens"] == sum(
        node["tokens"] for node in snapshot["nodes"] if "host" in node["tiers"]
    )


def test_pages_of_the_listing_make_up_the_whole(asked: ServerProcess):
    whole = [node["id"] for node in asked.get("/kv_importance", limit=1000)["nodes"]]
    listed: list[int] = []
    cursor = None
    while True:
        page = asked.get("/kv_importance", limit=3, **({"cursor": cursor} if cursor else {}))
        listed += [node["id"] for node in page["nodes"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert listed == whole
    assert len(whole) > 6


def test_small_nodes_can_be_left_out(asked: ServerProcess):
    nodes = asked.get("/kv_importance", limit=1000, min_tokens=64)["nodes"]
    assert nodes
    assert all(node["tokens"] >= 64 for node in nodes)


@pytest.mark.parametrize("params", [{"limit": 0}, {"limit": "many"}, {"cursor": "abc"}, {"min_tokens": -1}])
def test_a_bad_parameter_is_the_caller_s_error_and_names_it(asked: ServerProcess, params: dict):
    with pytest.raises(httpx.HTTPStatusError) as failure:
        asked.get("/kv_importance", **params)
    assert failure.value.response.status_code == 400
    message = failure.value.response.json()["message"]
    assert next(iter(params)) in message
    assert "File" not in message


def test_the_server_s_api_key_guards_the_tree(asked: ServerProcess):
    answer = httpx.get(f"{asked.base_url}/kv_importance", trust_env=False)
    assert answer.status_code == 401


def test_an_action_moves_its_metric_and_no_other(asked: ServerProcess):
    prefix = "sglang:kv_importance_"
    names = ("requests_total", "folds_total", "fold_seconds_total")
    before = {name: asked.metric(prefix + name) for name in names}
    hits = asked.metric(f"{prefix}hit_tokens_total", tier="device")
    evicted = asked.metric(f"{prefix}evicted_tokens_total", tier="device")
    prompt = encode(make_document(400, 100).messages(next(iter(make_document(400, 100).records))))
    asked.generate(prompt, max_new_tokens=4)
    after = {name: asked.metric(prefix + name) for name in names}
    assert after["requests_total"] == before["requests_total"] + 1
    assert after["folds_total"] == before["folds_total"] + 2
    assert after["fold_seconds_total"] > before["fold_seconds_total"]
    assert asked.metric(f"{prefix}hit_tokens_total", tier="device") > hits
    assert asked.metric(f"{prefix}evicted_tokens_total", tier="device") == evicted

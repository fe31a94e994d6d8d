"""A server with two data-parallel replicas in a fleet: two members of one address."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sgl_importance.cli.fleet_command import app
from sgl_importance.cli.fleet_view import FleetView
from sgl_importance.cli.pin_commands import app as pin_app

from support.servers import ServerProcess
from support.victims import cores_of_ranks

pytestmark = pytest.mark.server

PAGE = 16
PROMPT = [number % 90 + 5 for number in range(6 * PAGE + 3)]


@pytest.fixture(scope="module")
def server(probe_model: Path) -> Iterator[ServerProcess]:
    flags = (
        *("--kv-policy", "importance", "--page-size", str(PAGE), "--max-total-tokens", "2048"),
        *("--dp-size", "2", "--kv-importance-prewarm", "off"),
    )
    with ServerProcess(*flags, model=probe_model, env=cores_of_ranks(2), nccl_port=False) as server:
        for rank in (0, 0, 0, 1, 1):
            sampling = {"temperature": 0, "max_new_tokens": 2}
            body = {"input_ids": PROMPT, "sampling_params": sampling, "routed_dp_rank": rank}
            server.post("/generate", body)
        yield server


def command(*words: str) -> Any:
    result = CliRunner().invoke(app, [*words, "--json"], env={"NO_PROXY": "*"})
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_each_replica_is_a_member(server: ServerProcess) -> None:
    shown = command(server.base_url)
    names = [f"{server.base_url} dp{rank}" for rank in (0, 1)]
    assert [each["name"] for each in shown["members"]] == names
    hot = shown["hottest"][0]
    assert hot["prefix_tokens"] == 6 * PAGE
    assert [(each["name"], each["uses"]) for each in hot["members"]] == list(zip(names, (2, 1), strict=True))


def test_each_tenant_s_uses_are_its_own(server: ServerProcess) -> None:
    tokens = [number % 70 + 9 for number in range(2 * PAGE + 3)]
    for salt, rank in ((None, 0), (None, 0), (None, 0), ("tenant", 1), ("tenant", 1)):
        sampling = {"temperature": 0, "max_new_tokens": 2}
        body = {"input_ids": tokens, "sampling_params": sampling, "routed_dp_rank": rank, "cache_salt": salt}
        server.post("/generate", body)
    rows = [row for row in command(server.base_url)["hottest"] if row["tokens"] == 2 * PAGE]
    uses = {row["cache_salt"]: [member["uses"] for member in row["members"]] for row in rows}
    assert uses == {None: [2, 0], "tenant": [0, 1]}
    found = {
        salt: [
            each["matched_tokens"]
            for each in server.post("/kv_importance/find", {"input_ids": tokens} | given)["dp_ranks"]
        ]
        for salt, given in (("any", {}), ("none", {"cache_salt": ""}), ("one", {"cache_salt": "tenant"}))
    }
    assert found == {"any": [32, 32], "none": [32, 0], "one": [0, 32]}


def test_a_pin_is_on_both_and_is_one(server: ServerProcess, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(PROMPT))
    words = ["pin", "--input-ids", str(prompt), server.base_url]
    told = CliRunner().invoke(app, words, env={"NO_PROXY": "*"})
    assert told.exit_code == 0, told.output
    assert "pinned on 1 of 1 servers" in told.output
    (pin,) = command("pins", server.base_url)["pins"]
    alone = CliRunner().invoke(
        pin_app, ["list", "--url", server.base_url], env={"NO_PROXY": "*", "COLUMNS": "120"}
    )
    assert alone.exit_code == 0, alone.output
    assert pin["pin_id"] in alone.output
    ranks = server.get("/kv_importance/pins")["dp_ranks"]
    assert [[each["pin_id"] for each in rank["pins"]] for rank in ranks] == [[pin["pin_id"]]] * 2
    command("unpin", pin["pin_id"], server.base_url)
    assert command("pins", server.base_url)["pins"] == []


def test_the_page_leads_to_each_replica(server: ServerProcess) -> None:
    view = FleetView([server.base_url])
    shown = view.show(None)
    assert [(each["url"], each["dp_rank"]) for each in shown["members"]] == [
        (server.base_url, 0),
        (server.base_url, 1),
    ]
    view.pin(None, shown["hottest"][0]["id"], None)
    (pin,) = view.show(None)["pins"]
    assert pin["tokens"] == 6 * PAGE
    view.unpin(None, pin["pin_id"])
    assert view.show(None)["pins"] == []

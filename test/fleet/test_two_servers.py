"""Two servers over one directory and one PostgreSQL: each serves the other, and both learn together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sgl_importance.cli.fleet_command import app
from sglang_importance.launch.doctor import app as doctor

from support.postgres import Postgres
from support.servers import ServerProcess
from support.store_bench import count
from support.waiting import wait_until

pytestmark = pytest.mark.server

PAGE = 16
SHARED_PAGES = 20
SHARED = [number % 90 + 5 for number in range(SHARED_PAGES * PAGE + 3)]
OWN = [[number, *range(5, 5 + 4 * PAGE)] for number in (100, 101)]
NOBODY = "http://127.0.0.1:9"  # no free one: a server of another test might take it meanwhile


class Fleet:
    """The servers, and how many requests they have had."""

    def __init__(self, servers: list[ServerProcess]) -> None:
        self.servers = servers
        self.urls = [server.base_url for server in servers]
        self.requests = 0

    def ask(self, number: int, tokens: list[int]) -> dict[str, Any]:
        self.requests += 1
        return self.servers[number].generate(tokens, max_new_tokens=2, ignore_eos=True)

    def admitted(self) -> int:
        documents = [server.get("/kv_importance") for server in self.servers]
        return sum(int(document["hits"]["requests"]) for document in documents)

    def command(self, *words: str, code: int = 0) -> Any:
        """The answer of ``sgl-importance fleet`` in JSON."""
        result = CliRunner().invoke(app, [*words, "--json"], env={"NO_PROXY": "*"})
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)


@pytest.fixture(scope="module")
def fleet(postgres: Postgres, probe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    postgres.forget()
    flags = (
        *("--kv-policy", "importance", "--page-size", str(PAGE), "--max-total-tokens", "4096"),
        *("--kv-importance-store", str(tmp_path_factory.mktemp("store")), "--hicache-ratio", "2"),
        *("--kv-importance-ledger", postgres.url, "--kv-importance-prewarm", "off"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
    )
    servers = [ServerProcess(*flags, model=probe_model) for _ in range(2)]
    try:
        for server in servers:
            server.spawn()
        for server in servers:
            server.wait_ready()
        yield Fleet(servers)
    finally:
        for server in servers:
            server.stop()
        if not postgres.is_running:
            postgres.start()


def test_they_serve_each_other_s_pages_and_learn_together(fleet: Fleet, postgres: Postgres) -> None:
    one, _ = fleet.servers
    for tokens in (SHARED, SHARED, OWN[0]):
        first = fleet.ask(0, tokens)
    wait_until(lambda: count(one, "written_pages") >= 24)
    shared = fleet.ask(0, SHARED)
    assert fleet.ask(1, SHARED)["output_ids"] == shared["output_ids"]
    again = fleet.ask(1, OWN[0])
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens_details"]["storage"] == 4 * PAGE
    fleet.ask(1, OWN[1])
    # All that both have admitted; a server asks itself, too, while it starts.
    wait_until(lambda: postgres.execute("SELECT clock FROM models") == [(fleet.admitted(),)])
    assert fleet.admitted() >= fleet.requests
    (clocks,) = postgres.execute("SELECT count(*), count(DISTINCT model) FROM prefixes")
    assert clocks[0] >= 3
    assert clocks[1] == 1, "servers of one model share their rows"


def test_they_are_shown_as_one(fleet: Fleet) -> None:
    shown = fleet.command(*fleet.urls)
    assert [each["name"] for each in shown["members"]] == fleet.urls
    assert shown["together"]["requests"] == fleet.admitted()
    assert shown["members"][1]["hits"]["hit_tokens"]["storage"] > 0
    assert not shown["unreached"]
    assert not any(each["trouble"] for each in shown["members"])
    hot = shown["hottest"][0]
    # Of three requests to one server, two found it there; the one to the other found it in the store.
    assert hot["prefix_tokens"] == SHARED_PAGES * PAGE
    assert [each["uses"] for each in hot["members"]] == [2, 1]
    assert hot["uses"] == 3


def test_pins_are_for_all_and_a_server_that_is_down_stops_nobody(fleet: Fleet, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(SHARED))
    pinned = fleet.command("pin", "--input-ids", str(prompt), *fleet.urls, NOBODY, code=1)
    assert list(pinned["servers"]) == fleet.urls
    assert list(pinned["unreached"]) == [NOBODY]
    (row,) = fleet.command("pins", *fleet.urls)["pins"]
    assert row["pin_id"] == pinned["pin_id"]
    assert list(row["granted_tokens"]) == fleet.urls
    table = CliRunner().invoke(app, ["pins", *fleet.urls], env={"NO_PROXY": "*", "COLUMNS": "100"}).output
    assert "2 of 2" in table
    ended = fleet.command("unpin", pinned["pin_id"], *fleet.urls)
    assert list(ended["servers"]) == fleet.urls
    assert fleet.command("pins", *fleet.urls)["pins"] == []
    again = CliRunner().invoke(app, ["unpin", pinned["pin_id"], *fleet.urls], env={"NO_PROXY": "*"})
    assert again.exit_code == 2
    assert again.stderr.startswith("error: none of 2 servers")
    assert len(again.stderr.splitlines()) == 1


def test_the_password_is_shown_nowhere(fleet: Fleet, postgres: Postgres) -> None:
    for server in fleet.servers:
        seen = [
            server.log(),
            json.dumps(server.get("/kv_importance")),
            json.dumps(server.get("/server_info")),
        ]
        seen.append(CliRunner().invoke(doctor, ["--url", server.base_url], env={"NO_PROXY": "*"}).output)
        assert postgres.url in seen[0]
        assert not any(postgres.password in text for text in seen)


def test_without_the_database_they_serve_on_and_say_so(fleet: Fleet, postgres: Postgres) -> None:
    postgres.stop()
    fleet.ask(0, SHARED)
    wait_until(lambda: fleet.servers[0].get("/kv_importance")["ledger"]["lost_visits"] == 1)
    fleet.ask(0, OWN[1])
    (line,) = fleet.command(fleet.urls[0])["members"][0]["trouble"]
    assert line.startswith(f"the ledger {postgres.url} is not written")
    result = CliRunner().invoke(app, fleet.urls, env={"NO_PROXY": "*"})
    assert "is not written" in result.output
    assert fleet.servers[0].metric("sglang:kv_importance_ledger_lost_visits_total") >= 1
    wait_until(lambda: "the server goes on without" in fleet.servers[0].log())

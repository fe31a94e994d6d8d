"""Why prompts were not found, on a real server: what the operator is told, and what the client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sgl_importance.cli.why_command import app as why_app

from support.servers import ServerProcess

pytestmark = pytest.mark.server

PAGE_SIZE = 16
PROMPT = list(range(300, 300 + 20 * PAGE_SIZE))
USABLE = len(PROMPT) - PAGE_SIZE  # of the prompt's last page, the last token is computed always


@pytest.fixture
def server(hinting: ServerProcess) -> ServerProcess:
    hinting.flush_cache()
    return hinting


def ask(server: ServerProcess, tokens: list[int], **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What operator and client are told of a request."""
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    meta = server.post("/generate", {**body, **fields, "kv_hints": {"report": True}})["meta_info"]
    (operator,) = server.get("/kv_importance/why", rid=meta["id"])["requests"]
    client = meta["kv_importance"]
    for told in (operator, client):
        found = told["found_tokens"] if "found_tokens" in told else told["hit_tokens"]
        assert sum(found.values()) + sum(told["missed_tokens"].values()) == len(tokens)
        assert sum(found.values()) == meta["cached_tokens"]
    return operator, client


def evict(server: ServerProcess) -> None:
    """Fills the pool with other prompts."""
    for seed in range(8):
        body = {"input_ids": [20 + seed] * 30 * PAGE_SIZE, "sampling_params": {"max_new_tokens": 1}}
        server.post("/generate", body)


def test_a_new_prompt_was_never_seen_and_a_known_one_is_found(server: ServerProcess) -> None:
    fresh = [7, *PROMPT]
    operator, client = ask(server, fresh)
    assert operator["missed_tokens"].keys() == {"never_seen", "short"}
    assert client["missed_tokens"].keys() == {"not_found", "short"}
    operator, client = ask(server, fresh)
    assert operator["missed_tokens"] == client["missed_tokens"] == {"short": len(fresh) % PAGE_SIZE}
    assert operator["parted"] is None


def test_a_changed_token_says_where_it_parted_and_from_whom(server: ServerProcess) -> None:
    earlier, _ = ask(server, PROMPT)
    changed = PROMPT.copy()
    changed[100] += 1
    operator, client = ask(server, changed)
    at = 100 // PAGE_SIZE * PAGE_SIZE
    assert operator["missed_tokens"] == {"parted": USABLE - at, "short": PAGE_SIZE}
    assert (operator["parted"]["token"], operator["parted"]["rid"]) == (100, earlier["rid"])
    assert operator["parted"]["before"]
    assert operator["parted"]["asked"] != operator["parted"]["known"]
    assert client["parted"]["token"] == 100
    assert client["parted"].keys() == {"token", "seconds_ago"}


def test_an_evicted_prefix_says_when_from_where_and_for_whom(server: ServerProcess) -> None:
    ask(server, PROMPT)
    evict(server)
    operator, client = ask(server, PROMPT)
    lost = [part for part in operator["parts"] if part["reason"] == "evicted"]
    assert sum(part["tokens"] for part in lost) == operator["missed_tokens"]["evicted"] > 0
    for part in lost:
        assert part["tier"] == "device"
        assert part["needed_by"]["work"] == "prefill"
        assert part["needed_by"]["rid"]
        assert 0 < part["requests_ago"] <= 9
        assert part["predicted_reuse"] >= 0
    assert client["missed_tokens"] == operator["missed_tokens"]
    assert not any("needed_by" in part for part in client["missed"])


def test_another_salt_is_told_to_the_operator_only(server: ServerProcess) -> None:
    ask(server, PROMPT, cache_salt="alice")
    operator, client = ask(server, PROMPT, cache_salt="mallory")
    assert operator["missed_tokens"] == {"other_namespace": USABLE, "short": PAGE_SIZE}
    assert client["missed_tokens"] == {"not_found": USABLE, "short": PAGE_SIZE}
    server.flush_cache()
    _, alone = ask(server, PROMPT, cache_salt="eve")
    # Nothing in a client's report depends on what other namespaces hold.
    assert client == alone | {"hints": client["hints"]}


def test_a_flush_says_flush(server: ServerProcess) -> None:
    ask(server, PROMPT)
    server.flush_cache()
    operator, client = ask(server, PROMPT)
    assert operator["missed_tokens"] == client["missed_tokens"] == {"flushed": USABLE, "short": PAGE_SIZE}
    assert operator["parts"][0]["cause"] == client["missed"][0]["cause"] == "flush"


def test_a_prompt_may_be_asked_about_without_computing_it(server: ServerProcess) -> None:
    ask(server, PROMPT, cache_salt="alice")
    before = server.get("/kv_importance/why")["requests"][0]["rid"]
    for salt, found, missed in (("alice", USABLE, {}), ("bob", 0, {"other_namespace": USABLE})):
        told = server.post("/kv_importance/why", {"input_ids": PROMPT, "cache_salt": salt})["requests"][0]
        assert told["found_tokens"]["device"] == found
        assert told["missed_tokens"] == {**missed, "short": PAGE_SIZE}
    assert server.get("/kv_importance/why")["requests"][0]["rid"] == before


def test_missed_tokens_are_counted_by_reason(server: ServerProcess) -> None:
    name = "sglang:kv_importance_missed_tokens_total"
    before = server.metric(name, reason="parted")
    ask(server, PROMPT)
    ask(server, [*PROMPT[:32], *range(900, 940)])
    assert server.metric(name, reason="parted") - before == 32
    text = httpx.get(f"{server.base_url}/metrics", trust_env=False).text
    rows = [line for line in text.splitlines() if line.startswith(name)]
    assert not any("302" in row.partition("}")[0] for row in rows)


def test_a_request_that_is_not_known_is_one_line(server: ServerProcess) -> None:
    answer = httpx.get(f"{server.base_url}/kv_importance/why", params={"rid": "gone"}, trust_env=False)
    assert answer.status_code == 404
    assert "request gone is none of the last" in answer.text


def test_the_command_tells_the_same(server: ServerProcess, tmp_path: Path) -> None:
    ask(server, PROMPT)
    changed = [*PROMPT[:100], 5, *PROMPT[101:]]
    operator, _ = ask(server, changed)
    run = CliRunner().invoke
    listed = run(why_app, ["--url", server.base_url])
    assert listed.exit_code == 0, listed.output
    assert "parted at token 100" in " ".join(listed.output.split())
    one = run(why_app, ["--url", server.base_url, "--rid", operator["rid"]])
    assert one.exit_code == 0, one.output
    assert f"request {operator['rid']}" in one.output
    assert "It parted at token 100" in one.output
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps({"input_ids": changed, "cache_salt": "x"}))
    asked = run(why_app, ["--url", server.base_url, "--prompt", str(file), "--json"])
    assert asked.exit_code == 0, asked.output
    assert json.loads(asked.output)["requests"][0]["missed_tokens"]["other_namespace"] == USABLE

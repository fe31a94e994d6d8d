"""A real server under observe, asked by `sgl-importance observe`, against the replay of its own recording."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sgl_importance.cli import observe_command
from sgl_importance.cli.observe_command import app
from sgl_importance.cli.server_client import Server, ServerError
from sgl_importance.observe.shadow.tiered_shadow import HostWrites
from sgl_importance.observe.trace import open_trace
from sgl_importance.tiers import Tier
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.lower_tiers.served_tiers import replay_served_tiers
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup, TierSize, WritePolicy
from sgl_importance_lab.replay.policy_registry import IMPORTANCE
from sgl_importance_lab.replay.replay_runner import ReplayMode, choose_replay
from sgl_importance_lab.sizing.cli import app as size_app
from sgl_importance_lab.sizing.recorded_pair import recorded_pair

from support.recordings import wait_until_recorded
from support.servers import ServerProcess, free_port
from support.waiting import wait_until

API_KEY = "secret"
POOL_TOKENS, PAGE_SIZE, CHUNK_TOKENS = 2048, 16, 128
SERVER_FLAGS = (
    *("--page-size", str(PAGE_SIZE), "--max-total-tokens", str(POOL_TOKENS)),
    *("--chunked-prefill-size", str(CHUNK_TOKENS)),
)


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def _questions(count: int) -> list[list[int]]:
    rng = random.Random(1)
    documents = [make_document(400, seed) for seed in range(9)]
    prompts = []
    for _ in range(count):
        document = rng.choice(documents)
        prompts.append(encode(document.messages(rng.choice(list(document.records)))))
    return prompts


@pytest.mark.nightly
@pytest.mark.server
@pytest.mark.parametrize("writes", [None, *HostWrites])
def test_shadow_and_replay_compute_what_a_server_under_importance_does(
    probe_model: Path, tmp_path: Path, writes: HostWrites | None
) -> None:
    """Prompts of several chunks, one at a time: they agree to the token, as they do under recency, below.
    The recording says which tiers there were, and what a chunk was."""
    flags = ("--kv-policy", "importance", *SERVER_FLAGS, "--kv-importance-trace", str(tmp_path))
    if writes is not None:
        flags += ("--enable-hierarchical-cache", "--hicache-ratio", "1", "--hicache-write-policy", writes)
    with ServerProcess(*flags, model=probe_model) as server:
        replies = [server.generate(prompt, max_new_tokens=3)["meta_info"] for prompt in _questions(60)]
        wait_until_recorded(tmp_path, [reply["id"] for reply in replies])
    prompt_tokens = sum(reply["prompt_tokens"] for reply in replies)
    computed = prompt_tokens - sum(reply["cached_tokens"] for reply in replies)
    recording = open_trace(tmp_path)
    pair = recorded_pair(recording)
    assert pair is not None
    of_shadow = pair.comparison.other_hit_tokens
    trace = read_trace(tmp_path)
    if writes is None:
        replay = choose_replay(IMPORTANCE, ReplayMode.NODES, chunk_tokens=CHUNK_TOKENS)
        of_replay = replay(trace, POOL_TOKENS // PAGE_SIZE).hit_tokens
    else:
        tiers = recording.header.capacity_tokens
        sizes = tuple(TierSize(Tier(tier), tiers[tier] // PAGE_SIZE, IMPORTANCE, 1.0) for tier in tiers)
        setup = TieredSetup(sizes, WritePolicy(writes), 1.0, 1, CHUNK_TOKENS)
        device, host = replay_served_tiers(trace, setup).tiers
        assert host.hit_tokens > 0, "something was loaded"
        of_replay = device.hit_tokens + host.hit_tokens
    print(f"computed: server {computed} of {prompt_tokens}")
    assert (prompt_tokens - of_shadow, prompt_tokens - of_replay) == (computed, computed)


def _waiting_events(server: ServerProcess) -> int:
    observe = server.get("/kv_importance", limit=1)["observe"]
    assert not observe["failed"], server.log_tail()
    waiting: int = observe["waiting_events"]
    return waiting


@pytest.mark.server
def test_a_live_comparison_is_the_replay_of_its_recording(probe_model: Path, tmp_path: Path) -> None:
    flags = ("--kv-policy", "observe", *SERVER_FLAGS, "--kv-importance-trace", str(tmp_path))
    with ServerProcess(*flags, model=probe_model, api_key=API_KEY) as server:
        replies = [server.generate(prompt, max_new_tokens=3) for prompt in _questions(40)]
        wait_until_recorded(tmp_path, [reply["meta_info"]["id"] for reply in replies])
        wait_until(lambda: not _waiting_events(server))
        refused = _run("--url", server.base_url)
        assert (refused.exit_code, "--api-key" in refused.output) == (2, True)
        asked = _run("--url", server.base_url, "--api-key", API_KEY, "--json")
        assert asked.exit_code == 0, asked.output
        report = json.loads(asked.output)
        table = _run("--url", server.base_url, "--api-key", API_KEY)
        metric = server.metric("sglang:kv_importance_shadow_hit_tokens_total", policy="lru")
    assert report["requests"] >= 40
    assert report["dropped_events"] == 0
    assert not report["failed"]
    assert 0 < metric <= report["lru_hit_tokens"]
    # One request at a time: the shadow of stock's order finds what the server itself found.
    assert report["lru_hit_tokens"] == report["server_hit_tokens"] > 0
    assert report["saved_tokens"] + report["lost_tokens"] > 0, "the histories diverged"
    assert report["verdict"].split(":")[0] in table.output
    print(f"{report['busy_seconds'] / report['requests'] * 1e6:.0f} us of shadow a request")

    replay = choose_replay("lru", ReplayMode.NODES, chunk_tokens=CHUNK_TOKENS)
    assert replay(read_trace(tmp_path), POOL_TOKENS // PAGE_SIZE).hit_tokens == report["lru_hit_tokens"]
    sized = tmp_path / "size.json"
    size = CliRunner().invoke(size_app, [*map(str, (tmp_path, "--jobs", 1, "--json", sized))])
    assert size.exit_code == 0, size.output
    of_size = json.loads(sized.read_text())["observed"]
    assert {name: report[name] for name in of_size if name != "volatile"} == {
        name: value for name, value in of_size.items() if name != "volatile"
    }, "both say the same of the same requests"
    advice = {each["change"]: each for each in report["changes"]}
    assert set(advice) == {"importance", "2 times the pool", "4 times the pool", "8 times the pool"}
    assert advice["2 times the pool"]["hit_tokens"] > report["lru_hit_tokens"]
    assert report["bend_tokens"] is None, "of so few requests"


@pytest.mark.parametrize("policy", ["importance", "default"])
def test_a_server_that_does_not_observe_is_told_so(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(Server, "get", lambda *args, **params: {"policy": policy, "nodes": []})
    result = _run()
    assert (result.exit_code, "start it with --kv-policy observe" in result.output) == (2, True)


def watched(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, object] | ServerError) -> Result:
    """`observe --watch 1` over these answers, and Ctrl-C behind them."""
    left = list(answers)

    def get(*_: object, **__: object) -> dict[str, object]:
        answer = left.pop(0)
        if isinstance(answer, ServerError):
            raise answer
        return answer

    def sleep(_: float) -> None:
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(Server, "get", get)
    monkeypatch.setattr(observe_command.time, "sleep", sleep)
    monkeypatch.setattr(observe_command, "summarize", lambda document: document)
    return _run("--watch", "1", "--json")


def test_a_watch_goes_on_over_a_restart_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    away = ServerError("no server answers")
    result = watched(monkeypatch, {"observe": 1}, away, {"policy": "default"}, {"observe": 2})
    assert result.exit_code == 0
    assert json.loads(f"[{result.stdout.replace('}', '},', 1)}]") == [{"observe": 1}, {"observe": 2}]
    first, second = result.stderr.splitlines()
    assert first == "no server answers; asking again in 1 s"
    assert "start it with --kv-policy observe" in second


def test_a_watch_ends_where_no_answer_ever_came(monkeypatch: pytest.MonkeyPatch) -> None:
    result = watched(monkeypatch, ServerError("no server answers"), {"observe": 1})
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no server answers" in result.stderr


def test_nobody_there_is_one_line_with_a_cure() -> None:
    result = _run("--url", f"http://127.0.0.1:{free_port()}")
    assert (result.exit_code, "--url" in result.output) == (2, True)
    assert "Traceback" not in result.output

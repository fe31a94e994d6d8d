"""Two tensor-parallel ranks with everything of ours: they must evict the same nodes in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.metrics_table import PREFIX

from support.kept import wait_until_kept
from support.models import write_random_llama
from support.prewarms import ended
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess
from support.victims import VICTIM_LOG, cores_of_ranks, log_victims_to, victims
from support.workloads.shared_prefixes import shared_prefixes

pytestmark = pytest.mark.server

PAGE_TOKENS, POOL_TOKENS, PREFIX_TOKENS, ANSWER_TOKENS = 16, 512, 96, 4
RANKS = ("--tp-size", "2", "--page-size", str(PAGE_TOKENS), "--max-running-requests", "4")
COMMON = ("--skip-tokenizer-init", "--context-length", "2048", "--attention-backend", "torch_native", *RANKS)
POOL = (*COMMON, "--max-total-tokens", str(POOL_TOKENS))
PLUGINS = python_path(CHECKS / "tree_check", CHECKS / "uneven_clocks", VICTIM_LOG)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Eight prefixes of six pages, each asked about three times, in any order."""
    return shared_prefixes(8, 3, prefix_tokens=PREFIX_TOKENS)


@pytest.fixture(scope="module")
def answers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Of two ranks of stock sglang that reuse nothing."""
    flags = ("--kv-policy", "default", "--disable-radix-cache", *COMMON)
    with ServerProcess(*flags, model=model, env=cores_of_ranks(2)) as server:
        return [asked(server, prompt)["output_ids"] for prompt in prompts]


def asked(server: ServerProcess, prompt: list[int]) -> dict[str, Any]:
    return server.generate(prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)


def check_victims(folder: Path, *tiers: str) -> None:
    """Both ranks have evicted, and alike."""
    first, second = victims(folder).values()
    assert first == second
    assert {line.split()[0] for line in first} >= set(tiers)


@pytest.mark.tested(
    kind="mode",
    name="`--tp-size 2`: pins, ledger, pre-warm, host tier and verified store over a restart",
    mode="page scores from attention",
    backend="torch_native",
)
def test_both_ranks_evict_alike(
    model: Path, prompts: list[list[int]], answers: list[list[int]], tmp_path: Path
) -> None:
    flags = (
        *("--kv-policy", "importance", *POOL, "--hicache-ratio", "1.1"),
        *("--kv-importance-store", str(tmp_path / "store")),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PREFIX_TOKENS // 2})),
    )
    env = {**PLUGINS, **cores_of_ranks(2)}
    pinned = prompts[0][:PREFIX_TOKENS]
    with ServerProcess(*flags, model=model, env={**env, **log_victims_to(tmp_path / "first")}) as server:
        # Were each rank to look at its own clock, it would have ended on one of them.
        pin = server.post("/kv_importance/pin", {"input_ids": pinned, "ttl_seconds": 1800})
        replies = [asked(server, prompt) for prompt in prompts]
        assert [reply["output_ids"] for reply in replies] == answers
        assert sum(reply["meta_info"]["cached_tokens"] for reply in replies) >= 4 * PREFIX_TOKENS
        (held,) = server.get("/kv_importance/pins")["pins"]
        assert (held["pin_id"], held["resident_tokens"]) == (pin["pin_id"], len(pinned))
        assert server.metric(f"{PREFIX}folds_total") > 0
        # One rank counts, or each request would be two.
        assert server.metric(f"{PREFIX}requests_total") == server.get("/kv_importance")["clock"]
        nodes = server.get("/kv_importance", limit=1000)["nodes"]
        assert any(node["pinned"] for node in nodes)
        assert any(0 < node["body_mass"] < 1.001 * node["queries"] for node in nodes)
        assert server.get("/kv_importance/events")["events"]
        server.flush_cache()
        assert server.log().count("tree_check: sound with") > 4
        wait_until_kept(server)
        server.kill_launcher()
    check_victims(tmp_path / "first", "device", "host")

    with ServerProcess(*flags, model=model, env={**env, **log_victims_to(tmp_path / "again")}) as server:
        job = ended(server)
        assert (job["state"], job["refused_tokens"]) == ("done", 0)
        assert job["hit_tokens"]["storage"] > 0
        (restored,) = server.get("/kv_importance/pins")["pins"]
        assert restored["tokens"] == len(pinned)
        assert server.get("/kv_importance")["clock"] >= len(prompts)
        assert [asked(server, prompt)["output_ids"] for prompt in prompts] == answers
    check_victims(tmp_path / "again", "device")


@pytest.mark.nightly
@pytest.mark.tested(
    kind="mode",
    name="`--tp-size 2 --kv-policy observe`",
    mode="page scores from attention",
    backend="torch_native",
)
def test_observing_ranks(
    model: Path, prompts: list[list[int]], answers: list[list[int]], tmp_path: Path
) -> None:
    env = {**PLUGINS, **cores_of_ranks(2), **log_victims_to(tmp_path / "victims")}
    flags = ("--kv-policy", "observe", "--kv-importance-trace", str(tmp_path / "trace"), *POOL)
    with ServerProcess(*flags, model=model, env=env) as server:
        assert [asked(server, prompt)["output_ids"] for prompt in prompts] == answers
        assert server.get("/kv_importance")["observe"]["requests"] >= len(prompts)
        assert server.metric(f"{PREFIX}folds_total") > 0
        server.flush_cache()
    check_victims(tmp_path / "victims", "device")
    assert len(list((tmp_path / "trace").iterdir())) == 1

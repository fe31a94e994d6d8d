"""Two replicas, apart and behind data-parallel attention: a tree each, one server."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sglang.srt.disaggregation.kv_events import BlockRemoved

from sgl_importance.metrics_table import PREFIX

from support.families import FAMILIES, VOCABULARY, write_random_model
from support.kv_event_subscriber import Subscriber, pages_of, subscribers
from support.prewarms import ended
from support.python_path import CHECKS, python_path
from support.servers import REQUEST_SECONDS, ServerProcess
from support.victims import VICTIM_LOG, cores_of_ranks, log_victims_to, victims
from support.waiting import wait_until
from support.workloads.shared_prefixes import shared_prefixes

pytestmark = pytest.mark.server

APART = ("--dp-size", "2")
REPLICAS = {"apart": APART, "attention": ("--tp-size", "2", *APART, "--enable-dp-attention")}
PARTS = "routes, pins, ledger, pre-warm, host tier, verified store and KV events"
PAGE_TOKENS = 16
COMMON = (
    *(
        "--skip-tokenizer-init",
        "--page-size",
        str(PAGE_TOKENS),
        "--max-running-requests",
        "4",
        "--context-length",
        "2048",
    ),
    *("--attention-backend", "torch_native"),
)
POOL_TOKENS, PREFIX_TOKENS = 512, 96
PREFETCH = json.dumps({"prefetch_threshold": PREFIX_TOKENS // 2})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family that upstream lets wait with an empty batch while the other replica has work."""
    (family,) = (family for family in FAMILIES if family.name == "Qwen3-MoE")
    return write_random_model(tmp_path_factory.mktemp("random-moe"), family)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six prefixes of six pages, each asked about twice, in any order."""
    return shared_prefixes(6, 2, prefix_tokens=PREFIX_TOKENS)


@pytest.fixture(scope="module")
def answers(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Of one replica of stock sglang that reuses nothing."""
    with ServerProcess("--kv-policy", "default", "--disable-radix-cache", *COMMON, model=model) as server:
        return [
            server.generate(prompt, max_new_tokens=4, ignore_eos=True)["output_ids"] for prompt in prompts
        ]


def asked(server: ServerProcess, prompt: list[int], rank: int) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "routed_dp_rank": rank,
    }
    return server.post("/generate", body)


def knows(router: Subscriber, server: ServerProcess, rank: int) -> bool:
    """Whether the events of a replica since its last flush tell what its tree holds."""
    router.receive()
    return router.mirror().held == pages_of(server, PAGE_TOKENS, dp_rank=rank)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.tested(name=f"`{' '.join(flags)}`: {PARTS}"))
        for how, flags in REPLICAS.items()
    ],
)
@pytest.mark.tested(kind="mode", mode="page scores from attention", backend="torch_native")
def test_each_replica_keeps_a_tree_and_all_answer(
    how: str, model: Path, prompts: list[list[int]], answers: list[list[int]], tmp_path: Path
) -> None:
    cores = cores_of_ranks(2)
    with (
        subscribers(2) as (routers, events),
        ServerProcess(
            *("--kv-policy", "importance", *REPLICAS[how], *COMMON, "--max-total-tokens", str(POOL_TOKENS)),
            *("--kv-importance-store", str(tmp_path), "--hicache-ratio", "2", "--kv-events-config", events),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend-extra-config", PREFETCH),
            model=model,
            env={
                **python_path(CHECKS / "tree_check", VICTIM_LOG),
                **cores,
                **log_victims_to(tmp_path / "victims"),
            },
            nccl_port=how == "attention",
        ) as server,
    ):
        for router in routers:
            router.receive()  # else the first batches are lost (``subscribers``)
        pin = server.post("/kv_importance/pin", {"input_ids": prompts[0][:PREFIX_TOKENS]})
        assert [each["granted_tokens"]["device"] for each in pin["dp_ranks"]] == [PREFIX_TOKENS] * 2
        replies = [asked(server, prompt, rank) for rank in (0, 1) for prompt in prompts]
        assert [reply["output_ids"] for reply in replies] == answers * 2
        assert [reply["meta_info"]["dp_rank"] for reply in replies] == [0] * 12 + [1] * 12

        ranks = server.get("/kv_importance", limit=1000)["dp_ranks"]
        assert server.get("/kv_importance", limit=1000, dp_rank=1)["nodes"] == ranks[1]["nodes"]
        assert all(rank["clock"] >= len(prompts) for rank in ranks)
        assert server.metric(f"{PREFIX}requests_total") == sum(rank["clock"] for rank in ranks)
        for rank in (0, 1):
            (held,) = server.get("/kv_importance/pins", dp_rank=rank)["pins"]
            assert (held["pin_id"], held["resident_tokens"]) == (pin["pin_id"], PREFIX_TOKENS)
            assert server.get("/kv_importance/tree", dp_rank=rank)["nodes"]
            assert server.get("/kv_importance/events", dp_rank=rank)["events"]
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            server.get("/kv_importance", dp_rank=2)

        # A prompt is brought into both trees.
        new = random.Random(1).choices(range(10, VOCABULARY), k=PREFIX_TOKENS + 1)
        job = server.post("/kv_importance/prewarm", {"input_ids": new})["job_id"]
        state = ended(server, job)
        assert state["state"] == "done"
        assert state["done_tokens"] == state["total_tokens"] >= 2 * PREFIX_TOKENS
        cached = [asked(server, new, rank)["meta_info"]["cached_tokens"] for rank in (0, 1)]
        assert cached == [PREFIX_TOKENS] * 2

        # What either has stored, both find there.
        server.flush_cache()
        again = [asked(server, prompt, rank) for rank in (0, 1) for prompt in prompts[:4]]
        assert [reply["output_ids"] for reply in again] == answers[:4] * 2
        from_store = [reply["meta_info"]["cached_tokens_details"].get("storage", 0) for reply in again]
        assert any(from_store[:4])
        assert any(from_store[4:])
        for rank, router in enumerate(routers):
            wait_until(lambda router=router, rank=rank: knows(router, server, rank))
            assert router.ranks == {rank}
            assert all(router.mirror().held.values())
            assert any(isinstance(event, BlockRemoved) for run in router.runs for event in run)

        server.post("/kv_importance/unpin", {"pin_id": pin["pin_id"]})
        assert [each["pins"] for each in server.get("/kv_importance/pins")["dp_ranks"]] == [[], []]
        server.flush_cache()
        assert server.log().count("tree_check: sound with") > 4
        time.sleep(1.5)  # a second ledger would have been written by now
    first, second = victims(tmp_path / "victims").values()
    assert first
    assert second
    assert len(list(tmp_path.rglob("ledger.sqlite"))) == 1


@pytest.mark.nightly
@pytest.mark.tested(
    kind="mode",
    name="`--dp-size 2 --kv-importance-tiers`: tokens from the tiers of each replica",
    mode="page scores from attention",
    backend="torch_native",
)
def test_each_replica_has_tiers_of_its_own(
    model: Path, prompts: list[list[int]], answers: list[list[int]], tmp_path: Path
) -> None:
    tiers = tmp_path / "tiers.toml"
    tiers.write_text(
        '[[tier]]\nkind = "dram"\ncapacity = "1MB"\n'
        f'[[tier]]\nkind = "fs"\ncapacity = "50MB"\nfolder = "{tmp_path / "fs"}"\n'
    )
    with ServerProcess(
        *("--kv-policy", "importance", *APART, *COMMON, "--max-total-tokens", str(POOL_TOKENS)),
        *("--kv-importance-store", str(tmp_path / "store"), "--kv-importance-tiers", str(tiers)),
        *("--hicache-ratio", "2", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", PREFETCH),
        model=model,
        env={**python_path(CHECKS / "tree_check"), **cores_of_ranks(2)},
        nccl_port=False,
    ) as server:

        def from_tiers(rank: int) -> int:
            replies = [asked(server, prompt, rank) for prompt in prompts[:4]]
            assert [reply["output_ids"] for reply in replies] == answers[:4]
            details = [reply["meta_info"]["cached_tokens_details"] or {} for reply in replies]
            return sum(each.get("storage", 0) for each in details)

        def held() -> list[int]:
            ranks = server.get("/kv_importance", limit=1)["dp_ranks"]
            return [sum(tier["pages"] for tier in rank["store_tiers"]["tiers"]) for rank in ranks]

        assert from_tiers(0) == 0
        wait_until(lambda: held()[0] >= 2 * PREFIX_TOKENS // PAGE_TOKENS)
        assert held()[1] == 0
        assert from_tiers(1) == 0, "what the other has stored is not its own"
        wait_until(lambda: held()[1] == held()[0])
        server.flush_cache()
        assert [from_tiers(rank) > 0 for rank in (0, 1)] == [True, True]
    assert len(list((tmp_path / "fs").iterdir())) == 2


@pytest.mark.nightly
@pytest.mark.tested(
    kind="mode",
    name="`--dp-size 2 --tokenizer-worker-num 2`: tokens over evictions, reports, routes and pins",
    mode="page scores from attention",
    backend="torch_native",
)
def test_replicas_behind_several_tokenizer_workers(
    model: Path, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    server = ServerProcess(
        *("--kv-policy", "importance", *APART, "--tokenizer-worker-num", "2", *COMMON),
        *("--max-total-tokens", str(POOL_TOKENS)),
        model=model,
        env={**python_path(CHECKS / "tree_check"), **cores_of_ranks(2)},
        nccl_port=False,
    )

    def ask(number: int) -> dict[str, Any]:
        body = {
            "input_ids": prompts[number % len(prompts)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            "routed_dp_rank": number // len(prompts),
            "kv_hints": {"report": True},
        }
        # A connection each: any worker takes it.
        reply = httpx.post(f"{server.base_url}/generate", json=body, timeout=REQUEST_SECONDS, trust_env=False)
        return dict(reply.raise_for_status().json())

    with server:
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(ask, range(2 * len(prompts))))
        assert [reply["output_ids"] for reply in replies] == answers * 2
        assert all(reply["meta_info"]["kv_importance"] for reply in replies)
        for _ in range(3):  # by whichever worker answers
            ranks = server.get("/kv_importance", limit=1000)["dp_ranks"]
            assert [rank["clock"] >= len(prompts) for rank in ranks] == [True, True]
            pin = server.post("/kv_importance/pin", {"input_ids": prompts[0][:PREFIX_TOKENS]})
            held = [server.get("/kv_importance/pins", dp_rank=rank)["pins"] for rank in (0, 1)]
            assert [[each["pin_id"] for each in pins] for pins in held] == [[pin["pin_id"]]] * 2
            server.post("/kv_importance/unpin", {"pin_id": pin["pin_id"]})
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device", reason="least_loss") > 0

"""KV events for routers that know caches: published over ZMQ, read with sglang's own structs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang.srt.disaggregation.kv_events import BlockRemoved

from sgl_importance.metrics_table import PREFIX
from sgl_importance.tiers import Tier

from support.kv_event_subscriber import pages_of, subscriber
from support.models import write_random_llama
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess
from support.waiting import wait_until
from support.workloads.shared_prefixes import shared_prefixes

pytestmark = pytest.mark.server

PAGE_SIZE = 16
COMMON = (
    *("--skip-tokenizer-init", "--page-size", str(PAGE_SIZE), "--max-running-requests", "4"),
    *("--context-length", "2048", "--attention-backend", "torch_native"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Eight prefixes of eight pages, each asked about three times, in any order."""
    return shared_prefixes(8, 3, prefix_tokens=8 * PAGE_SIZE)


def answered(server: ServerProcess, prompts: list[list[int]]) -> list[list[int]]:
    return [server.generate(prompt, max_new_tokens=4, ignore_eos=True)["output_ids"] for prompt in prompts]


POOL = ("--max-total-tokens", "640")


@pytest.mark.tested(
    kind="mode",
    name="`--kv-events-config`: what a subscriber knows is what the device and host tiers hold",
    mode="page scores from attention",
    backend="torch_native",
)
def test_a_subscriber_knows_what_each_tier_holds(model: Path, prompts: list[list[int]]) -> None:
    with ServerProcess("--kv-policy", "default", "--disable-radix-cache", *COMMON, model=model) as stock:
        answers = answered(stock, prompts)
    with subscriber() as (router, config):
        flags = ("--kv-policy", "importance", *COMMON, *POOL, "--kv-events-config", config)
        tiers = ("--enable-hierarchical-cache", "--hicache-ratio", "1.5")
        with ServerProcess(*flags, *tiers, model=model, env=python_path(CHECKS / "tree_check")) as server:
            server.flush_cache()
            assert answered(server, prompts) == answers

            def is_level() -> bool:
                router.receive()
                return router.mirror().held == pages_of(server, PAGE_SIZE)

            wait_until(is_level)
            mirror = router.mirror()
            assert all(mirror.held.values())
            assert mirror.held[Tier.DEVICE] != mirror.held[Tier.HOST]
            assert mirror.counts["BlockRemoved"] > 10
            for tier in ("device", "host"):
                assert server.metric(f"{PREFIX}evicted_tokens_total", tier=tier) > 0

            def is_empty() -> bool:
                router.receive()
                return router.runs[-1] == []

            server.flush_cache()
            wait_until(is_empty)


def test_observe_publishes_what_stock_publishes(model: Path, prompts: list[list[int]]) -> None:
    def published(policy: str) -> list[Any]:
        with subscriber() as (router, config):
            flags = ("--kv-policy", policy, *COMMON, *POOL, "--kv-events-config", config)
            with ServerProcess(*flags, model=model) as server:
                answered(server, prompts)
                server.flush_cache()

                def is_over() -> bool:
                    router.receive()
                    return any(router.runs) and router.runs[-1] == []

                wait_until(is_over)
            (run,) = filter(None, router.runs)  # what a server asks itself at the start fills no page
        return flat(run)

    stock = published("default")
    assert sum(event[0] == "BlockRemoved" for event in stock) > 10
    assert published("observe") == stock


def flat(events: list[Any]) -> list[tuple[Any, ...]]:
    """One entry for each page: how many events tell of it together is a matter of time."""
    pages: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, BlockRemoved):
            pages.extend(("BlockRemoved", event.medium, block) for block in event.block_hashes)
            continue
        parent = event.parent_block_hash
        for index, block in enumerate(event.block_hashes):
            tokens = event.token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            pages.append(("BlockStored", event.medium, block, parent, *tokens))
            parent = block
    return pages

"""``--kv-policy importance`` answers with the very tokens of a server that has no radix cache."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from sgl_importance.metrics_table import PREFIX

from support.config_file import config_flags
from support.served import script_server
from support.servers import ServerProcess
from support.workloads.exchanges import TIER_FLAGS, Exchange, Replay, replay, replay_long_answers_at_once

pytestmark = pytest.mark.server

TIERS = ("device", "host", "storage")


def importance_server(model: Path, *flags: str) -> ServerProcess:
    # Little room is kept for answers that are still to come, so that running requests are retracted.
    return script_server(
        *("--kv-policy", "importance", *config_flags(signal={"g": "on"}), *TIER_FLAGS),
        *("--schedule-conservativeness", "0.05", *flags),
        model=model,
    )


def check_tiers(server: ServerProcess, *parts: Replay) -> None:
    """Every tier gave tokens back, by the answers and by our own counters; eviction and folds happened."""
    for tier in TIERS:
        assert sum(part.hit_tokens[tier] for part in parts) > 0, f"no hit in {tier}"
        assert server.metric(f"{PREFIX}hit_tokens_total", tier=tier) > 0, tier
    assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
    assert server.metric(f"{PREFIX}evicted_tokens_total", tier="host") > 0
    assert server.metric(f"{PREFIX}folds_total") > 0


def report(server: ServerProcess, title: str, seconds: float, *parts: Replay) -> None:
    hits = {tier: sum(part.hit_tokens[tier] for part in parts) for tier in TIERS}
    evicted = {tier: int(server.metric(f"{PREFIX}evicted_tokens_total", tier=tier)) for tier in TIERS[:2]}
    print(
        f"{title}: {seconds:.0f} s, hit tokens {hits}, evicted tokens {evicted}, "
        f"folds {server.metric(f'{PREFIX}folds_total'):.0f}, "
        f"retractions {sum(part.retractions for part in parts)}"
    )


def compare(server: ServerProcess, title: str, exchanges: list[Exchange]) -> None:
    """Half of the exchanges one after the other, the other half eight at a time."""
    middle = len(exchanges) // 2
    start = time.perf_counter()
    alone = replay(server, exchanges[:middle], concurrency=1)
    folds = server.metric(f"{PREFIX}folds_total")
    together = replay(server, exchanges[middle:], concurrency=8)
    report(server, title, time.perf_counter() - start, alone, together)
    assert server.metric(f"{PREFIX}folds_total") > folds > 0
    assert alone.differing == []
    assert together.differing == []
    check_tiers(server, alone, together)


@pytest.mark.parametrize(
    "page_size",
    [
        pytest.param(
            size, marks=[pytest.mark.tested(name=f"device, host and file tier, pages of {size}"), *marks]
        )
        for size, marks in ((1, [pytest.mark.nightly]), (16, []))
    ],
)
@pytest.mark.tested(kind="mode", mode="page scores from attention", backend="torch_native")
def test_tokens_equal_those_without_a_radix_cache(
    random_model: Path, exchanges: list[Exchange], page_size: int
):
    assert len(exchanges) >= 150
    answers = {exchange.answer for exchange in exchanges}
    assert len(answers) > 0.6 * len(exchanges), "the model ignores its prompt"
    with importance_server(random_model, "--page-size", str(page_size)) as server:
        crowded = replay_long_answers_at_once(server, exchanges)
        assert crowded.differing == []
        assert crowded.retractions > 0
        server.flush_cache()
        compare(server, f"page size {page_size}", exchanges)


@pytest.mark.nightly
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_tokens_are_equal_for_every_write_policy(
    random_model: Path, exchanges: list[Exchange], page_size: int, write_policy: str
):
    flags = ("--page-size", str(page_size), "--hicache-write-policy", write_policy)
    with importance_server(random_model, *flags) as server:
        compare(server, f"page size {page_size}, {write_policy}", exchanges)


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 16])
def test_aborted_requests_leave_no_trace_in_later_answers(
    random_model: Path, exchanges: list[Exchange], page_size: int
):
    with importance_server(random_model, "--page-size", str(page_size)) as server:
        for start in range(0, len(exchanges), 40):
            part = exchanges[start : start + 40]
            for exchange in part[:8]:
                abandon(server, exchange)
            server.post("/abort_request", {"abort_all": True})
            assert replay(server, part, concurrency=8).differing == []


def abandon(server: ServerProcess, exchange: Exchange) -> None:
    """Asks for a long streamed answer and hangs up at its first token."""
    body = {
        "input_ids": list(exchange.prompt),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
    }
    url = f"{server.base_url}/generate"
    with httpx.Client(trust_env=False, timeout=60) as client, client.stream("POST", url, json=body) as reply:
        assert next(reply.iter_lines()).startswith("data:")

"""Gated delta nets on real servers: whose scores they are, what observe leaves alone, pins, pre-warm, ledger.

On a CPU sglang keeps a state where a request ended (``no_buffer``): a prefix of others is no hit where none
did. On GPUs it keeps them within prompts too (``extra_buffer``), which a plugin brings to a CPU here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_importance.metrics_table import PREFIX
from sgl_importance.observe.trace.reader import open_trace
from sgl_importance.observe.trace.records import PageLists, Step

from support.config_file import config_flags
from support.families import FAMILIES, VOCABULARY, write_random_model
from support.kept import wait_until_kept
from support.prewarms import ended
from support.python_path import CHECKS, python_path
from support.recordings import wait_until_recorded
from support.reference_attention import attention
from support.servers import ServerProcess
from support.waiting import wait_until
from support.workloads.shared_prefixes import shared_prefixes

pytestmark = pytest.mark.server

(FAMILY,) = (family for family in FAMILIES if family.states)
FULL_ATTENTION = (1, 3)
WINDOW = 8
COMMON = ("--skip-tokenizer-init", "--max-running-requests", "4", "--context-length", "2048")
FLAGS = (*COMMON, *FAMILY.flags)
SMALL = ("--max-total-tokens", "512")
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}  # else a prompt's windows are rounded where it is cut
ENV = {**python_path(CHECKS / "tree_check", CHECKS / "eager_torch"), **EXACT}
EXTRA_BUFFER = (
    *("--mamba-radix-cache-strategy", "extra_buffer", "--page-size", "16"),
    *("--attention-backend", "torch_native", "--max-mamba-cache-size", "16"),
)
CHUNK_TOKENS = 64  # of a prompt, from state to state
ANSWER_TOKENS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("random-qwen3-next"), FAMILY)


def some_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, VOCABULARY), k=count)


def asked(server: ServerProcess, prompt: Sequence[int]) -> dict[str, Any]:
    return server.generate(prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)


def hit(server: ServerProcess, prompt: Sequence[int]) -> int:
    return int(asked(server, prompt)["meta_info"]["cached_tokens"])


def conversations(server: ServerProcess, turns: int = 4) -> Iterator[tuple[list[int], int]]:
    """The answer and the hit of each request of six conversations, whose turns come in any order."""
    rng = random.Random(0)
    texts = [some_tokens(96, seed) for seed in range(6)]
    for _ in range(turns):
        for speaker in rng.sample(range(6), 6):
            reply = asked(server, texts[speaker])
            yield reply["output_ids"], reply["meta_info"]["cached_tokens"]
            texts[speaker] += reply["output_ids"] + rng.choices(range(10, VOCABULARY), k=20)


def test_page_scores_are_those_of_the_layers_that_attend(model: Path, tmp_path: Path) -> None:
    """Behind a state from the cache too, so that what transformers computes at once comes out of it."""
    first = some_tokens(70, 1)
    server = ServerProcess(
        *("--kv-policy", "importance", *FLAGS),
        *("--kv-importance-trace", str(tmp_path)),
        *config_flags(signal={"window": WINDOW, "interval": 1}, trace={"detail": "steps", "pages": 0.2}),
        model=model,
        env=ENV,
    )
    with server:
        answer = asked(server, first)["output_ids"]
        second = [*first, *answer, *some_tokens(20, 2)]
        reply = asked(server, second)
        assert reply["meta_info"]["cached_tokens"] == len(first) + ANSWER_TOKENS - 1
        assert f"Page scores from layers {list(FULL_ATTENTION)}" in server.log()
        wait_until_recorded(tmp_path, [reply["meta_info"]["id"]])
        server.flush_cache()
    (expected,) = attention(model, [[*second, *reply["output_ids"]]], FULL_ATTENTION)
    records = list(open_trace(tmp_path))
    assert any(isinstance(record, PageLists) for record in records)
    steps = [record for record in records if isinstance(record, Step)]
    steps = [step for step in steps if step.seq_len >= len(first)]  # those of the launch are shorter
    assert {step.phase for step in steps} == {"prefill", "decode"}
    assert len(steps) > 2 * (ANSWER_TOKENS - 1)
    for step in steps:
        mass = step.mass.astype(float)
        assert mass.sum() == pytest.approx(1, abs=0.01)
        rows = expected[step.seq_len - step.query_tokens : step.seq_len]
        np.testing.assert_allclose(mass, rows[:, : step.seq_len].mean(0), atol=2e-3)


@pytest.mark.nightly
def test_observe_keeps_what_stock_keeps(model: Path) -> None:
    with ServerProcess("--kv-policy", "default", *SMALL, *FLAGS, model=model, env=ENV) as server:
        stock = list(conversations(server))
    assert any(hit for _, hit in stock)
    with ServerProcess("--kv-policy", "observe", *SMALL, *FLAGS, model=model, env=ENV) as server:
        assert list(conversations(server)) == stock
        evicted = f"{PREFIX}evicted_tokens_total"
        assert server.metric(evicted, tier="device", reason="stock_order") > 0
        assert server.metric(evicted, tier="device", reason="least_loss") == 0
        server.flush_cache()


@pytest.mark.nightly
@pytest.mark.parametrize("states", ["12", "8"])
def test_importance_finds_more_than_stock(model: Path, states: str) -> None:
    found = {}
    for policy in ("default", "importance"):
        flags = ("--kv-policy", policy, *SMALL, *FLAGS, "--max-mamba-cache-size", states)
        with ServerProcess(*flags, model=model, env=ENV) as server:
            found[policy] = sum(hit for _, hit in conversations(server))
    assert found["importance"] > found["default"] > 0, found


def test_a_pinned_prefix_stays_and_is_a_hit_once_a_request_ended_there(model: Path, tmp_path: Path) -> None:
    ledger = ("--kv-importance-ledger", str(tmp_path))
    prefix = some_tokens(96, 100)
    flags = ("--kv-policy", "importance", *SMALL, *FLAGS, *ledger)
    with ServerProcess(*flags, model=model, env=ENV) as server:
        pin = server.post("/kv_importance/pin", {"input_ids": prefix})
        assert [hit(server, prefix + some_tokens(20, seed)) for seed in (1, 2)] == [0, 0]
        assert len(list(conversations(server))) == 24
        (held,) = server.get("/kv_importance/pins")["pins"]
        assert held["resident_tokens"] == len(prefix)
        assert hit(server, prefix + some_tokens(20, 3)) == 0, "its keys and values are there, no state is"

        job = server.post("/kv_importance/prewarm", {"input_ids": prefix})["job_id"]
        state = ended(server, job)
        assert (state["state"], state["done_tokens"]) == ("done", len(prefix))
        assert [hit(server, prefix + some_tokens(20, seed)) for seed in (4, 5)] == [len(prefix)] * 2

        server.post("/kv_importance/unpin", {"pin_id": pin["pin_id"]})
        assert server.get("/kv_importance/tree")["nodes"]
        server.flush_cache()
        assert "tree_check: sound with" in server.log()
        wait_until_kept(server)

    # What a conversation said is brought in at the start, with a state at its end.
    with ServerProcess(*flags, "--kv-importance-prewarm", "start", model=model, env=ENV) as server:
        wait_until(lambda: "pre-warm: {" in server.log())
        assert sum(found for _, found in conversations(server, turns=1)) > 0
        assert server.metric(f"{PREFIX}prewarmed_hit_tokens_total") > 0
        server.flush_cache()


@pytest.mark.nightly
@pytest.mark.tested(
    kind="mode",
    name="`--mamba-radix-cache-strategy extra_buffer`, its kernels in torch: prefixes that prompts share",
    mode="page scores from attention",
    backend="torch_native",
)
def test_prompts_share_prefixes_where_states_are_kept_within_them(model: Path) -> None:
    prompts = shared_prefixes(6, 4, prefix_tokens=2 * CHUNK_TOKENS + 16)
    stock = ("--kv-policy", "default", "--disable-radix-cache", *FLAGS)
    env = {**python_path(CHECKS / "eager_torch"), **EXACT}
    with ServerProcess(*stock, model=model, env=env) as server:
        answers = [asked(server, prompt)["output_ids"] for prompt in prompts]
    plugins = python_path(CHECKS / "tree_check", CHECKS / "eager_torch", CHECKS / "tracked_states")
    flags = ("--kv-policy", "importance", *SMALL, *COMMON, *EXTRA_BUFFER)
    with ServerProcess(*flags, model=model, env={**plugins, **EXACT}) as server:
        replies = [asked(server, prompt) for prompt in prompts]
        assert [reply["output_ids"] for reply in replies] == answers
        hits = [reply["meta_info"]["cached_tokens"] for reply in replies]
        assert set(hits) == {0, 2 * CHUNK_TOKENS}, "each ends with a state, not with the prefix"
        assert server.metric(f"{PREFIX}folds_total") > 0
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device", reason="least_loss") > 0
        server.flush_cache()
        assert "tree_check: sound with" in server.log()

"""A server for prefill and one for decode, over Mooncake by TCP: each has a tree, and evicts by its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_importance.metrics_table import PREFIX

from support.models import write_random_llama
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess, free_port
from support.workloads.shared_prefixes import shared_prefixes

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(find_spec("mooncake") is None, reason="the transfer engine of Mooncake is needed"),
]

PREFIX_TOKENS, ANSWER_TOKENS = 96, 16
FLAGS = (
    *("--skip-tokenizer-init", "--context-length", "2048", "--attention-backend", "torch_native"),
    *("--page-size", "16", "--max-running-requests", "4"),
)
BOOTSTRAP = free_port()
TRANSFER = (
    *("--disaggregation-transfer-backend", "mooncake_tcp"),
    *("--disaggregation-bootstrap-port", str(BOOTSTRAP)),
)
ENV = {
    **python_path(CHECKS / "tree_check"),
    "SGLANG_HOST_IP": "127.0.0.1",
    # It waits for an event of CUDA's, whatever the device (srt/disaggregation/prefill.py:1319).
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}


class Half(ServerProcess):
    """One of the two servers, which generates nothing alone: it is ready when it listens."""

    def wait_ready(self) -> None:
        while True:
            self.raise_if_ended(0.3)
            try:
                if self._client.get("/health", timeout=30).status_code == 200:
                    return
            except httpx.TransportError:
                pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="module")
def halves(model: Path) -> Iterator[tuple[Half, Half]]:
    ours = ("--kv-policy", "importance", *FLAGS, *TRANSFER)
    pool = {"prefill": 512, "decode": 768}  # decode sets room aside for what is on its way
    decode = ("--disaggregation-decode-enable-radix-cache", "--num-reserved-decode-tokens", "64")
    with ExitStack() as stack:
        servers = [
            Half(
                *(*ours, "--disaggregation-mode", mode, "--max-total-tokens", str(tokens)),
                *(decode if mode == "decode" else ()),
                model=model,
                env=ENV,
            )
            for mode, tokens in pool.items()
        ]
        prefilling, decoding = (stack.enter_context(server) for server in servers)
        yield prefilling, decoding


def asked_of_both(halves: tuple[Half, Half], prompt: list[int], room: int) -> list[dict[str, Any]]:
    """What each half answers; a router sends every request to both."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": BOOTSTRAP,
        "bootstrap_room": room,
    }
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda server: server.post("/generate", body), halves))


@pytest.mark.nightly
@pytest.mark.tested(
    kind="mode",
    name="`--disaggregation-mode prefill` and `decode`, `mooncake_tcp`",
    mode="page scores from attention",
    backend="torch_native",
)
def test_both_halves_evict_by_importance_and_pre_warm_nothing(model: Path, halves: tuple[Half, Half]) -> None:
    prompts = shared_prefixes(6, 4, prefix_tokens=PREFIX_TOKENS)
    with ServerProcess("--kv-policy", "default", "--disable-radix-cache", *FLAGS, model=model) as server:
        answers = [
            server.generate(prompt, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)["output_ids"]
            for prompt in prompts
        ]
    replies = [asked_of_both(halves, prompt, room) for room, prompt in enumerate(prompts, start=1)]
    assert [decoded["output_ids"] for _, decoded in replies] == answers
    for half, answered in zip(halves, zip(*replies, strict=True), strict=True):
        cached = sum(reply["meta_info"]["cached_tokens"] for reply in answered)
        assert cached >= 4 * PREFIX_TOKENS
        assert half.metric(f"{PREFIX}evicted_tokens_total", tier="device", reason="least_loss") > 0
        assert half.metric(f"{PREFIX}folds_total") > 0
        assert half.get("/kv_importance")["clock"] >= len(prompts)
        half.flush_cache()
        assert half.log().count("tree_check: sound with") > 4
    for half, mode in zip(halves, ("prefill", "decode"), strict=True):
        refused = httpx.post(f"{half.base_url}/kv_importance/prewarm", json={}, trust_env=False)
        assert (refused.status_code, f"a {mode} server does not pre-warm" in refused.text) == (501, True)

"""Batches of another make than one prefill or one decode step, and other number formats."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.metrics_table import PREFIX

from support.models import write_random_llama
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess
from support.workloads.shared_prefixes import shared_prefixes

pytestmark = pytest.mark.server

COMMON = (
    *("--skip-tokenizer-init", "--page-size", "16", "--max-running-requests", "4"),
    *("--context-length", "2048", "--attention-backend", "torch_native"),
)
PREFIX_TOKENS, POOL_TOKENS = 96, 512
MIXED = ("--enable-mixed-chunk", "--chunked-prefill-size", "64", "--num-continuous-decode-steps", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("random-llama"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six prefixes of six pages, each asked about four times, in any order."""
    return shared_prefixes(6, 4, prefix_tokens=PREFIX_TOKENS)


def answers_of(server: ServerProcess, prompts: list[list[int]], *, at_once: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(
            pool.map(lambda prompt: server.generate(prompt, max_new_tokens=12, ignore_eos=True), prompts)
        )


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            MIXED,
            id="mixed",
            marks=pytest.mark.tested(name="`--enable-mixed-chunk`, `--num-continuous-decode-steps 2`"),
        ),
        *(
            pytest.param(
                ("--dtype", dtype),
                id=dtype,
                marks=[pytest.mark.tested(name=f"`--dtype {dtype}`"), pytest.mark.nightly],
            )
            for dtype in ("bfloat16", "float16")
        ),
    ],
)
@pytest.mark.tested(kind="mode", mode="page scores from attention", backend="torch_native")
def test_answers_are_stocks(flags: tuple[str, ...], model: Path, prompts: list[list[int]]) -> None:
    with ServerProcess(
        "--kv-policy", "default", "--disable-radix-cache", *COMMON, *flags, model=model
    ) as stock:
        answers = [each["output_ids"] for each in answers_of(stock, prompts, at_once=1)]
    server = ServerProcess(
        *("--kv-policy", "importance", *COMMON, *flags, "--max-total-tokens", str(POOL_TOKENS)),
        model=model,
        env=python_path(CHECKS / "tree_check"),
    )
    with server:
        replies = answers_of(server, prompts, at_once=4)
        assert [reply["output_ids"] for reply in replies] == answers
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
        nodes = server.get("/kv_importance", limit=1000)["nodes"]
        assert any(node["cross_mass"] > 0 for node in nodes)
        assert server.metric(f"{PREFIX}folds_total") > len(prompts)
        server.flush_cache()

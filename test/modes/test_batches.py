"""Batches of another make than one prefill or one decode step, and other number formats."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import inf
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


# Of a logit between four and eight: what a rounding elsewhere moves. Among random weights few are far apart.
STEP = {"bfloat16": 2.0**-5, "float16": 2.0**-8}


def answers_of(server: ServerProcess, prompts: list[list[int]], *, at_once: int) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    asked = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 5}
    with ThreadPoolExecutor(at_once) as pool:
        return list(
            pool.map(lambda prompt: server.post("/generate", {"input_ids": prompt, **asked}), prompts)
        )


def is_tie(reply: dict[str, Any], other: list[int], bound: float) -> bool:
    """Whether the first token of another answer that differs is as likely, but for so many nats."""
    own = reply["output_ids"]
    first = next(place for place, token in enumerate(other) if token != own[place])
    likely = {token: value for value, token, _ in reply["meta_info"]["output_top_logprobs"][first]}
    return likely[own[first]] - likely.get(other[first], -inf) <= bound


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
    step = STEP.get(flags[-1], 0.0)
    with ServerProcess(
        "--kv-policy", "default", "--disable-radix-cache", *COMMON, *flags, model=model
    ) as stock:
        answers = answers_of(stock, prompts, at_once=1)
    server = ServerProcess(
        *("--kv-policy", "importance", *COMMON, *flags, "--max-total-tokens", str(POOL_TOKENS)),
        model=model,
        env=python_path(CHECKS / "tree_check"),
    )
    with server:
        replies = answers_of(server, prompts, at_once=4)
        pairs = [(one, other["output_ids"]) for one, other in zip(answers, replies, strict=True)]
        differing = [(one, other) for one, other in pairs if one["output_ids"] != other]
        assert all(is_tie(one, other, 2 * step) for one, other in differing)
        assert len(differing) <= (2 if step else 0)
        assert server.metric(f"{PREFIX}evicted_tokens_total", tier="device") > 0
        nodes = server.get("/kv_importance", limit=1000)["nodes"]
        assert any(node["cross_mass"] > 0 for node in nodes)
        assert server.metric(f"{PREFIX}folds_total") > len(prompts)
        server.flush_cache()

"""Experts divided over two ranks: they must evict the same nodes in the same order, and answer as without."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_importance.metrics_table import PREFIX

from support.families import FAMILIES, write_random_model
from support.python_path import CHECKS, python_path
from support.servers import ServerProcess
from support.victims import VICTIM_LOG, cores_of_ranks, log_victims_to, victims
from support.workloads.shared_prefixes import shared_prefixes

pytestmark = pytest.mark.server

PREFIX_TOKENS = 96
FLAGS = (
    *("--skip-tokenizer-init", "--context-length", "2048", "--attention-backend", "torch_native"),
    *("--page-size", "16", "--max-running-requests", "4", "--tp-size", "2", "--ep-size", "2"),
)
PLUGINS = python_path(CHECKS / "tree_check", CHECKS / "uneven_clocks", VICTIM_LOG)


@pytest.mark.tested(
    kind="mode",
    name="`--tp-size 2 --ep-size 2`, Qwen3-MoE",
    mode="page scores from attention",
    backend="torch_native",
)
def test_ranks_with_experts_of_their_own_evict_alike(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "Qwen3-MoE")
    model = write_random_model(tmp_path, family)
    prompts = shared_prefixes(8, 3, prefix_tokens=PREFIX_TOKENS)
    stock = ("--kv-policy", "default", "--disable-radix-cache", *FLAGS)
    with ServerProcess(*stock, model=model, env=cores_of_ranks(2)) as server:
        answers = [
            server.generate(prompt, max_new_tokens=4, ignore_eos=True)["output_ids"] for prompt in prompts
        ]
    env = {**PLUGINS, **cores_of_ranks(2), **log_victims_to(tmp_path / "victims")}
    flags = ("--kv-policy", "importance", *FLAGS, "--max-total-tokens", "512")
    with ServerProcess(*flags, model=model, env=env) as server:
        replies = [server.generate(prompt, max_new_tokens=4, ignore_eos=True) for prompt in prompts]
        assert [reply["output_ids"] for reply in replies] == answers
        assert sum(reply["meta_info"]["cached_tokens"] for reply in replies) >= 4 * PREFIX_TOKENS
        assert server.metric(f"{PREFIX}folds_total") > 0
        server.flush_cache()
        assert server.log().count("tree_check: sound with") > 4
    first, second = victims(tmp_path / "victims").values()
    assert first == second
    assert first

"""Our attention in servers: the tokens of upstream's, whoever takes page scores beside it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_importance.cpu.attention import SWITCH

from support.models import write_random_llama
from support.served import script_server

pytestmark = pytest.mark.server

SHARED_TOKENS, PROMPTS, ANSWER_TOKENS = 600, 8, 12
FLAGS = ("--max-total-tokens", "8192", "--page-size", "16", "--skip-tokenizer-init")
ARMS = {
    "upstream's": ("default", {SWITCH: "upstream"}),
    "default": ("default", {}),
    "importance": ("importance", {}),
}


def prompts() -> list[list[int]]:
    """Of a beginning that all share, longer than what a thread takes at a time, and ends of many lengths."""
    draws = random.Random(5)
    shared = draws.choices(range(10, 1000), k=SHARED_TOKENS)
    return [shared + draws.choices(range(10, 1000), k=1 + 37 * number) for number in range(PROMPTS)]


def answers(model: Path, policy: str, env: dict[str, str]) -> list[list[int]]:
    """Of the prompts one after the other, all but the first behind a hit, and then of all together."""
    with script_server(
        "--kv-policy", policy, *FLAGS, model=model, env={"OMP_NUM_THREADS": "2", **env}
    ) as server:

        def ask(tokens: list[int]) -> list[int]:
            answer = server.generate(tokens, max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
            cached.append(answer["meta_info"]["cached_tokens"])
            output: list[int] = answer["output_ids"]
            return output

        cached: list[int] = []
        alone = [ask(tokens) for tokens in prompts()]
        assert cached[0] == 0
        assert min(cached[1:]) >= SHARED_TOKENS // 16 * 16
        with ThreadPoolExecutor(PROMPTS) as pool:
            return alone + list(pool.map(ask, prompts()))


def test_tokens_are_those_of_upstreams_attention(tmp_path: Path) -> None:
    model = write_random_llama(tmp_path / "model")
    by_arm = {arm: answers(model, *choice) for arm, choice in ARMS.items()}
    assert len({tuple(answer) for answer in by_arm["default"]}) == PROMPTS, "the model ignores its prompt"
    assert by_arm["default"] == by_arm["upstream's"]
    assert by_arm["importance"] == by_arm["default"]

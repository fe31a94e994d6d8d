"""A family whose layers ask for the KV pool before they attend answers from tiered pages that bits chose."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.families import FAMILIES, VOCABULARY, write_random_model
from support.tiered import tiered_server

pytestmark = [pytest.mark.server, pytest.mark.nightly]

(EXPERTS,) = (family for family in FAMILIES if family.name == "Qwen3-MoE")
SELECTED = (
    *("--kv-sparse-selector", "bits", "--kv-sparse-budget", "96", "--kv-sparse-min-context", "64"),
    *("--kv-device-tokens", "480"),
)
PROMPT_TOKENS, ANSWER_TOKENS = 300, 8


def test_experts_answer_from_chosen_pages(tmp_path: Path) -> None:
    prompt = random.Random(0).choices(range(10, VOCABULARY), k=PROMPT_TOKENS)
    model = write_random_model(tmp_path / "model", EXPERTS)
    with tiered_server(model, *SELECTED, *EXPERTS.flags) as server:

        def asked(**hints: str) -> list[int]:
            body = {
                "input_ids": prompt,
                "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
                "kv_hints": hints,
            }
            tokens: list[int] = server.post("/generate", body)["output_ids"]
            return tokens

        chosen, exact = asked(), asked(selector="all")
        pages = server.get("/kv_importance?limit=1")["pages"]
    assert len(chosen) == ANSWER_TOKENS
    assert chosen[0] == exact[0], "the prompt reads all pages"
    assert chosen != exact, "the budget left nothing out that matters"
    assert 0 < pages["selected"] < pages["candidates"]

"""Prompts with a few long prefixes in common."""

from __future__ import annotations

import random

from support.families import VOCABULARY

OWN_TOKENS = 20


def shared_prefixes(num_prefixes: int, prompts_of_each: int, *, prefix_tokens: int) -> list[list[int]]:
    """Prompts of ``prefix_tokens`` that several share and 20 of their own, in any order; always the same."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(10, VOCABULARY), k=prefix_tokens) for _ in range(num_prefixes)]
    asked = [
        prefix + rng.choices(range(10, VOCABULARY), k=OWN_TOKENS)
        for prefix in prefixes
        for _ in range(prompts_of_each)
    ]
    return rng.sample(asked, len(asked))

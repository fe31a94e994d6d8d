"""What tests that ask a server odd things share."""

from __future__ import annotations

import random

import httpx


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 1000) for _ in range(count)]


def message(answer: httpx.Response) -> str:
    """What an error says, in each of sglang's forms."""
    document = answer.json()
    return str(document.get("message") or document["error"]["message"])

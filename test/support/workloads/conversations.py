"""Conversations in turns, of made-up tokens that are never the same twice."""

from __future__ import annotations

import random
from collections.abc import Iterator


def conversations(seed: int, *, speakers: int = 6, turns: int = 4) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and answers; the turns of each round come in any order."""
    rng = random.Random(seed)

    def text(count: int) -> list[int]:
        return [rng.randrange(10, 10**6) for _ in range(count)]

    texts = [text(96) for _ in range(speakers)]
    for _ in range(turns):
        for speaker in rng.sample(range(speakers), speakers):
            answer = text(4)
            yield list(texts[speaker]), answer
            texts[speaker] += answer + text(20)

"""A streamed answer, and when each of its tokens came."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from support.servers import REQUEST_SECONDS, ServerProcess


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer.

    Attributes:
        output_ids: its tokens.
        cached: tokens of its prompt that were not computed.
        times: seconds from the question to each token; those that came together have the same.
    """

    output_ids: list[int]
    cached: int
    times: list[float]

    @property
    def steps(self) -> list[float]:
        """Seconds from each token to the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def streamed(server: ServerProcess, prompt: Sequence[int], tokens: int) -> Streamed:
    """A greedy answer of so many tokens."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    times: list[float] = []
    start = time.perf_counter()
    with httpx.stream(
        "POST", f"{server.base_url}/generate", json=body, timeout=REQUEST_SECONDS, trust_env=False
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                came = event["meta_info"]["completion_tokens"] - len(times)
                times += [time.perf_counter() - start] * came
    assert len(event["output_ids"]) == len(times) == tokens, event
    return Streamed(event["output_ids"], event["meta_info"]["cached_tokens"], times)

"""Thoughts of the embedded reasoning model that a server with tiered pages writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from sgl_importance_lab.probe.word_tokenizer import END
from sgl_importance_lab.reasoner import reasoner_path
from sgl_importance_lab.reasoner.evaluate import grade
from sgl_importance_lab.reasoner.tasks import ReasoningTask, make_task
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer, render

from support.served import script_server
from support.servers import ServerProcess

PAGE, SPARE_TOKENS = 16, 64
TASKS = ("search", "state")
SECONDS = 3600.0
"""For an answer: the machine may be shared."""


@dataclass(frozen=True)
class Thought:
    """An instance, as token ids."""

    task: ReasoningTask

    @cached_property
    def prompt(self) -> list[int]:
        return reasoner_tokenizer().encode(render(self.task.messages))

    @cached_property
    def limit(self) -> int:
        """Tokens at most; a right answer is shorter."""
        return len(reasoner_tokenizer().encode(self.task.reply)) + SPARE_TOKENS

    def is_right(self, written: Sequence[int]) -> bool:
        """Whether the final answer is, of all that was written."""
        ids = reasoner_tokenizer().ids
        pieces = {index: piece for piece, index in ids.items()}
        text = "".join(pieces[token] for token in written if token != ids[END])
        return grade(self.task, {"content": text}).right


def write(
    server: ServerProcess, thought: Thought, said: Sequence[int], hints: Mapping[str, Any]
) -> tuple[list[int], int]:
    """All that is written of a thought that has said something, and how often the server retracted it."""
    body = {
        "input_ids": [*thought.prompt, *said],
        "sampling_params": {"temperature": 0, "max_new_tokens": thought.limit - len(said)},
        **({"kv_hints": dict(hints)} if hints else {}),
    }
    answer = httpx.post(f"{server.base_url}/generate", json=body, timeout=SECONDS, trust_env=False)
    reply = answer.raise_for_status().json()
    return [*said, *reply["output_ids"]], reply["meta_info"]["num_retractions"]


def write_all(
    server: ServerProcess,
    thoughts: Sequence[Thought],
    said: Sequence[Sequence[int]],
    at_a_time: int,
    hints: Mapping[str, Any] = {},
) -> list[tuple[list[int], int]]:
    """Each thought behind what it has said, as ``write`` has it; the cache is empty at first."""
    server.flush_cache()
    with ThreadPoolExecutor(at_a_time) as clients:
        return list(clients.map(lambda each: write(server, *each, hints), zip(thoughts, said, strict=True)))


def thoughts_of(length: int, n: int) -> list[Thought]:
    """Unseen instances of both tasks."""
    return [Thought(make_task(TASKS[number % len(TASKS)], length, number)) for number in range(n)]


def pool_tokens(thoughts: Sequence[Thought], at_a_time: int) -> int:
    """That hold so many of them, and no more."""
    longest = max(len(thought.prompt) + thought.limit for thought in thoughts)
    return at_a_time * (longest // PAGE + 2) * PAGE


def thinking_server(
    pool: int,
    at_a_time: int,
    *,
    selector: str,
    budget: float,
    min_context: int,
    env: Mapping[str, str] | None = None,
) -> ServerProcess:
    """A server over tiered pages, with half as much memory on the device as on the host.

    Args:
        pool: tokens of the host.
        at_a_time: most requests that run.
        selector: what chooses pages.
        budget: share of its context that a step reads.
        min_context: tokens from which on it chooses.
        env: added to its environment.
    """
    return script_server(
        *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-importance-source", "none"),
        *("--max-total-tokens", str(pool), "--kv-device-tokens", str(pool // 2), "--page-size", str(PAGE)),
        *("--max-running-requests", str(at_a_time), "--skip-tokenizer-init"),
        *("--kv-sparse-selector", selector, "--kv-sparse-budget", str(budget)),
        *("--kv-sparse-min-context", str(min_context)),
        model=reasoner_path(),
        env=env,
    )

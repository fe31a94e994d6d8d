"""Hits of models with linear attention, which go on from states: importance beside LRU, on the real tree.

Requests come one at a time and are made up; no model runs, so that what is found depends on the evictions
alone and can be compared between machines. Two pools are limited, KV and states, and states stand where
sglang keeps them: at ends of requests (``no_buffer``), or at chunks of prompts and where prompts part
(``extra_buffer``). Without states (0) is the control: what importance gains on plain KV. Arms:

- ``lru``: stock's order, of KV and states;
- ``blind``: importance as it was without a thought of states, which go in stock's order;
- ``leaves``: KV that no request can go on from goes first; states go in stock's order;
- ``importance``: that, and states by marginal loss;
- ``unpassed``: as ``importance``, but of states that requests go by as of any other.

    python benchmark/states.py
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from results import print_rows, write_results
from rich.progress import track
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.tiers import Tier

sys.path.append(str(Path(__file__).parents[1] / "test"))

from support.drivers.state_driver import StateDriver, state_config

POOLS = {4000: (46, 16, 0), 8000: (36, 16, 0)}
"""Numbers of states, by tokens of KV."""
COST = CostModel(
    prefill_seconds_per_token=1e-5,
    prefill_seconds_per_token_pair=1e-9,
    bytes_per_token=24_576,
    host_bytes_per_second=4e10,
    storage_bytes_per_second=3e9,
)

Turn = tuple[list[int], list[int]]


class Texts:
    """Made-up text, none of it twice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._next = 10

    def text(self, low: int, high: int) -> list[int]:
        count = self.dice.randint(low, high)
        self._next += count
        return list(range(self._next - count, self._next))


def _say(texts: Texts, session: list[int], low: int = 20, high: int = 160) -> Turn:
    """A turn of a session, which takes the answer in."""
    session += texts.text(low, high)
    prompt, answer = list(session), texts.text(20, 100)
    session += answer
    return prompt, answer


def conversations(seed: int, requests: int) -> Iterator[Turn]:
    """Sessions that come, talk for some turns with pauses of their own, and go."""
    texts = Texts(seed)
    dice = texts.dice
    alive: list[tuple[float, list[int], int]] = []
    now = 0.0
    for _ in range(requests):
        if not alive or (len(alive) < 24 and dice.random() < 0.5):
            alive.append((now, texts.text(50, 400), 1 + min(int(dice.expovariate(1 / 5)), 12)))
        alive.sort(key=lambda each: each[0])
        due, session, left = alive.pop(0)
        now = max(now, due)
        yield _say(texts, session)
        if left > 1:
            alive.append((now + dice.expovariate(1.0) * 10, session, left - 1))
        now += 1.0


def closed(seed: int, requests: int) -> Iterator[Turn]:
    """Always as many sessions, whose turns come in any order; each ends once it is long."""
    texts = Texts(seed)
    sessions = [texts.text(50, 200) for _ in range(16)]
    for _ in range(requests):
        who = texts.dice.randrange(len(sessions))
        yield _say(texts, sessions[who])
        if len(sessions[who]) > 1200:
            sessions[who] = texts.text(50, 200)


def documents(seed: int, requests: int) -> Iterator[Turn]:
    """Questions about documents, some asked for more often; every third asker asks once more."""
    texts = Texts(seed)
    shared = [texts.text(300, 900) for _ in range(24)]
    weights = [1 / (rank + 1) for rank in range(len(shared))]
    again: list[list[int]] = []
    for _ in range(requests):
        if again and texts.dice.random() < 0.3:
            yield _say(texts, again.pop(texts.dice.randrange(len(again))), 20, 60)
            continue
        session = list(texts.dice.choices(shared, weights)[0])
        yield _say(texts, session, 20, 60)
        if texts.dice.random() < 0.33:
            again = [*again[-6:], session]


def scan(seed: int, requests: int) -> Iterator[Turn]:
    """A few sessions with turns again and again, beside prompts that nobody asks for twice."""
    texts = Texts(seed)
    hot = [texts.text(100, 300) for _ in range(6)]
    for _ in range(requests):
        if texts.dice.random() < 0.6:
            yield texts.text(100, 500), texts.text(20, 60)
            continue
        who = texts.dice.randrange(len(hot))
        yield _say(texts, hot[who])
        if len(hot[who]) > 1500:
            hot[who] = texts.text(100, 300)


def agents(seed: int, requests: int) -> Iterator[Turn]:
    """Sessions behind one of two long instructions, with many short turns."""
    texts = Texts(seed)
    instructions = [texts.text(600, 800) for _ in range(2)]
    sessions: list[tuple[list[int], int]] = []
    for _ in range(requests):
        if len(sessions) < 12:
            sessions.append((list(texts.dice.choice(instructions)), 1 + int(texts.dice.expovariate(1 / 6))))
        number = texts.dice.randrange(len(sessions))
        session, left = sessions.pop(number)
        yield _say(texts, session, 20, 80)
        if left > 1:
            sessions.append((session, left - 1))


def lengths(seed: int, requests: int) -> Iterator[Turn]:
    """As many sessions about long documents as of few words, with turns in any order; each ends by chance."""
    texts = Texts(seed)

    def begun(number: int) -> list[int]:
        return texts.text(1000, 1400) if number % 2 else texts.text(20, 60)

    sessions = [begun(number) for number in range(12)]
    for _ in range(requests):
        who = texts.dice.randrange(len(sessions))
        yield _say(texts, sessions[who], 20, 60)
        if texts.dice.random() < 0.15:
            sessions[who] = begun(who)


SHAPES: dict[str, Callable[[int, int], Iterator[Turn]]] = {
    each.__name__: each for each in (conversations, closed, documents, scan, agents, lengths)
}


class Blind(ImportancePolicy):
    """Ranks KV as if every node's end could be gone on from."""

    def value(self, tier: Tier, node: NodeMetadata, *, below: Tier | None) -> float:
        node.lacks_state = False
        return super().value(tier, node, below=below)


class Unpassed(ImportancePolicy):
    """Ranks states that requests go by like any other."""

    def state_loss(self, node: NodeMetadata, *, below: Tier | None, is_passed: bool) -> float:
        return super().state_loss(node, below=below, is_passed=False)


POLICIES = {"blind": Blind, "leaves": ImportancePolicy, "importance": ImportancePolicy}
CONTROLS = {"unpassed": Unpassed}
STOCK_STATES = ("blind", "leaves")


def make_driver(arm: str, *, tokens: int, states: int, extra_buffer: bool) -> StateDriver:
    sizes = {"tokens": tokens, "states": states, "extra_buffer": extra_buffer}
    if arm == "lru":
        return StateDriver("python-lru", **sizes)
    policy = {**POLICIES, **CONTROLS}[arm](COST, use_importance=False)
    driver = StateDriver("importance", policy=policy, **sizes)
    if states and arm in STOCK_STATES:
        driver.cache.components[ComponentType.MAMBA].order = None
    return driver


def hits(driver: StateDriver, shape: str, seed: int, requests: int) -> tuple[int, int]:
    """Prompt tokens that were found in the cache, and all."""
    found = asked = 0
    for prompt, answer in SHAPES[shape](seed, requests):
        found += driver.serve(prompt, answer)
        asked += len(prompt)
    driver.cache.sanity_check()
    return found, asked


def measured(
    shape: str, *, extra_buffer: bool, tokens: int, states: int, requests: int, seeds: int
) -> dict[str, Any]:
    """Hits of every arm, by seed."""
    arms = ["lru", *POLICIES, *CONTROLS] if states else ["lru", "importance"]
    found: dict[str, list[int]] = {}
    asked: list[int] = []
    for arm in arms:
        runs = [
            hits(
                make_driver(arm, tokens=tokens, states=states, extra_buffer=extra_buffer),
                shape,
                seed,
                requests,
            )
            for seed in range(seeds)
        ]
        found[arm], asked = [hit for hit, _ in runs], [prompt for _, prompt in runs]
    return {
        "shape": shape,
        "strategy": "extra_buffer" if extra_buffer else "no_buffer",
        "kv_tokens": tokens,
        "states": states,
        "prompt_tokens": asked,
        "hit_tokens": found,
        "over_lru": {arm: sum(found[arm]) / max(sum(found["lru"]), 1) for arm in arms[1:]},
    }


def main(
    requests: Annotated[int, typer.Option(help="Of each run.")] = 200,
    seeds: Annotated[int, typer.Option(help="Runs of each shape and size.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    work = [
        (shape, extra_buffer, tokens, states)
        for shape in SHAPES
        for extra_buffer in (False, True)
        for tokens, numbers in POOLS.items()
        for states in numbers
    ]
    with state_config():
        rows = [
            measured(
                shape, extra_buffer=extra_buffer, tokens=tokens, states=states, requests=requests, seeds=seeds
            )
            for shape, extra_buffer, tokens, states in track(work, description="requests")
        ]
    flat = [
        {**{k: row[k] for k in ("shape", "strategy", "kv_tokens", "states")}, **row["over_lru"]}
        for row in rows
    ]
    for title, some in (
        ("Hit tokens over LRU's, with states", [row for row in flat if row["states"]]),
        ("Hit tokens over LRU's, plain KV", [row for row in flat if not row["states"]]),
    ):
        print_rows(title, some)
    print(f"written: {write_results('states', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

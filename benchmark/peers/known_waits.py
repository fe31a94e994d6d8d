"""What could be won on benchmark/peers' agents by an order that knew all but what chance decides.

    python benchmark/peers/known_waits.py --data DIR --model .cache/models/smollm2

How long a session waits between two turns is drawn from a log-normal. An order that looks ahead
(``foresight``) sees what was drawn, which nobody can learn. This script ranks by the best that can be learnt:
it knows the distribution itself and how long each session has waited, and takes the leaf of least retention
index, as ours does: the most returns per time that keeping it for any while can earn.

- ``waits``: and how many turns go on, on average;
- ``waits and ends``: and of each session, whether another turn comes;
- ``ours (told)``: ours, where each session says that it is over (``POST /close_session``);
- ``vllm``: vLLM's order (benchmark/peers/vllm_blocks.py).

Shadow caches as in benchmark/peers/learnt.py, on its loads and on that of the servers.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from math import erfc, log, sqrt
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.check_vllm_blocks import computed_of
from benchmark.peers.learnt import LOADS, USUAL, Load, server, shadow
from benchmark.peers.victims import SEEDS, Foresight, Future, LeafOrder, each_computed, trace_of
from benchmark.peers.workloads import PAGE, WAIT_SIGMA, Sent, Texts, agents, until_unique
from benchmark.results import RESULTS, rows_so_far, write_results
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.observe.shadow.shadow_ranking import LruShadowRanking
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.served_nodes import ServedPages

AGES = np.geomspace(1e-3, 200.0, 2_000)
"""In medians of the waits."""


def retention_index(goes_on: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of a session by how long it has waited; float64 [len(AGES)].

    The most of P(it comes back within t) / E[time until then, at most t] over all t (Gittins' index).

    Args:
        goes_on: probability that another turn comes.
    """
    waits_longer = np.array([erfc(log(age) / (WAIT_SIGMA * sqrt(2))) / 2 for age in AGES])
    remains = goes_on * waits_longer + 1 - goes_on
    held = np.concatenate([[0.0], np.cumsum((remains[1:] + remains[:-1]) / 2 * np.diff(AGES))])
    index = [
        np.max((remains[age] - remains[age + 1 :]) / (held[age + 1 :] - held[age]))
        for age in range(len(AGES) - 1)
    ]
    return np.array([*index, index[-1]])


class KnownWaits(LeafOrder):
    """Takes the leaf of least index, summed over the sessions whose last prompt it is part of.

    Args:
        future: whose ``now`` is the request that is being served.
        requests: in order.
        prompts: names of each one's pages.
        knows_ends: whether it is known which turn was a session's last.
    """

    def __init__(
        self, future: Future, requests: list[Sent], prompts: list[list[bytes]], knows_ends: bool
    ) -> None:
        super().__init__()
        self._future, self._requests, self._prompts = future, requests, prompts
        self._knows_ends = knows_ends
        goes_on = 1.0 if knows_ends else sum(not request.is_last for request in requests) / len(requests)
        self._index = retention_index(goes_on)
        self._last: dict[int, int] = {}  # request of each session
        self._sessions: defaultdict[bytes, set[int]] = defaultdict(set)  # whose last prompt has the page
        self._told = 0

    def victim(self, tier: Tier = Tier.DEVICE) -> ShadowNode | None:
        self._catch_up()
        return super().victim(tier)

    def _catch_up(self) -> None:
        for number in range(self._told, self._future.now + 1):
            session = self._requests[number].session
            if (before := self._last.get(session)) is not None:
                for page in self._prompts[before]:
                    self._sessions[page].discard(session)
            self._last[session] = number
            for page in self._prompts[number]:
                self._sessions[page].add(session)
        self._told = self._future.now + 1

    def worth(self, node: ShadowNode) -> float:
        now = self._requests[self._future.now].time
        value = 0.0
        for session in self._sessions[node.pages[0]]:
            last = self._requests[self._last[session]]
            if not (self._knows_ends and last.is_last):
                value += self._index[min(int(np.searchsorted(AGES, now - last.time)), len(AGES) - 1)]
        return value


def row_of(load: Load, seed: int, texts: Texts) -> dict[str, Any]:
    requests = until_unique(agents(texts, Random(f"agents/{seed}"), alive=load.alive), load.unique)
    trace = trace_of(requests)
    served = ServedPages(trace)
    prompts = [served.prompt(request) for request in range(trace.num_requests)]
    future = Future(served, trace.num_requests)
    pages = load.pool // PAGE
    caches = {
        "lru": shadow(pages, LruShadowRanking()),
        "ours": server(pages),
        "waits": shadow(pages, KnownWaits(future, requests, prompts, knows_ends=False)),
        "waits and ends": shadow(pages, KnownWaits(future, requests, prompts, knows_ends=True)),
        "foresight": shadow(pages, Foresight(future)),
    }
    every = range(trace.num_requests)
    counts = {name: sum(each_computed(trace, served, cache, every, future)) for name, cache in caches.items()}
    counts["vllm"] = computed_of(requests, load.pool)
    counts["ours (told)"] = sum(each_computed(trace, served, server(pages), every, future, told=requests))
    return {**load._asdict(), "seed": seed, "requests": len(requests), **counts}


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/ and prompts/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS, help="How many.")] = SEEDS,
    resume: Annotated[bool, typer.Option(help="Replay only what the JSON lacks.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers_known_waits.json",
) -> None:
    texts = Texts(data, Tokenizer.from_file(str(model / "tokenizer.json")))
    rows = rows_so_far(out) if resume else []
    known = {(row["name"], row["seed"]) for row in rows}
    loads = [Load("served", USUAL, USUAL // 4), *(load for load in LOADS if not load.is_learnt)]
    cells = [(load, seed) for load in loads for seed in range(1, seeds + 1)]
    for load, seed in track([cell for cell in cells if (cell[0].name, cell[1]) not in known]):
        rows.append(row_of(load, seed, texts))
        write_results("peers_known_waits", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

"""Whether ours computes less of coding agents once it has seen more of them.

    python benchmark/peers/learnt.py --data DIR --model .cache/models/smollm2

Shadow caches as in benchmark/peers/victims.py, in two situations that the runs of benchmark/peers/run.py, of
some ninety requests on an empty cache, leave out:

- *longer*: agents until they have sent four times as many different tokens, in a pool of the same size, and
  in a quarter of these tokens, with as many sessions alive, and with four times as many;
- *learnt*: the very requests of ``agents``, after others: the sessions that come behind them in the same
  order, none of which they share. Then the pool is emptied, and the server goes on with all that it learnt
  (``goes on``), with its life tables, of nodes and of turns (``tables``), or with what a ledger keeps
  (``ledger``): those of nodes, not those of turns.

Computed tokens are counted for each third of the requests.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.served import CHUNK
from benchmark.peers.victims import SEEDS, Foresight, Future, each_computed, trace_of
from benchmark.peers.workloads import AGENTS_ALIVE, PAGE, UNIQUE, Sent, Texts, agents, until_unique
from benchmark.restarted import ALL, NO_TURNS, TABLES, RestartedRanking, restart
from benchmark.results import RESULTS, rows_so_far, write_results
from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_ranking import LruShadowRanking, ShadowRanking
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST
from sgl_importance_lab.replay.served_nodes import ServedPages

THIRDS = 3
RESTARTS = {"goes on": ALL, "tables": TABLES, "ledger": NO_TURNS}


class Load(NamedTuple):
    """Agents, and a pool.

    Attributes:
        unique: different tokens that are sent.
        is_learnt: whether other sessions come first.
    """

    name: str
    unique: int
    pool: int
    alive: int = AGENTS_ALIVE
    is_learnt: bool = False


USUAL = UNIQUE["agents"]
LOADS = (
    Load("learnt", USUAL, USUAL // 4, is_learnt=True),
    Load("longer, a pool as before", 4 * USUAL, USUAL // 4),
    Load("longer, a quarter", 4 * USUAL, USUAL),
    Load("longer, a quarter, more alive", 4 * USUAL, USUAL, alive=4 * AGENTS_ALIVE),
)


def earlier_sessions(texts: Texts, seed: int, requests: list[Sent]) -> list[Sent]:
    """All requests of the sessions that come behind those of the others, but for a task that these have, too:
    two of the coding agents begin with the same prompt."""
    begun = 1 + max(request.session for request in requests)
    later = list(agents(texts, Random(f"agents/{seed}"), begun))
    tasks = set(first_prompts(requests).values())
    own = {session for session, prompt in first_prompts(later).items() if prompt not in tasks}
    return [request for request in later if request.session in own]


def first_prompts(requests: list[Sent]) -> dict[int, tuple[int, ...]]:
    """Of each session."""
    return {request.session: tuple(request.ids) for request in reversed(requests)}


def thirds(computed: list[int]) -> list[int]:
    """Sums of the first, second and last third."""
    ends = [len(computed) * third // THIRDS for third in range(THIRDS + 1)]
    return [sum(computed[start:end]) for start, end in pairwise(ends)]


def shadow(pages: int, ranking: ShadowRanking) -> ShadowCache:
    return ShadowCache(pages, PAGE, ranking, spare_pages=1, chunk_tokens=CHUNK)


def server(pages: int) -> ShadowCache:
    """Ours, as it starts."""
    ranking = RestartedRanking(UNIFORM_COST, PAGE, ghost_pages_of(pages))
    ranking.policy.admit()  # sglang asks its server once before anybody does
    return shadow(pages, ranking)


def row_of(load: Load, seed: int, texts: Texts) -> dict[str, Any]:
    requests = until_unique(agents(texts, Random(f"agents/{seed}"), alive=load.alive), load.unique)
    earlier = earlier_sessions(texts, seed, requests) if load.is_learnt else []
    trace = trace_of([*earlier, *requests])
    served = ServedPages(trace)
    future = Future(served, trace.num_requests)
    pages = load.pool // PAGE
    measured = range(len(earlier), trace.num_requests)
    caches = {"lru": shadow(pages, LruShadowRanking()), "ours": server(pages)}
    caches["foresight"] = shadow(pages, Foresight(future))
    for name, arm in RESTARTS.items() if load.is_learnt else ():
        caches[name] = server(pages)
        each_computed(trace, served, caches[name], range(len(earlier)), future)
        restart(caches[name], arm)
    counts = {
        name: thirds(each_computed(trace, served, cache, measured, future)) for name, cache in caches.items()
    }
    sent = {"requests": len(requests), "earlier": len(earlier)}
    sent["sessions"] = 1 + max(request.session for request in requests)
    return {**load._asdict(), "seed": seed, **sent, **counts}


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/ and prompts/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS, help="How many.")] = SEEDS,
    resume: Annotated[bool, typer.Option(help="Replay only what the JSON lacks.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers_learnt.json",
) -> None:
    texts = Texts(data, Tokenizer.from_file(str(model / "tokenizer.json")))
    rows = rows_so_far(out) if resume else []
    known = {(row["name"], row["seed"]) for row in rows}
    cells = [(load, seed) for load in LOADS for seed in range(1, seeds + 1)]
    for load, seed in track([cell for cell in cells if (cell[0].name, cell[1]) not in known]):
        rows.append(row_of(load, seed, texts))
        write_results("peers_learnt", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

"""Whether ours chooses better victims than recency does, on the prompts of benchmark/peers, and when.

    python benchmark/peers/victims.py --data DIR --model .cache/models/smollm2

Requests go one by one through shadow caches, which compute what a server with its device alone does: stock's
recency, ours, and an order that knows the future and takes the leaf that is asked for again last. Wherever
ours takes a leaf of another age than recency would take of the same leaves, a row counts the victim's tokens
by which of the two comes back first: ``worse`` where ours took that one.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.run import kept_workload
from benchmark.peers.served import CHUNK
from benchmark.peers.workloads import PAGE, UNIQUE, Sent, Texts
from benchmark.results import RESULTS, write_results
from sgl_importance.nodes.ghosts import ghost_pages_of
from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking, LruShadowRanking, ShadowRanking
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST
from sgl_importance_lab.replay.served_nodes import ServedPages
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

SEEDS = 10
NEVER = 1 << 60


class Future:
    """When pages are asked for; ``now`` is the request that is being served."""

    def __init__(self, served: ServedPages, requests: int) -> None:
        self.now = 0
        self._asked = defaultdict(list)
        for request in range(requests):
            for page in served.prompt(request):
                self._asked[page].append(request)

    def next_use(self, node: ShadowNode) -> int:
        asked = self._asked[node.pages[0]]
        later = bisect_right(asked, self.now)
        return asked[later] if later < len(asked) else NEVER


class LeafOrder(LruShadowRanking):
    """Takes the leaf that is worth least, of those that are worth as much the one that was used last longest
    ago; looks at each."""

    def __init__(self) -> None:
        super().__init__()
        self._leaves: dict[int, ShadowNode] = {}

    @abstractmethod
    def worth(self, node: ShadowNode) -> float:
        """Of keeping a leaf."""

    def enter(self, node: ShadowNode, tier: Tier = Tier.DEVICE, below: Tier | None = None) -> None:
        self._leaves[node.id] = node

    def leave(self, node: ShadowNode, tier: Tier = Tier.DEVICE) -> None:
        self._leaves.pop(node.id, None)

    def victim(self, tier: Tier = Tier.DEVICE) -> ShadowNode | None:
        if not self._leaves:
            return None
        node = min(self._leaves.values(), key=lambda node: (self.worth(node), node.last_use))
        return self._leaves.pop(node.id)


class Foresight(LeafOrder):
    """Takes the leaf that comes back last."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future

    def worth(self, node: ShadowNode) -> float:
        return -self._future.next_use(node)


class Compared(ImportanceRanking):
    """Ours; counts tokens of victims by what recency would have done, in the first third and later."""

    def __init__(self, capacity: int, future: Future, requests: int) -> None:
        super().__init__(UNIFORM_COST, PAGE, ghost_pages_of(capacity))
        self.counts: Counter[str] = Counter()
        self._leaves: dict[int, ShadowNode] = {}
        self._future = future
        self._third = requests / 3
        self.policy.admit()  # sglang asks its server once before anybody does

    def enter(self, node: ShadowNode, tier: Tier = Tier.DEVICE, below: Tier | None = None) -> None:
        self._leaves[node.id] = node
        super().enter(node, tier, below)

    def leave(self, node: ShadowNode, tier: Tier = Tier.DEVICE) -> None:
        self._leaves.pop(node.id, None)
        super().leave(node, tier)

    def victim(self, tier: Tier = Tier.DEVICE) -> ShadowNode | None:
        leaves = list(self._leaves.values())
        if (node := super().victim(tier)) is None:
            return None
        del self._leaves[node.id]
        oldest = min(leaves, key=lambda leaf: (last_access(leaf), leaf.id))
        when = "first third" if self._future.now < self._third else "later"
        ours, recency = self._future.next_use(node), self._future.next_use(oldest)
        if last_access(oldest) == last_access(node):
            judged = "same age"
        else:
            judged = "better" if ours > recency else "worse" if ours < recency else "equal"
        self.counts[f"{when}: {judged}"] += PAGE * len(node.pages)
        return node


def last_access(node: ShadowNode) -> int:
    """Admitted requests when it was visited last."""
    assert node.metadata is not None
    return node.metadata.last_access


def trace_of(requests: Sequence[Sent]) -> Trace:
    trace = TraceBuilder("peers", PAGE)
    for number, request in enumerate(requests):
        names = [hash(tuple(request.ids[:end])) for end in range(PAGE, len(request.ids) + PAGE, PAGE)]
        trace.add(names, input_tokens=len(request.ids), output_tokens=2, seconds=float(number))
    return trace.build()


def computed(trace: Trace, served: ServedPages, capacity: int, ranking: ShadowRanking, future: Future) -> int:
    """Prompt tokens that a cache of so many pages does not find."""
    cache = ShadowCache(capacity, PAGE, ranking, spare_pages=1, chunk_tokens=CHUNK)
    return sum(each_computed(trace, served, cache, range(trace.num_requests), future))


def each_computed(
    trace: Trace,
    served: ServedPages,
    cache: ShadowCache,
    requests: range,
    future: Future,
    told: Sequence[Sent] | None = None,
) -> list[int]:
    """Prompt tokens of each of these requests that the cache does not find.

    Args:
        told: the requests, where sessions are named, and say when they are over.
    """
    misses = []
    for request in requests:
        future.now = request
        tokens = int(trace.input_tokens[request])
        session = None if told is None else SessionName(str(told[request].session))
        found = cache.admit(str(request), served.prompt(request), tokens, session)
        assert found is not None, "a prompt is longer than the cache"
        misses.append(tokens - found)
        cache.finish(str(request), served.with_answer(request), served.tokens(request), AnswerEnd.UNKNOWN)
        if told is not None and session is not None and told[request].is_last:
            cache.session_over(session)
    return misses


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/ and prompts/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    workloads: Annotated[str, typer.Option(help="Separated by commas.")] = "agents,documents,chat,scan",
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers_victims.json",
) -> None:
    texts = Texts(data, Tokenizer.from_file(str(model / "tokenizer.json")))
    cells = [(name, seed) for name in workloads.split(",") for seed in range(1, SEEDS + 1)]
    rows: list[dict[str, Any]] = []
    for name, seed in track(cells, description="replaying"):
        trace = trace_of(kept_workload(name, seed, lambda: texts))
        served = ServedPages(trace)
        pool = UNIQUE[name] // 4
        future = Future(served, trace.num_requests)
        ours = Compared(pool // PAGE, future, trace.num_requests)
        orders = {"lru": LruShadowRanking(), "ours": ours, "foresight": Foresight(future)}
        tokens = {
            each: computed(trace, served, pool // PAGE, ranking, future) for each, ranking in orders.items()
        }
        rows.append({"workload": name, "seed": seed, "pool": pool, **tokens, "victims": dict(ours.counts)})
        write_results("peers_victims", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

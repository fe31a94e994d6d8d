"""Every driver of the policy, served the same way: each shows after a request what it evicted and keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_node import ShadowNode
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.importance_replay import UNIFORM_COST, ImportanceReplayPolicy
from sgl_importance_lab.replay.trace import Trace

from support.drivers.tree_driver import PAGE, TreeDriver

POOL_TOKENS = 1 << 13  # never full, and four times as many ghosts
Pages = tuple[int, ...]


def tokens_of(pages: Pages) -> list[int]:
    """A page ``p`` holds ``PAGE`` times the token ``p``."""
    return [page for page in pages for _ in range(PAGE)]


class Seen(NamedTuple):
    """A node, named by its last token, as it is known at a clock; blocks of a trace are named by numbers."""

    page: int
    reuse_class: int
    age: int


class Known(NamedTuple):
    """What a driver shows after a request: what it evicted, in order, and what it keeps."""

    evicted: list[Seen]
    kept: set[Seen]


def seen(page: int, node: NodeMetadata, clock: int) -> Seen:
    return Seen(page, node.reuse_class, clock - node.last_access)


def counted(policy: ImportancePolicy) -> list[list[list[float]]]:
    return [counts.tolist() for counts in policy.reuse.counts()]


# ---- the server's tree ----


class NotingPolicy(ImportancePolicy):
    """Notes the facts of every victim."""

    def __init__(self) -> None:
        super().__init__(UNIFORM_COST, use_importance=False)
        self._facts: dict[int, NodeMetadata] = {}
        self.page_of: Callable[[int], int] = int
        self.evicted: list[Seen] = []

    def enter(self, tier: Tier, node_id: int, node: NodeMetadata, *, below: Tier | None) -> None:
        self._facts[node_id] = node
        super().enter(tier, node_id, node, below=below)

    def victim(self, tier: Tier) -> int | None:
        node_id = super().victim(tier)
        if node_id is not None:
            self.evicted.append(seen(self.page_of(node_id), self._facts[node_id], self.clock))
        return node_id


class ServerTree:
    """The real radix tree with our component.

    Args:
        tokens: of the device pool.
    """

    def __init__(self, tokens: int = POOL_TOKENS) -> None:
        self.policy = NotingPolicy()
        self.driver = TreeDriver(tokens=tokens, policy=self.policy)
        self.policy.page_of = lambda node_id: self._page(self.driver.core.node_by_id(node_id))

    @staticmethod
    def _page(node) -> int:
        return int(node.key.raw_token_ids()[-1])

    def serve(self, prompt: Sequence[int], answer: Sequence[int] = (0,)) -> int:
        """One request from its beginning to its end; prompt tokens found."""
        request = self.driver.admit(list(prompt))
        found = request.cached_tokens_device
        self.driver.prefill(request)
        self.driver.decode(request, list(answer))
        self.driver.finish(request)
        return found

    def pages(self) -> int:
        return sum(len(node.key) for node in self.driver.all_nodes()) // PAGE

    def evict(self, pages: int) -> None:
        if pages > 0:
            self.driver.evict(pages * PAGE)

    def known(self) -> Known:
        evicted, self.policy.evicted = self.policy.evicted, []
        tree = self.driver.component.state.tree
        kept = {
            seen(self._page(node), tree.metadata(node), self.policy.clock) for node in self.driver.all_nodes()
        }
        return Known(evicted, kept)


# ---- a shadow cache ----


class NotingRanking(ImportanceRanking):
    """Notes the facts of every victim."""

    def __init__(self) -> None:
        super().__init__(UNIFORM_COST, PAGE, POOL_TOKENS)
        self.page_of: dict[bytes, int] = {}
        self.evicted: list[Seen] = []

    def seen(self, node: ShadowNode) -> Seen:
        assert node.metadata is not None
        return seen(self.page_of[node.pages[-1]], node.metadata, self.policy.clock)

    def victim(self) -> ShadowNode | None:
        node = super().victim()
        if node is not None:
            self.evicted.append(self.seen(node))
        return node


class Shadow:
    """A shadow cache without a bound of its own."""

    def __init__(self) -> None:
        self.ranking = NotingRanking()
        self.cache = ShadowCache(POOL_TOKENS, PAGE, self.ranking)
        self._serial = 0

    @property
    def policy(self) -> ImportancePolicy:
        return self.ranking.policy

    def serve(self, prompt: Sequence[int], answer: Sequence[int] = (0,)) -> int:
        """One request from its beginning to its end; prompt tokens found."""
        self._serial += 1
        whole = [*prompt, *answer]
        found = self.cache.admit(str(self._serial), self._digests(prompt), len(prompt))
        self.cache.finish(str(self._serial), self._digests(whole), len(whole))
        return found

    def _digests(self, tokens: Sequence[int]) -> list[bytes]:
        digests = chain_digests(root_digest(None, None), tokens, PAGE)
        self.ranking.page_of.update(zip(digests, tokens[PAGE - 1 :: PAGE], strict=False))
        return digests

    def pages(self) -> int:
        return self.cache.used

    def evict(self, pages: int) -> None:
        self.cache.evict(pages)

    def known(self) -> Known:
        evicted, self.ranking.evicted = self.ranking.evicted, []
        return Known(evicted, {self.ranking.seen(node) for node in self.cache.nodes()})


# ---- replays ----


class NotingReplay(ImportanceReplayPolicy):
    """Notes what is known after each request."""

    def __init__(self, capacity: int, trace: Trace, **kwargs) -> None:
        super().__init__(capacity, trace, **kwargs)
        self.after: list[Known] = []
        self._kept: dict[int, NodeMetadata] = {}
        self._evicted: list[Seen] = []

    def begin_request(self, request: int) -> None:
        if request:
            self.note()
        super().begin_request(request)

    def note(self) -> None:
        evicted, self._evicted = self._evicted, []
        kept = {seen(block, node, self.nodes.policy.clock) for block, node in self._kept.items()}
        self.after.append(Known(evicted, kept))

    def insert(self, block: int) -> None:
        super().insert(block)
        self._kept[block] = self.node(block)

    def victim(self) -> int:
        block = super().victim()
        self._evicted.append(seen(block, self._kept.pop(block), self.nodes.policy.clock))
        return block

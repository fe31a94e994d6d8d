"""Random histories: a list of small integers, each read as whatever the tree's state allows."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

import sglang_importance.tree.folding as folding_module
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.placement.pins.pin import Pin
from sgl_importance.signal.fold import Observation, fold
from sgl_importance.signal.node_importance import NodeImportance, Origin
from sgl_importance.tiers import Tier
from sgl_importance_lab.offline.standalone_cache import CacheKind
from sglang_importance.cache.component import ImportanceComponent

from support.drivers.tree_driver import PAGE, OutOfMemory, Request, TreeDriver

POOL_TOKENS = 256
MAX_LIVE = 4


def _sum(nodes: Sequence[NodeImportance]) -> float:
    return float(sum(node.sums(origin).sum() for node in nodes for origin in Origin))


class History:
    """Applies events to a driven tree and checks, at every fold, split and step, what must hold.

    Attributes:
        happened: how often each kind of event really took place.
    """

    def __init__(self, kind: CacheKind, patch: pytest.MonkeyPatch) -> None:
        self.driver = TreeDriver(
            kind,
            tokens=POOL_TOKENS,
            options=ImportanceOptions(policy="observe" if kind == "observe" else "importance"),
        )
        pins = self.driver.component.pins
        self.now = 0.0
        pins.now = lambda: self.now
        pins.capacity_tokens = lambda: {Tier.DEVICE: POOL_TOKENS, Tier.HOST: 2 * POOL_TOKENS}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.retracted: list[Request] = []
        self.happened: Counter[str] = Counter()
        patch.setattr(folding_module, "fold", self._checked_fold)
        patch.setattr(ImportanceComponent, "redistribute_on_node_split", self._checked_split())

    def _checked_fold(
        self, path: Sequence[NodeImportance], observation: Observation, *, weight: float, **kwargs
    ) -> float:
        aged = 0.5 ** (1 / kwargs["half_life_queries"]) if kwargs["first"] else 1.0
        before = _sum(path) * aged
        tail = fold(path, observation, weight=weight, **kwargs)
        assert (_sum(path) - before) / weight + tail == pytest.approx(1.0), "nodes + tail sum to 1"
        self.happened["fold"] += 1
        return tail

    def _checked_split(self):
        original = ImportanceComponent.redistribute_on_node_split

        def split(component: ImportanceComponent, new_parent, child) -> None:
            whole = component.state.tree.metadata(child).importance.page_vectors()
            original(component, new_parent, child)
            parts = [
                component.state.tree.metadata(node).importance.page_vectors() for node in (new_parent, child)
            ]
            assert np.array_equal(np.concatenate(parts), whole), "a split preserves every page"
            self.happened[component.node_events.split_reason] += 1

        return split

    def apply(self, op: str, a: int, b: int) -> None:
        """Runs one event; where the state does not allow it, nothing happens."""
        if getattr(self, f"_{op}")(np.random.default_rng((a, b)), a, b) is not False:
            self.happened[op] += 1
        self.check()

    def check(self) -> None:
        cache = self.driver.cache
        self.driver.component.check_integrity()
        live = self.waiting + self.running
        private = sum(request.slots_allocated - request.kv.cache_protected_len for request in live)
        held = cache.evictable_size() + cache.protected_size() + private
        assert cache.token_to_kv_pool_allocator.available_size() + held == POOL_TOKENS
        if not live:
            cache.sanity_check()

    def end(self) -> None:
        for request in self.waiting + self.running:
            self.driver.abort(request)
        self.waiting, self.running = [], []
        self.check()

    # ---- events ----

    def _admit(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        if len(self.waiting) + len(self.running) >= MAX_LIVE:
            return False
        # Six documents and few different tails: prompts share prefixes of every length.
        document = list(range(1000 * (a % 6), 1000 * (a % 6) + 10 * PAGE))
        tokens = document[: 2 + a // 6 % len(document)] + [b % 3] * (b // 3 % (3 * PAGE))
        before = self.happened["load_back"]
        try:
            request = self.driver.admit(tokens)
        except OutOfMemory:
            return False
        self.happened["load_back"] = before + self.driver.loaded_back
        self.driver.loaded_back = 0
        self.waiting.append(request)

    def _prefill(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        if not self.waiting:
            return False
        request = self.waiting.pop(a % len(self.waiting))
        total = len(request.origin_input_ids)
        chunk_end = b % total // PAGE * PAGE
        try:
            if request.filled < chunk_end < total:
                self.driver.prefill(request, up_to=chunk_end, body=rng.random(chunk_end // PAGE))
                self.happened["chunk"] += 1
            self.driver.prefill(request, body=rng.random(-(-total // PAGE)))
        except OutOfMemory:
            self.driver.abort(request)
            return False
        self.running.append(request)

    def _decode(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        if not self.running:
            return False
        request = self.running[a % len(self.running)]
        try:
            self.driver.decode(request, [b % 5] * (1 + b % 7), body=rng.random(1 + request.filled // PAGE))
        except OutOfMemory:
            self.running.remove(request)
            self.driver.abort(request)
            return False

    def _finish(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        if not self.running:
            return False
        self.driver.finish(self.running.pop(a % len(self.running)))

    def _abort(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        live = self.waiting if b % 2 else self.running
        if not live:
            return False
        self.driver.abort(live.pop(a % len(live)))

    def _retract(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        if not self.running:
            return False
        request = self.running.pop(a % len(self.running))
        self.driver.retract(request)
        self.retracted.append(request)

    def _readmit(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        if not self.retracted or len(self.waiting) + len(self.running) >= MAX_LIVE:
            return False
        request = self.retracted.pop(a % len(self.retracted))
        try:
            self.driver.readmit(request)
        except OutOfMemory:
            return False
        self.waiting.append(request)

    def _evict(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        nodes = list(self.driver.component.state.tree.nodes())
        on_device = {node.id for node in nodes if not node.evicted}
        self.driver.evict(1 + a % 64)
        demoted = sum(node.id in on_device and node.evicted and node.backuped for node in nodes)
        self.happened["demote"] += demoted

    def _evict_host(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        before = len(list(self.driver.component.state.tree.nodes()))
        self.driver.evict_host(1 + a % 64)
        return len(list(self.driver.component.state.tree.nodes())) < before

    def _back_up(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        nodes = list(self.driver.component.state.tree.nodes())
        if not nodes:
            return False
        self.driver.back_up(nodes[a % len(nodes)].id)

    def _pin(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        pins = self.driver.component.pins
        if len(pins.table) >= 8:
            return False
        document = list(range(1000 * (a % 6), 1000 * (a % 6) + 10 * PAGE))
        pin = Pin(f"{a}-{b}", array("q", document[: PAGE + a // 6 % (9 * PAGE)]))
        if b % 3 == 0:
            pin.expires_at = self.now + 1 + b % 5
        if pins.table.get(pin.pin_id) is None:
            pins.pin(pin)
        self._check_pins()

    def _unpin(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        pins = self.driver.component.pins
        if not len(pins.table):
            return False
        pins.unpin(pins.table.pins()[a % len(pins.table)].pin_id)
        self._check_pins()

    def _tick(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        self.now += 1
        ended = len(self.driver.component.pins.table) > len(self.driver.component.pins.current())
        self.happened["expire"] += ended

    def _ask(self, rng: np.random.Generator, a: int, b: int) -> bool | None:
        """Hashes a few pages, then asks about every page of one node."""
        tree = self.driver.component.state.tree
        nodes = list(tree.nodes())
        if not nodes:
            return False
        tree.source.catch_up(1 + b % 8)
        node = nodes[a % len(nodes)]
        while self.driver.cache.get_importance(tree.end_digest(node)) is None:
            assert tree.source._unhashed
        if node.id in tree.source._unhashed:
            return
        metadata = tree.metadata(node)
        for page, digest in enumerate(tree.page_digests(node)):
            known = self.driver.cache.get_importance(digest)
            assert known is not None
            assert known.body_mass == pytest.approx(metadata.importance.body_mass()[page])
            assert known.queries == metadata.importance.queries

    def _check_pins(self) -> None:
        pins = self.driver.component.pins
        for tier in (Tier.DEVICE, Tier.HOST):
            metadata = [self.driver.component.state.tree.metadata(node) for node in self.driver.all_nodes()]
            pinned = sum(each.tokens for each in metadata if each.pin_octaves.get(tier))
            assert pinned <= pins.table.budget_tokens(tier)


OPERATIONS = (
    "admit",
    "prefill",
    "decode",
    "finish",
    "abort",
    "retract",
    "readmit",
    "evict",
    "evict_host",
    "back_up",
    "pin",
    "unpin",
    "tick",
    "ask",
)

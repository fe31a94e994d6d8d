"""Random histories on the real tree: nothing is lost, nothing is counted twice, upstream stays consistent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

import sglang_importance.component as component_module
from sgl_importance.fold import Observation, fold
from sgl_importance.importance import NodeImportance, Origin
from sgl_importance.options import ImportanceOptions
from sglang_importance.component import ImportanceComponent

from driver import PAGE as PAGE_SIZE
from driver import OutOfMemory, Request, TreeDriver

POOL_TOKENS = 256
# Few different tokens, so that random prompts share prefixes of every length.
prompts = st.lists(st.integers(0, 1), min_size=2, max_size=60)


def _sum(nodes: Sequence[NodeImportance]) -> float:
    return float(sum(node.sums(origin).sum() for node in nodes for origin in Origin))


def checked_fold(
    path: Sequence[NodeImportance],
    observation: Observation,
    *,
    query: int,
    weight: float,
    half_life_queries: float,
) -> float:
    before = _sum(path)
    tail = fold(path, observation, query=query, weight=weight, half_life_queries=half_life_queries)
    gained = _sum(path) - before * 0.5 ** (weight / half_life_queries)
    assert gained / weight + tail == pytest.approx(1.0), "nodes + tail of one fold sum to 1"
    return tail


class TreeMachine(RuleBasedStateMachine):
    """Requests come, are chunked, decode, finish, are retracted or aborted, while tiers shift below them."""

    kind = "importance"
    waiting = Bundle("waiting")
    running = Bundle("running")
    retracted = Bundle("retracted")

    def __init__(self) -> None:
        super().__init__()
        self.driver = TreeDriver(
            self.kind,
            tokens=POOL_TOKENS,
            page_size=PAGE_SIZE,
            options=ImportanceOptions(policy=self.kind, half_life_queries=4),
        )
        self.live: dict[str, Request] = {}
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(component_module, "active_rows", lambda: self.driver.rows)
        self._patch.setattr(component_module, "fold", checked_fold)
        original = ImportanceComponent.redistribute_on_node_split

        def checked_split(component, new_parent, child):
            whole = component.metadata(child).importance.page_vectors()
            original(component, new_parent, child)
            parts = [component.metadata(node).importance.page_vectors() for node in (new_parent, child)]
            assert np.array_equal(np.concatenate(parts), whole), "a split preserves every page"

        self._patch.setattr(ImportanceComponent, "redistribute_on_node_split", checked_split)

    def teardown(self) -> None:
        for request in list(self.live.values()):
            self.driver.abort(request)
        self.live.clear()
        self.check_accounting()
        self._patch.undo()

    def _body(self, tokens: int, data: st.DataObject) -> np.ndarray:
        pages = -(-tokens // PAGE_SIZE)
        return np.array(data.draw(st.lists(st.floats(0, 1, width=32), min_size=pages, max_size=pages)))

    def _drop(self, request: Request) -> None:
        self.driver.abort(request)
        del self.live[request.rid]

    @rule(target=waiting, tokens=prompts)
    def admit(self, tokens: list[int]):
        if len(self.live) >= 4:
            return multiple()
        try:
            request = self.driver.admit(tokens)
        except OutOfMemory:
            return multiple()
        self.live[request.rid] = request
        return request

    @rule(target=running, request=consumes(waiting), chunk=st.integers(0, 40), data=st.data())
    def prefill(self, request: Request, chunk: int, data: st.DataObject):
        chunk_end = chunk // PAGE_SIZE * PAGE_SIZE
        total = len(request.origin_input_ids)
        try:
            if request.filled < chunk_end < total:
                self.driver.prefill(request, up_to=chunk_end)
            self.driver.prefill(request, body=self._body(total, data))
        except OutOfMemory:
            self._drop(request)
            return multiple()
        return request

    @rule(target=running, request=consumes(running), tokens=prompts, data=st.data())
    def decode(self, request: Request, tokens: list[int], data: st.DataObject):
        try:
            self.driver.decode(request, tokens[:8])
        except OutOfMemory:
            self._drop(request)
            return multiple()
        self.driver.decode(request, [], body=self._body(request.filled, data))
        return request

    @rule(request=consumes(running))
    def finish(self, request: Request) -> None:
        self.driver.finish(request)
        del self.live[request.rid]

    @rule(request=consumes(running))
    def abort(self, request: Request) -> None:
        self._drop(request)

    @rule(target=retracted, request=consumes(running))
    def retract(self, request: Request):
        self.driver.retract(request)
        del self.live[request.rid]
        return request

    @rule(target=waiting, request=consumes(retracted))
    def readmit(self, request: Request):
        if len(self.live) >= 4:
            return multiple()
        try:
            self.driver.readmit(request)
        except OutOfMemory:
            return multiple()
        self.live[request.rid] = request
        return request

    @rule(tokens=st.integers(1, POOL_TOKENS))
    def evict(self, tokens: int) -> None:
        self.driver.evict(tokens)

    @rule(tokens=st.integers(1, POOL_TOKENS))
    def evict_host(self, tokens: int) -> None:
        self.driver.evict_host(tokens)

    @rule(data=st.data())
    def back_up(self, data: st.DataObject) -> None:
        nodes = [node.id for node in self.driver.component.nodes()]
        if nodes:
            self.driver.back_up(data.draw(st.sampled_from(nodes)))

    @invariant()
    def check_accounting(self) -> None:
        cache = self.driver.cache
        self.driver.component.check_integrity()
        private = sum(
            request.slots_allocated - request.kv.cache_protected_len for request in self.live.values()
        )
        available = cache.token_to_kv_pool_allocator.available_size()
        assert available + cache.evictable_size() + cache.protected_size() + private == POOL_TOKENS
        if not self.live:
            cache.sanity_check()


class ObserveMachine(TreeMachine):
    kind = "observe"


_settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestImportanceTree = TreeMachine.TestCase
TestImportanceTree.settings = _settings
TestObserveTree = ObserveMachine.TestCase
TestObserveTree.settings = settings(_settings, max_examples=20)

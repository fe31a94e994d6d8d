"""A shadow of two tiers against the real thing: sglang's own tree over its own host pool and transfers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.nodes import tail_size
from sgl_importance.nodes.tail_size import LEAST_TOKENS
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking, LruShadowRanking
from sgl_importance.observe.shadow.tiered_shadow import HostWrites, TieredShadowCache
from sgl_importance_lab.offline.tree_replay import sequence_tokens, smallest_capacity
from sgl_importance_lab.study.recording import Recording

from support.drivers.hosted_driver import PAGE, HostedDriver
from support.workloads.recordings import PAGE_SIZE
from support.workloads.tree_recordings import branches, drawn_requests, make_recording

assert PAGE == PAGE_SIZE
KINDS = {"lru": "observe", "importance": "importance"}
both_kinds_and_writes = pytest.mark.parametrize(("kind", "writes"), [*product(KINDS, HostWrites)])


class Pair:
    """The same requests through a real tree with a host of twice the device, and through its shadow."""

    def __init__(self, kind: str, writes: HostWrites, capacity: int, chunk_pages: int | None = None) -> None:
        self.chunk_pages = chunk_pages
        self.real = HostedDriver(KINDS[kind], write_policy=writes.value, tokens=capacity * PAGE)
        state = self.real.component.state
        ranking = (
            LruShadowRanking()
            if kind == "lru"
            else ImportanceRanking(state.policy.cost, PAGE, state.tree.ghosts.capacity_pages)
        )
        self.shadow = TieredShadowCache(
            capacity,
            self.real.host_pool.size // PAGE,
            PAGE,
            ranking,
            writes,
            chunk_tokens=None if chunk_pages is None else chunk_pages * PAGE,
        )

    def serve(self, recording: Recording) -> tuple[list[int], list[int]]:
        """Prompt tokens that each request finds in the real tree, and in its shadow."""
        of_real, of_shadow = [], []
        for number, query in enumerate(recording.queries):
            name = str(number)
            prompt, output = sequence_tokens(query, number, PAGE, len(recording.digests))
            of_shadow.append(self.shadow.admit(name, query.prompt_pages.tolist(), query.input_tokens))
            self.shadow.finish(name, query.pages.tolist(), query.input_tokens + query.output_tokens)
            self.shadow.check_integrity()
            request = self.real.admit(list(prompt))
            of_real.append(request.cached_tokens_device + request.cached_tokens_host)
            while request.filled < len(prompt):
                chunk = len(prompt) if self.chunk_pages is None else self.chunk_pages * PAGE
                self.real.prefill(request, request.filled + chunk)
                self.real.settle()
            self.real.decode(request, list(output))
            self.real.finish(request)
            self.real.settle()
            assert self.shadow.used * PAGE == self._held(lambda node: not node.evicted)
            assert self.shadow.host_used * PAGE == self._held(lambda node: node.backuped)
        return of_real, of_shadow

    def _held(self, has) -> int:
        return sum(len(node.key) for node in self.real.all_nodes() if has(node))


@both_kinds_and_writes
@settings(max_examples=5, deadline=None)
@given(
    drawn=branches,
    room=st.integers(0, 8),
    chunk_pages=st.none() | st.integers(1, 3),
    least=st.sampled_from([PAGE, LEAST_TOKENS]),
)
def test_a_shadow_finds_what_the_real_tree_finds(
    kind: str, writes: HostWrites, drawn: list, room: int, chunk_pages: int | None, least: int
) -> None:
    recording = make_recording(drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail_size, "LEAST_TOKENS", least)
        pair = Pair(kind, writes, smallest_capacity(recording) + room, chunk_pages)
        of_real, of_shadow = pair.serve(recording)
    assert of_shadow == of_real


@pytest.mark.parametrize("least", [PAGE, LEAST_TOKENS])
@both_kinds_and_writes
def test_also_over_a_long_history(
    kind: str, writes: HostWrites, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_size, "LEAST_TOKENS", least)
    recording = make_recording(drawn_requests(9, 120))
    pair = Pair(kind, writes, smallest_capacity(recording) + 8, chunk_pages=2)
    of_real, of_shadow = pair.serve(recording)
    assert of_shadow == of_real
    assert pair.shadow.loaded > 0, "something was loaded from the host"
    assert pair.shadow.host_used > pair.shadow.host_capacity - 8, "the host was full"

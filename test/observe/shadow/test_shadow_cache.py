"""A shadow against the real thing: the same requests through sglang's own tree find the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking, LruShadowRanking, ShadowRanking
from sgl_importance.observe.shadow.tiered_shadow import HostWrites
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance_lab.offline.tree_replay import TreeReplay, hit_tokens, smallest_capacity
from sgl_importance_lab.study.recording import Recording

from support.workloads.recordings import COST, PAGE_SIZE
from support.workloads.tree_recordings import branches, drawn_requests, make_recording


def ranking(kind: str, capacity: int) -> ShadowRanking:
    return (
        LruShadowRanking() if kind == "lru" else ImportanceRanking(CostModel(**COST), PAGE_SIZE, 4 * capacity)
    )


def shadow_hits(recording: Recording, capacity: int, kind: str) -> list[int]:
    cache = ShadowCache(capacity, PAGE_SIZE, ranking(kind, capacity))
    hits = []
    for number, query in enumerate(recording.queries):
        name = str(number)
        hits.append(cache.admit(name, query.prompt_pages.tolist(), query.input_tokens))
        cache.check_integrity()
        cache.finish(name, query.pages.tolist(), query.input_tokens + query.output_tokens)
        cache.check_integrity()
        assert cache.used <= capacity
    return hits


def real_hits(recording: Recording, capacity: int, kind: str) -> list[int]:
    if kind == "lru":
        return hit_tokens(TreeReplay(recording, capacity_pages=capacity, kind="python-lru"))
    for query in recording.queries:
        query.folds = []
    policy = ImportancePolicy(CostModel(**COST), use_importance=False)
    return hit_tokens(TreeReplay(recording, capacity_pages=capacity, policy=policy))


@pytest.mark.parametrize("kind", ["lru", "importance"])
@settings(max_examples=10)
@given(drawn=branches, room=st.integers(0, 8))
def test_a_shadow_finds_what_the_real_tree_finds(kind: str, drawn: list, room: int) -> None:
    recording = make_recording(drawn)
    capacity = smallest_capacity(recording) + room
    assert shadow_hits(recording, capacity, kind) == real_hits(recording, capacity, kind)


@pytest.mark.parametrize("kind", ["lru", "importance"])
@pytest.mark.parametrize("seed", [0, 3])
def test_also_over_a_long_history(kind: str, seed: int) -> None:
    recording = make_recording(drawn_requests(seed, 250))
    capacity = smallest_capacity(recording) + 10 * seed
    found = shadow_hits(recording, capacity, kind)
    assert found == real_hits(recording, capacity, kind)
    assert 0 < sum(found) < sum(shadow_hits(recording, 10_000, kind)), "something was evicted"


@settings(max_examples=20)
@given(
    drawn=branches,
    order=st.lists(st.integers(0, 30), min_size=5, max_size=60),
    capacity=st.integers(1, 30),
    kind=st.sampled_from(["lru", "importance"]),
)
def test_requests_that_overlap_keep_it_sound(drawn: list, order: list[int], capacity: int, kind: str) -> None:
    """Ends come in any order, twice, or never."""
    recording = make_recording(drawn)
    cache = ShadowCache(capacity, PAGE_SIZE, ranking(kind, capacity))
    waiting = dict(enumerate(recording.queries))
    running: dict[int, object] = {}
    for number in order:
        if number in waiting:
            query = running[number] = waiting.pop(number)
            hits = cache.admit(str(number), query.prompt_pages.tolist(), query.input_tokens)
            if hits is None:
                assert -(-query.input_tokens // PAGE_SIZE) > capacity
            else:
                assert 0 <= hits < query.input_tokens
        elif number in running:
            query = running[number]
            tokens = query.input_tokens + query.output_tokens
            cache.finish(str(number), query.pages.tolist(), tokens)
        cache.check_integrity()


@pytest.mark.parametrize("kind", ["lru", "importance"])
@pytest.mark.parametrize("name", ["gone", "again"])
def test_what_never_ends_holds_nothing_once_that_is_known(kind: str, name: str) -> None:
    """It is said, or another request has its name."""
    cache = ShadowCache(4, PAGE_SIZE, order := ranking(kind, 4))
    cache.admit("gone", [b"a", b"b", b"c"], 13)
    if name == "again":
        cache.admit("gone", [b"a", b"x"], 9)
        cache.finish("gone", [b"a", b"x"], 9)
    else:
        cache.gone("gone")
        cache.finish("gone", [b"a", b"b", b"c"], 14)
    cache.check_integrity()
    cache.evict(4)
    assert cache.used == 0
    if isinstance(order, ImportanceRanking):
        assert not order._transitions


def test_what_a_running_request_uses_stays() -> None:
    cache = ShadowCache(4, PAGE_SIZE, LruShadowRanking())
    cache.admit("long", [b"a", b"b", b"c"], 12)
    assert cache.admit("other", [b"x", b"y"], 8) == 0
    assert cache.admit("again", [b"a", b"b", b"c"], 13) == 12, "its pages were locked"
    for name in ("long", "again"):
        cache.finish(name, [b"a", b"b", b"c"], 13)
    cache.finish("other", [b"x", b"y"], 8)
    cache.admit("third", [b"p", b"q", b"r", b"s"], 16)
    assert cache.used <= 4
    assert np.isclose(cache.used, 4)


def test_a_prompt_longer_than_the_pool_is_refused() -> None:
    cache = ShadowCache(2, PAGE_SIZE, LruShadowRanking())
    cache.admit("short", [b"a", b"b"], 2 * PAGE_SIZE)
    cache.finish("short", [b"a", b"b"], 2 * PAGE_SIZE)
    assert cache.admit("long", [b"a", b"b", b"c"], 3 * PAGE_SIZE) is None
    cache.finish("long", [b"a", b"b", b"c"], 3 * PAGE_SIZE)
    assert cache.used == 2


def test_a_leaf_is_a_prefill_chunk() -> None:
    """A server gives up the tail of a long prompt, and keeps what it prefilled before."""
    pages = [bytes([number]) for number in range(6)]
    found = {}
    for chunk_tokens in (None, 2 * PAGE_SIZE):
        cache = ShadowCache(8, PAGE_SIZE, LruShadowRanking(), chunk_tokens=chunk_tokens)
        cache.admit("long", pages, 6 * PAGE_SIZE)
        cache.finish("long", pages, 6 * PAGE_SIZE)
        cache.admit("other", [b"x", b"y", b"z"], 3 * PAGE_SIZE)
        cache.finish("other", [b"x", b"y", b"z"], 3 * PAGE_SIZE)
        cache.check_integrity()
        found[chunk_tokens] = cache.admit("again", pages, 6 * PAGE_SIZE)
    assert found == {None: 0, 2 * PAGE_SIZE: 4 * PAGE_SIZE}


@settings(max_examples=20)
@given(drawn=branches, chunk=st.integers(1, 12), kind=st.sampled_from(["lru", "importance"]))
def test_chunks_change_nothing_where_everything_fits(drawn: list, chunk: int, kind: str) -> None:
    recording = make_recording(drawn)
    whole, chunked = (
        ShadowCache(10_000, PAGE_SIZE, ranking(kind, 10_000), chunk_tokens=tokens)
        for tokens in (None, chunk * PAGE_SIZE)
    )
    for number, query in enumerate(recording.queries):
        prompt = query.prompt_pages.tolist()
        hits = [cache.admit(str(number), prompt, query.input_tokens) for cache in (whole, chunked)]
        assert hits[0] == hits[1]
        for cache in (whole, chunked):
            cache.finish(str(number), query.pages.tolist(), query.input_tokens + query.output_tokens)
            cache.check_integrity()


def served_in_turn(pair: ShadowPair) -> None:
    """Five times six documents of three pages."""
    prompt = 3 * PAGE_SIZE + 1
    for turn in range(5):
        for document in range(6):
            name, pages = f"{turn} {document}", [b"%d %d" % (document, page) for page in range(3)]
            pair.admit(name, pages, prompt)
            pair.finish(name, pages, prompt)


def test_a_host_tier_counts_whole_under_write_back_and_in_place_of_the_device_under_write_through() -> None:
    """A device of three documents, a host of four: only both together hold all six."""
    pair = ShadowPair(3 * 3 + 2, PAGE_SIZE, CostModel(**COST), 64)
    pair.add_host(3 * 4 + 2)
    served_in_turn(pair)
    back = pair.write_back
    assert back is not None
    assert back.lru_hit_tokens == 0
    assert back.other_hit_tokens == pair.larger[2].other_hit_tokens == 4 * 6 * 3 * PAGE_SIZE
    document = pair.document()
    assert document["write_back"]["hit_tokens"] == back.other_hit_tokens
    assert document["lru_hit_tokens"] == 0


def test_a_server_that_writes_back_is_not_told_to() -> None:
    pair = ShadowPair(3 * 3 + 2, PAGE_SIZE, CostModel(**COST), 64)
    pair.add_host(3 * 4 + 2, HostWrites.WRITE_BACK)
    served_in_turn(pair)
    assert "write_back" not in pair.document()
    assert pair.comparison.lru_hit_tokens == 4 * 6 * 3 * PAGE_SIZE


def test_a_prompt_that_the_pool_refuses_is_in_no_larger_one() -> None:
    pair = ShadowPair(2, PAGE_SIZE, CostModel(**COST), 8)
    assert pair.admit("long", [b"a", b"b", b"c"], 3 * PAGE_SIZE) is None
    assert pair.admit("short", [b"a"], PAGE_SIZE + 1) == (0, 0)
    assert {compared.other_hit_tokens for compared in pair.larger.values()} == {0}
    assert pair.comparison.requests == 1

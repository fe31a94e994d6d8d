"""What ``test_drivers_agree.py`` leaves out: where drivers of the policy differ (docs/evidence/replay.md)."""

from __future__ import annotations

import numpy as np

from sgl_importance.reuse.reuse_class import (
    NUM_TRANSITIONS,
    NUM_VISIT_LEVELS,
    BlockType,
    Transition,
    transition_of,
)
from sgl_importance_lab.replay.cache import replay_tree
from sgl_importance_lab.replay.trace import Trace, TraceBuilder

from support.drivers.policy_drivers import (
    Known,
    NotingReplay,
    Pages,
    Seen,
    ServerTree,
    Shadow,
    counted,
    tokens_of,
)
from support.drivers.tree_driver import PAGE


def block_type_of(known: Seen) -> BlockType:
    return BlockType(known.reuse_class // (NUM_VISIT_LEVELS * NUM_TRANSITIONS))


def of_page(known: Known, page: int) -> Seen:
    return next(each for each in known.kept if each.page == page)


def trace_of(paths: list[Pages], *, rest: int = 1, output_tokens: int = 1) -> Trace:
    builder = TraceBuilder("drawn", PAGE)
    for path in paths:
        builder.add(path, input_tokens=PAGE * len(path) + rest, output_tokens=output_tokens)
    return builder.build()


def replayed(trace: Trace, capacity: int = 99) -> NotingReplay:
    replay = NotingReplay(capacity, trace)
    replay_tree(trace, replay)
    replay.note()
    return replay


def served(paths: list[Pages], evicted_before: dict[int, int] | None = None) -> tuple[ServerTree, Shadow]:
    """Both caches of the server behind these requests; how many pages to evict before some of them."""
    server, shadow = ServerTree(), Shadow()
    for number, path in enumerate(paths):
        for cache in (server, shadow):
            cache.evict((evicted_before or {}).get(number, 0))
            cache.serve([*tokens_of(path), 0])
    return server, shadow


def test_a_server_makes_room_before_a_request_and_a_replay_behind_it():
    """Two documents are asked for all the time, a prompt once. Only behind its request can it go itself."""
    paths: list[Pages] = [(0,), (1,)] * 40 + [(2,)]
    server = ServerTree(tokens=3 * PAGE)  # a prompt of one page takes two while it runs
    for path in paths:
        server.serve([*tokens_of(path), 0])
    assert 2 in {each.page for each in server.known().kept}
    replay = replayed(trace_of(paths), capacity=2)
    assert {each.page for each in replay.after[-1].kept} == {0, 1}


def test_a_server_forgets_with_a_node_what_followed_it():
    """0 is followed by 1, both are evicted, 0 comes back and is followed by 2."""
    paths: list[Pages] = [(0, 1), (0,), (0, 2)]
    for cache in served(paths, {1: 2}):
        assert block_type_of(of_page(cache.known(), 0)) is BlockType.USER
    assert block_type_of(of_page(replayed(trace_of(paths)).after[-1], 0)) is BlockType.SHARED_PREFIX


def test_a_server_sees_where_a_request_departs_from_what_is_cached():
    """A prompt of which nothing is cached is cold, however often it was seen."""
    paths: list[Pages] = [(0,), (0,)]
    for cache in served(paths, {1: 1}):
        assert transition_of(of_page(cache.known(), 0).reuse_class) is Transition.COLD
    replay = replayed(trace_of(paths)).after[-1]
    assert transition_of(of_page(replay, 0).reuse_class) is Transition.NEXT_TURN


def test_answers_are_in_a_server_at_once_and_in_a_replay_with_the_next_turn():
    prompt, answer = tokens_of((0,)), tokens_of((1,))
    server, shadow = ServerTree(), Shadow()
    for cache in (server, shadow):
        cache.serve(prompt, answer)
        known = cache.known()
        assert {each.page for each in known.kept} == {0, 1}
        assert block_type_of(of_page(known, 1)) is BlockType.GENERATED
    builder = TraceBuilder("answered", PAGE)
    builder.add([0], input_tokens=PAGE, output_tokens=PAGE)
    builder.add([0, 1, 2], input_tokens=3 * PAGE)
    first, second = replayed(builder.build()).after
    assert {each.page for each in first.kept} == {0}
    assert block_type_of(of_page(second, 1)) is BlockType.GENERATED


def test_the_last_token_of_a_prompt_is_always_computed():
    """So of a prompt of whole pages the last one is never found, where a replay finds it."""
    server, shadow = ServerTree(), Shadow()
    prompt = tokens_of((0, 1))
    assert [server.serve(prompt), server.serve(prompt)] == [0, PAGE]
    assert [shadow.serve(prompt), shadow.serve(prompt)] == [0, PAGE]
    paths: list[Pages] = [(0, 1), (0, 1)]
    trace = trace_of(paths, rest=0)
    assert replay_tree(trace, NotingReplay(9, trace)).hit_tokens == 2 * PAGE


def test_a_server_caches_whole_pages_only():
    """The end of a prompt that fills no page is a block of its own to a replay, in classes of its own."""
    server, shadow = served([(0,)])
    assert len(server.known().kept) == len(shadow.known().kept) == 1
    trace = trace_of([(0, 1)], rest=1 - PAGE)
    trace.check_integrity()
    known = replayed(trace).after[-1]
    assert [block_type_of(of_page(known, page)) for page in (0, 1)] == [BlockType.USER, BlockType.PARTIAL]


def test_blocks_that_share_a_fate_count_once_in_a_replay_of_blocks():
    """Three pages that came one by one are three nodes, and three blocks of one class."""
    paths: list[Pages] = [(0,), (0, 1), (0, 1, 2), *[(0, 1, 2)] * 9]
    server, shadow = served(paths)
    replay = replayed(trace_of(paths))
    policies = (server.policy, shadow.policy, replay.nodes.policy)
    of_server, of_shadow, of_blocks = (np.sum(counted(policy)[0]) for policy in policies)
    assert of_server == of_shadow == 3 + 3 * 9
    assert of_blocks < of_server

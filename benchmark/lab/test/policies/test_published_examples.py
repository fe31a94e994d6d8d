"""Each published policy on an example that was worked by hand; H is a hit, a dot is a miss."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_importance_lab.policies.arc import ArcPolicy
from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.policies.cacheus import CacheusPolicy
from sgl_importance_lab.policies.fifo import FifoPolicy
from sgl_importance_lab.policies.gdsf import GdsfPolicy
from sgl_importance_lab.policies.hyperbolic import HyperbolicPolicy
from sgl_importance_lab.policies.lecar import LeCaRPolicy
from sgl_importance_lab.policies.lfu import LfuPolicy
from sgl_importance_lab.policies.lhd import LhdPolicy
from sgl_importance_lab.policies.lirs import LirsPolicy
from sgl_importance_lab.policies.lru import LruPolicy
from sgl_importance_lab.policies.lru2 import Lru2Policy
from sgl_importance_lab.policies.mq import MqPolicy
from sgl_importance_lab.policies.random import RandomPolicy
from sgl_importance_lab.policies.s3fifo import S3FifoPolicy
from sgl_importance_lab.policies.sieve import SievePolicy
from sgl_importance_lab.policies.slru import SlruPolicy
from sgl_importance_lab.policies.tlru import TlruPolicy
from sgl_importance_lab.policies.two_q import TwoQPolicy
from sgl_importance_lab.policies.wtinylfu import WTinyLfuPolicy
from sgl_importance_lab.replay.cache import replay_objects, replay_tree
from sgl_importance_lab.replay.trace import TraceBuilder

from support.drivers.published import Watched, belady, object_hits, object_trace, tree_trace


def pattern(policy: EvictionPolicy, accesses: str) -> str:
    return "".join("H" if hit else "." for hit in object_hits(policy, object_trace(accesses)))


@pytest.mark.parametrize(
    ("policy", "accesses", "expected"),
    [
        # c evicts a, which was used since but is the oldest.
        (FifoPolicy(2), "abaca", "..H.."),
        (LruPolicy(2), "abaca", "..H.H"),
        # c evicts b, the older of one use each; then a, used twice, outlives c.
        (LfuPolicy(3), "aabcdbca", ".H.....H"),
        # Priorities: a 3; b 1, evicted; c 1+1, evicted; d 2+1; e evicts a, as high as d but older.
        (GdsfPolicy(2), "aaabcdea", ".HH....."),
        (LfuPolicy(2), "aaabcdea", ".HH....H"),
        # a b fill the lower segment, c d the upper; e evicts a; b rises and c falls; f evicts e, not c.
        (SlruPolicy(4, segments=2), "abcdebfc", ".....H.H"),
        # a returns from the history with two uses, in the upper queue: newcomers evict each other.
        (MqPolicy(2, lifetime=100), "abcadefa", ".......H"),
        # Unused for a lifetime it falls back, and f evicts it.
        (MqPolicy(2, lifetime=1), "abcadefa", "........"),
        (MqPolicy(2, lifetime=100, history=0), "abcadefa", "........"),
        # While filling a b are on probation, c d e in the main queue. f evicts a; a returns to the main queue
        # and b leaves; g finds that queue too long: c, used, has a second chance, d goes.
        (S3FifoPolicy(5, small=0.4), "abcdecfagcd", ".....H...H."),
        # Two uses on probation lead to the main queue.
        (S3FifoPolicy(5, small=0.4), "abcdeaafghia", ".....HH....H"),
        (S3FifoPolicy(5, small=0.4, promotion_uses=3), "abcdeaafghia", ".....HH....."),
        # The hand takes a's mark and then b, and goes on behind it: c is next, although a has no mark left.
        (SievePolicy(3), "abcadba", "...H..H"),
        # c evicts b, used once, although a's last use is longer ago; b comes back with its use before.
        (Lru2Policy(2), "aabcba", ".H...H"),
        (Lru2Policy(2), "aabcbda", ".H....."),
        (Lru2Policy(2, history=0), "aabcbda", ".H....H"),
        # Five pass through A1in, where a's use counts for nothing; a returns from A1out to Am and stays.
        (TwoQPolicy(4), "abacdeafghia", "..H........H"),
        (TwoQPolicy(4, history=0), "abacdeafghia", "..H........."),
        # a and b are LIR; c passes, returns while it is on the stack, and takes the place of a, which passes.
        (LirsPolicy(3, passing=0.4), "abcdcbefac", ".....H...H"),
        (LirsPolicy(3, passing=0.4, history=0), "abcdcbefac", ".....H..H."),
        # c loses against a, used twice; used more often itself, it takes a's place.
        (WTinyLfuPolicy(3), "aabbcdab", ".H.H..HH"),
        (WTinyLfuPolicy(3), "aabbcccdb", ".H.H.HH.H"),
        (WTinyLfuPolicy(3), "aabbcccda", ".H.H.HH.."),
        # a, used three times in four accesses, goes before b, used once in one.
        (HyperbolicPolicy(2), "aaabcb", ".HH..H"),
        # b leaves T1 for B1; its return makes T1's target 1, so a leaves T2; a's return makes it 0 again.
        (ArcPolicy(2), "abacbab", "..H...H"),
        # Both experts give up b and c, the latest used of the blocks used once; a, demoted, is used again.
        (CacheusPolicy(2), "abcaba", "...H.H"),
        # a's hit puts it in the class of soonest hits.
        (LhdPolicy(2), "aabca", ".H..H"),
    ],
    ids=lambda value: value.name if isinstance(value, EvictionPolicy) else None,
)
def test_pattern(policy: EvictionPolicy, accesses: str, expected: str) -> None:
    assert pattern(policy, accesses) == expected


def test_lecar_leaves_the_expert_that_it_regrets() -> None:
    popularity = 1 / np.arange(1, 401)
    drawn = np.random.default_rng(2).choice(400, 4_000, p=popularity / popularity.sum())
    steady = LeCaRPolicy(100)
    object_hits(steady, object_trace(drawn.tolist()))
    assert steady._recency_weight < 0.45
    # Four blocks are counted often and never asked for again: their counts are in the way of all others.
    moving = [0, 1, 2, 3] * 50 + [10 + i // 8 + i % 2 for i in range(2_000)]
    moved = LeCaRPolicy(4)
    object_hits(moved, object_trace(moving))
    assert moved._recency_weight > 0.9


def test_cacheus_keeps_what_is_used_again_through_a_scan() -> None:
    used_again = [0, 1, 2, 3, 4] * 3
    trace = object_trace([*used_again, *range(100, 160), *used_again[:5]])
    hits = object_hits(CacheusPolicy(10), trace)[-5:].tolist()
    assert hits == [False, True, True, True, True], "the oldest had been demoted, and nothing else"
    assert not object_hits(LruPolicy(10), trace)[-5:].any()


def test_cacheus_leaves_the_expert_that_it_regrets() -> None:
    # As for LeCaR: old counts are in the way, so what the rarest expert gives up comes back.
    moving = [0, 1, 2, 3] * 50 + [10 + i // 8 + i % 2 for i in range(2_000)]
    moved = CacheusPolicy(4)
    object_hits(moved, object_trace(moving))
    assert moved._recency_weight > 0.6


def test_cacheus_makes_room_for_what_it_evicted_while_new() -> None:
    policy = CacheusPolicy(40, history=1.0)
    before = policy._probation_limit
    object_hits(policy, object_trace([*range(40), *range(50, 90), *range(50, 90)]))
    assert policy._probation_limit > before


def test_belady_evicts_the_furthest_next_use() -> None:
    trace = object_trace("abcabc")
    assert pattern(belady(trace)(2), "abcabc") == "...H.H"


def test_random_reaches_every_candidate_and_no_other() -> None:
    policy = RandomPolicy(4, seed=3)
    for block in range(4):
        policy.insert(block)
        policy.evictable(block)
    policy.held(2)
    victims = set()
    for _ in range(100):
        victims.add(victim := policy.victim())
        policy.insert(victim)
        policy.evictable(victim)
    assert victims == {0, 1, 3}


def test_tlru_spares_no_object_of_the_running_request() -> None:
    builder = TraceBuilder("objects", 1, prefix_tree=False)
    for request in ("abc", "de"):
        builder.add(request, input_tokens=len(request))
    watched = Watched(TlruPolicy(3, threshold=1))
    replay_objects(builder.build(), watched)
    # c, the last of three, although a is older; then not d, whose request goes on, but a by recency.
    assert watched.victims == [2, 0]


def tree_victims(policy: EvictionPolicy, paths: list[list[int]]) -> list[int]:
    watched = Watched(policy)
    replay_tree(tree_trace(paths), watched)
    return watched.victims


def test_lfu_keeps_a_frequent_branch_of_the_tree() -> None:
    # Blocks: 0 = (1), 1 = (1, 1), 2 = (2), 3 = (3). The branch under 0 was used twice.
    paths = [[1, 1], [1, 1], [2], [3]]
    assert tree_victims(LfuPolicy(3), paths) == [2]
    assert tree_victims(LruPolicy(3), paths) == [1]


def test_tlru_trims_only_the_spare_tail() -> None:
    # Conversation of blocks 0 1 2, then others of one block: with two spare blocks it gives up 2 and 1,
    # keeps 0, and then LRU decides, which is 3.
    paths = [[1, 1, 1], [2, 2], [3], [4], [5], [6]]
    tlru = tree_victims(TlruPolicy(5, threshold=2), paths)
    assert tlru[:2] == [2, 1]
    assert 0 not in tlru
    assert 0 in tree_victims(TlruPolicy(5, threshold=0), paths)


def test_tlru_counts_the_longest_path_through_a_block() -> None:
    # The path of the block (1) was three long, the last one is not: once its tail is gone the block is not
    # trimmed any further, and the block (2), 3, goes before it.
    paths = [[1, 1, 1], [1], [2], [3], [4]]
    assert tree_victims(TlruPolicy(3, threshold=2), paths) == [2, 1, 3]
    policy = TlruPolicy(3, threshold=2, next_prompt=2)
    assert tree_victims(policy, paths) == tree_victims(LruPolicy(3), paths)

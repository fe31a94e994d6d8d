"""Device, host and storage as one prefix cache: hits and bytes by tier, recomputed tokens, estimated TTFT.

A request finds each block of its prefix in the fastest tier that has it, up to the first block that no tier
has; from there on everything is computed. Blocks found below the device are loaded up, through every tier
in between, so all blocks of the request end up on the device. Each tier evicts leaf-only
among its own blocks, once the request has ended. No server does better: it gives up whole nodes.
``lower_tiers.served_tiers`` replays what a server does.

How blocks come to the lower tiers is the write policy, as in sglang's ``--hicache-write-policy``:
    ``write_through``: every block of a request is copied to the lower tiers that lack it; evicting drops.
    ``write_through_selective``: as ``write_through``, but from the second request on that asks for a block.
        (sglang counts two already at the end of the first, so there it is ``write_through`` for prompts.)
    ``write_back``: an evicted block moves one tier down if it is not there yet; the last tier drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_importance.tiers import Tier
from sgl_importance_lab.policies.base import EvictionPolicy
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup, TierSize
from sgl_importance_lab.replay.policy_registry import create_policy
from sgl_importance_lab.replay.trace import NO_PARENT, Trace


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of one tier.

    Attributes:
        hit_blocks: blocks that were found here first.
        hit_tokens: prompt tokens in them.
        loaded_bytes: read from here into the tier above.
        written_bytes: copied into here from above; a demoted block counts as a whole one.
    """

    tier: Tier
    capacity_blocks: int
    policy: str
    hit_blocks: int
    hit_tokens: int
    loaded_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class TieredCounts:
    """Counts of a tiered replay.

    Attributes:
        recomputed_tokens: prompt tokens that no tier had.
        ttft_seconds: estimated time to first token of each request, without queueing: blocks found below
            the device are loaded, tier after tier, then the rest is computed; float64 [requests served].
        refused_requests: requests that the device could not hold, which a server refuses; they are in no
            other count.
        refused_blocks: of these.
        refused_tokens: of their prompts.
    """

    tiers: tuple[TierCounts, ...]
    recomputed_tokens: int
    ttft_seconds: npt.NDArray[np.float64]
    refused_requests: int = 0
    refused_blocks: int = 0
    refused_tokens: int = 0


class TierCache:
    """Blocks of one tier. A block may be in it without its parent, which a faster tier then holds."""

    def __init__(self, size: TierSize, trace: Trace, policy: EvictionPolicy) -> None:
        assert trace.parents is not None
        self.size = size
        self.policy = policy
        self.resident = bytearray(trace.num_blocks)
        self.hit_blocks = self.hit_tokens = self.loaded_tokens = self.written_tokens = 0
        self._parents: list[int] = trace.parents.tolist()
        self._children = [0] * trace.num_blocks
        self._used = 0
        self._running = frozenset[int]()

    def begin(self, request: int, path: Sequence[int]) -> None:
        """The blocks of the path are held until ``end``."""
        self.policy.begin_request(request)
        self._running = frozenset(path)
        for block in path:
            if self.resident[block] and not self._children[block]:
                self.policy.held(block)

    def use(self, block: int, position: int) -> None:
        self.policy.at(position)
        self.policy.access(block)

    def admit(self, block: int, position: int) -> None:
        """Takes in a block of the running request."""
        self.policy.at(position)
        self._insert(block)

    def end(self, path: Sequence[int]) -> None:
        self._running = frozenset()
        for block in path:
            if self.resident[block] and not self._children[block]:
                self.policy.evictable(block)

    def demote(self, block: int) -> None:
        """Takes in a block that the tier above gave up."""
        self._insert(block)
        if not self._children[block]:
            self.policy.evictable(block)

    def _insert(self, block: int) -> None:
        self.policy.miss(block)
        parent = self._parents[block]
        if parent != NO_PARENT:
            if self.resident[parent] and not self._children[parent] and parent not in self._running:
                self.policy.held(parent)
            self._children[parent] += 1
        self.resident[block] = True
        self._used += 1
        self.policy.insert(block)

    def has_children(self, block: int) -> bool:
        return self._children[block] > 0

    def overfull(self) -> bool:
        return self._used > self.size.capacity

    def evict(self) -> int:
        block = self.policy.victim()
        assert self.resident[block]
        assert not self._children[block]
        self.resident[block] = False
        self._used -= 1
        parent = self._parents[block]
        if parent != NO_PARENT:
            self._children[parent] -= 1
            if not self._children[parent] and self.resident[parent]:
                self.policy.evictable(parent)
        return block


class TieredReplay:
    """One replay of all requests, one after the other.

    Args:
        seed: of policies that draw.
    """

    def __init__(self, trace: Trace, setup: TieredSetup, *, seed: int = 0) -> None:
        assert trace.parents is not None, "independent objects have no prefix tree"
        self.trace = trace
        self.setup = setup
        self.tiers = [
            TierCache(size, trace, create_policy(size.policy, size.capacity, trace, seed=seed))
            for size in setup.sizes
        ]
        self._requested = bytearray(trace.num_blocks)

    def run(self) -> TieredCounts:
        trace, setup, tiers = self.trace, self.setup, self.tiers
        ttft = np.zeros(trace.num_requests)
        recomputed = 0
        for index in range(trace.num_requests):
            path = trace.request(index).tolist()
            for tier in tiers:
                tier.begin(index, path)
            found = _look_up(tiers, path)
            seconds = 0.0
            left = int(trace.input_tokens[index])
            for level in found:
                tokens = min(trace.block_tokens, left)
                left -= tokens
                tiers[level].hit_blocks += 1
                tiers[level].hit_tokens += tokens
                for crossed in tiers[1 : level + 1]:
                    crossed.loaded_tokens += tokens
                    seconds += tokens * setup.bytes_per_token / crossed.size.bytes_per_second
            recomputed += left
            ttft[index] = seconds + left / setup.prefill_tokens_per_second
            self.admit(index, path, found)
            for tier in tiers:
                tier.end(path)
            self.make_room()
        return TieredCounts(
            tuple(
                TierCounts(
                    tier.size.tier,
                    tier.size.capacity,
                    tier.size.policy,
                    tier.hit_blocks,
                    tier.hit_tokens,
                    tier.loaded_tokens * setup.bytes_per_token,
                    tier.written_tokens * setup.bytes_per_token,
                )
                for tier in tiers
            ),
            recomputed,
            ttft,
        )

    def tokens_at(self, index: int, position: int) -> int:
        """Prompt tokens in the block at a position of a request."""
        tokens = self.trace.block_tokens
        return min(tokens, int(self.trace.input_tokens[index]) - position * tokens)

    def admit(self, index: int, path: Sequence[int], found: Sequence[int]) -> None:
        """Uses the blocks of a request in every tier, or takes them in.

        Args:
            index: of the request.
            path: its blocks.
            found: the fastest tier of each block that is anywhere, up to the first that is not.
        """
        for position, block in enumerate(path):
            source = found[position] if position < len(found) else 0  # computed on the device
            copied = self.setup.copies(again=bool(self._requested[block]))
            self._requested[block] = True
            for level, tier in enumerate(self.tiers):
                if tier.resident[block]:
                    tier.use(block, position)
                elif level <= source or copied:
                    tier.admit(block, position)
                    tier.written_tokens += self.tokens_at(index, position) if level > source else 0

    def make_room(self) -> None:
        """Evicts from the fastest tier on, so that demoted blocks are there when the next one makes room."""
        for level, tier in enumerate(self.tiers):
            below = self.tiers[level + 1] if level + 1 < len(self.tiers) else None
            while tier.overfull():
                block = tier.evict()
                if below is not None and not self.setup.writes_through and not below.resident[block]:
                    below.demote(block)
                    below.written_tokens += self.trace.block_tokens


def replay_tiers(trace: Trace, setup: TieredSetup, *, seed: int = 0) -> TieredCounts:
    """Replays all requests, one after the other.

    With one tier, hits equal those of ``replay_tree``.
    """
    return TieredReplay(trace, setup, seed=seed).run()


def _look_up(tiers: Sequence[TierCache], path: Sequence[int]) -> list[int]:
    """Fastest tier of each block of the longest prefix that is anywhere."""
    found = []
    for block in path:
        level = next((level for level, tier in enumerate(tiers) if tier.resident[block]), None)
        if level is None:
            break
        found.append(level)
    return found

"""The schedulers that hold one tree together, each with the KV of its own attention heads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from sgl_importance.placement.ledger.steady_time import steady_time

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The tensor-parallel ranks of a tree, which must all evict alike.

    They get the same messages in the same order, so what follows from these needs no agreement. What else a
    decision depends on (clocks, files) is the leader's, broadcast. All ranks call these methods in the same
    order, on the scheduler's thread.

    Attributes:
        group: of CPU tensors (gloo), as upstream's caches use it; None of a rank that is alone.
    """

    group: ProcessGroup | None = None

    @property
    def are_several(self) -> bool:
        return self.group is not None and dist.get_world_size(self.group) > 1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that answers, and that writes files and metrics."""
        return not self.are_several or dist.get_rank(self.group) == 0

    def now(self) -> float:
        """Unix time without jumps, the leader's."""
        if not self.are_several:
            return steady_time()
        time = torch.tensor(steady_time(), dtype=torch.float64)
        dist.broadcast(time, group=self.group, group_src=0)
        return time.item()

    def from_leader(self, value: T | None) -> T | None:
        """What the leader calls this with; the others' values count for nothing."""
        if not self.are_several:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def union(self, numbers: Iterable[int]) -> set[int]:
        """What any rank calls this with."""
        if not self.are_several:
            return set(numbers)
        of_each: list[list[int]] = [[]] * dist.get_world_size(self.group)
        dist.all_gather_object(of_each, sorted(numbers), group=self.group)
        return {number for numbers in of_each for number in numbers}

"""The interface of replayed policies, which choose the evictable block that goes next.

The cache tells the policy everything that happens to its blocks; the policy keeps its own order and names a
victim when asked. A policy never looks at the tree: a block with children in the cache, or on the path of
the running request, is simply not evictable, and the cache says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

__all__ = ["EvictionPolicy"]


class EvictionPolicy(ABC):
    """Base of the block-granular policies. Life of a block:

        insert -> (access | evictable | held)* -> victim

    A block is inserted *held*; ``evictable`` and ``held`` alternate from there on. In object-level replay
    every block becomes evictable at once and stays so until it is chosen.

    Args:
        capacity: blocks that the cache can hold, at least 1.
    """

    name: ClassVar[str]
    """Name on the command line: lower case, no punctuation."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity

    def begin_request(self, request: int) -> None:  # noqa: B027 -- most policies do not care
        """The next request starts; requests are numbered from 0."""

    def at(self, position: int) -> None:  # noqa: B027 -- most policies do not care
        """The next access or insert is of the block at this position of the running request: said where a
        cache passes over blocks, for policies that follow the trace. Else positions count up from 0."""

    @abstractmethod
    def insert(self, block: int) -> None:
        """The block was computed and is in the cache now, held."""

    def split(self, upper: int, lower: int) -> None:
        """A node, known by its block ``lower``, was cut by a request that uses its first part only, known as
        ``upper`` from now on and held. To most policies the part is new, or back: an evicted node may have
        ended there."""
        self.miss(upper)
        self.insert(upper)

    @abstractmethod
    def access(self, block: int) -> None:
        """The block was in the cache and a request uses it; it is held at that moment, or in object-level
        replay evictable."""

    @abstractmethod
    def evictable(self, block: int) -> None:
        """The block became a candidate: no children in the cache, and no running request uses it."""

    @abstractmethod
    def held(self, block: int) -> None:
        """The block is no candidate any more."""

    @abstractmethod
    def victim(self) -> int:
        """Chooses an evictable block and forgets it; the cache drops it. There is always one."""

    def miss(self, block: int) -> None:  # noqa: B027 -- most policies do not care
        """A block that is not in the cache is asked for and will be inserted: for policies that remember what
        they evicted, such as ARC."""

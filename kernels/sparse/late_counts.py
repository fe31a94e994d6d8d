"""Counts that a device adds up, and that the host takes when they have come."""

from __future__ import annotations

import torch


class LateCounts:
    """Sums on a device, of which copies arrive on the host behind the work that was given to it.

    Args:
        number: of sums.
        device: where they are.

    Attributes:
        arrived: host memory that copies go to, int64 [number].
    """

    def __init__(self, number: int, device: torch.device | str) -> None:
        self._sums = torch.zeros(number, dtype=torch.int64, device=device)
        is_cuda = self._sums.is_cuda
        self.arrived = torch.zeros(number, dtype=torch.int64, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None
        self._is_coming = False
        self._taken = [0] * number

    @property
    def sums(self) -> torch.Tensor:
        """Where a kernel adds, int64 [number]."""
        return self._sums

    def take(self) -> list[int]:
        """What each sum grew by between the last two copies that arrived; nothing waits."""
        if self._is_coming and self._event is not None and not self._event.query():
            return [0] * len(self._taken)
        grown = self._difference() if self._is_coming else [0] * len(self._taken)
        self.arrived.copy_(self._sums, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._is_coming = True
        return grown

    def take_all(self) -> list[int]:
        """What each sum has grown by since it was last taken; waits for the device."""
        self.arrived.copy_(self._sums)
        self._is_coming = False
        return self._difference()

    def _difference(self) -> list[int]:
        now = self.arrived.tolist()
        grown = [new - old for new, old in zip(now, self._taken, strict=True)]
        self._taken = now
        return grown

"""Host numbers on their way to the device: sent without waiting, never changed under a copy."""

from __future__ import annotations

from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Returns when the stream has come to the point."""

    def wait(self) -> None:
        """Lets the stream that is current now go on behind the point only; returns at once."""


class Stream(Protocol):
    """The part of a stream, on which the forward pass runs, that staging uses."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy."""

    def mark(self) -> Mark | None:
        """The point behind all that is queued; None where nothing is ever left to wait for."""


class CudaStream:
    """The current CUDA stream."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return event


class HostStream:
    """Copies at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> None:
        return None


def stream_of(device: torch.device | str) -> Stream:
    """The stream that work on a device is queued in."""
    return CudaStream() if torch.device(device).type == "cuda" else HostStream()


class StagedNumbers:
    """A static device buffer that is refilled from the host before a step, without a synchronisation.

    A copy from pinned memory reads it when the stream comes to the copy, which under overlap scheduling is
    after the host has begun the next step. So each step fills another buffer of a ring, and a buffer is used
    again only behind the mark of its last copy.

    Args:
        shape: of the buffer, int32.
        depth: steps that the host may be ahead.
        stream: for tests; the device's own where None.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device | str,
        *,
        depth: int = 4,
        stream: Stream | None = None,
    ) -> None:
        on_cuda = torch.device(device).type == "cuda"
        self.device_values = torch.zeros(shape, dtype=torch.int32, device=device)
        self._ring = [torch.zeros(shape, dtype=torch.int32, pin_memory=on_cuda) for _ in range(depth)]
        self._marks: list[Mark | None] = [None] * depth
        self._next = 0
        self._stream = stream or stream_of(device)

    def send(self, values: torch.Tensor) -> None:
        """Queues a copy of host ``values``, int32 of the buffer's shape, which may change afterwards."""
        index = self._next
        self._next = (index + 1) % len(self._ring)
        mark = self._marks[index]
        if mark is not None:
            mark.synchronize()
        self._ring[index].copy_(values)
        self._stream.copy(self.device_values, self._ring[index])
        self._marks[index] = self._stream.mark()

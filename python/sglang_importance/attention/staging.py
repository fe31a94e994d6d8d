"""Numbers on their way between host and device: sent without waiting, never changed under a copy, and read
back without waiting for more than what made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

HIGH_PRIORITY = -1
"""Of a CUDA stream; 0 is what streams have by default."""


class Mark(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Returns when the stream has come to the point."""

    def wait(self) -> None:
        """Lets the stream that is current now go on behind the point only; returns at once."""


class Stream(Protocol):
    """The part of the current stream that staging and rows use."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy."""

    def mark(self) -> Mark | None:
        """The point behind all that is queued; None where nothing is ever left to wait for."""

    def drain(
        self, sources: Sequence[torch.Tensor], behind: Mark | None, *, and_zero: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Reads tensors and zeroes them; returns when they have been read.

        Args:
            sources: of one length, float32 [n], to be read and zeroed.
            behind: the point behind the last work that writes them; what was queued later is not waited for.
            and_zero: to be zeroed without being read.

        Returns:
            ``sources`` as they were, on the host and the caller's own, float32 [len(sources), n]. What is
            queued in the current stream from now on finds zeros.
        """


class CudaStream:
    """The current CUDA stream, and one beside it to read by.

    The current stream is full of steps that were launched ahead of the host: a copy behind them would arrive
    when they are done, and the device would have nothing to do by then. The other has a higher priority: CUDA
    prefers its waiting blocks to those of a step that fills the device.

    Args:
        device: whose stream it is.
        most_drained: numbers that are drained at a time at most. Their room on the host is pinned here: CUDA
            does so only when the device has finished all that it was given.
    """

    def __init__(self, device: torch.device | str, most_drained: int = 0) -> None:
        self._beside = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._pinned = torch.empty(most_drained, dtype=torch.float32, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return event

    def drain(
        self, sources: Sequence[torch.Tensor], behind: Mark | None, *, and_zero: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        shape = (len(sources), len(sources[0]))
        host = self._pinned[: shape[0] * shape[1]].view(shape)
        with torch.cuda.stream(self._beside):
            if behind is not None:
                behind.wait()
            for target, source in zip(host, sources, strict=True):
                target.copy_(source, non_blocking=True)
            for tensor in (*sources, *and_zero):
                tensor.zero_()
            zeroed = self.mark()
        zeroed.wait()
        zeroed.synchronize()
        return host.clone()


class HostStream:
    """Copies at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> None:
        return None

    def drain(
        self, sources: Sequence[torch.Tensor], behind: Mark | None, *, and_zero: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        read = torch.stack(tuple(sources))
        for tensor in (*sources, *and_zero):
            tensor.zero_()
        return read


def stream_of(device: torch.device | str, most_drained: int = 0) -> Stream:
    """The stream that work on a device is queued in; arguments as ``CudaStream`` takes them."""
    return CudaStream(device, most_drained) if torch.device(device).type == "cuda" else HostStream()


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

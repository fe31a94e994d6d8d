"""A stand-in for a CUDA graph: what is captured is launched again, and the host sees nothing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from support.device_counts import DeviceCounts, launches, leaves, triton_executor


class HostRead(Exception):
    """What is captured asks the device for something, or gives it something of the host's."""


class _Refused(Counter[str]):
    def __setitem__(self, what: str, count: int) -> None:
        raise HostRead(what)


class Uncounted(DeviceCounts):
    """Runs everything, and counts nothing."""

    @contextmanager
    def counting(self) -> Iterator[DeviceCounts]:
        yield self


class NoWaits(DeviceCounts):
    """Refuses what ``DeviceCounts`` counts as waits, and every copy to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = _Refused()

    @contextmanager
    def counting(self) -> Iterator[DeviceCounts]:
        with mock.patch.object(torch.Tensor, "cpu", self._reading("cpu")), super().counting():
            yield self

    def _launching(self) -> Any:
        executor = triton_executor()
        launch = executor.__call__

        def launching(kernel: Any, *args: Any, **kwargs: Any) -> None:
            def again() -> None:
                with _disable_current_modes():
                    launch(kernel, *args, **kwargs)

            self.launches["triton"] += 1
            self.launched(again)
            again()

        return launching

    def launched(self, again: Callable[[], None]) -> None:
        """Work was given to the device, which ``again`` gives it once more."""


class CapturedStep(NoWaits):
    """Takes down what is launched inside ``counting``, with the buffers that it reads and writes.

    As in a CUDA graph these are the same ones whenever ``replay`` launches it again, all numbers and shapes
    stay what they were, and what Python does beside is not done again. Nothing of the host's takes part.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], None]] = []

    def launched(self, again: Callable[[], None]) -> None:
        self._work.append(again)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(map(self._is_host, given)):
            raise HostRead(f"{func} of host memory")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if launches(func) and not func._can_decompose():

            def again() -> None:
                fresh = func(*args, **(kwargs or {}))
                if not func._schema.is_mutable:
                    for old, new in zip(leaves(result), leaves(fresh), strict=True):
                        old.copy_(new)

            self._work.append(again)
        return result

    def _moving(self) -> Any:
        move = torch.Tensor.to

        def moving(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._names_device(args, kwargs):
                raise HostRead("a copy between devices")
            return move(tensor, *args, **kwargs)

        return moving

    def replay(self) -> None:
        """Launches it again."""
        for again in self._work:
            again()


class NoSyncs(DeviceCounts):
    """As ``NoWaits`` on a CUDA device, by what torch itself notices."""

    @contextmanager
    def counting(self) -> Iterator[DeviceCounts]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield self
        finally:
            torch.cuda.set_sync_debug_mode("default")


class CudaGraph(DeviceCounts):
    """As ``CapturedStep`` on a CUDA device; what is captured runs only when it is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def counting(self) -> Iterator[DeviceCounts]:
        with torch.cuda.graph(self._graph):
            yield self

    def replay(self) -> None:
        self._graph.replay()

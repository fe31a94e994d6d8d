"""A stream that does its work late, as a device does: what a copy reads is what is there by then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from sglang_importance.attention.staging import HostStream, Mark


class LateStream:
    """Work is done when somebody waits for it, or ``run`` is called.

    Attributes:
        after_each: called behind every piece of work.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._done = 0
        self.after_each: Callable[[], None] = lambda: None

    def launch(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.launch(lambda: target.copy_(source))

    def mark(self) -> Mark:
        return LateMark(self, self._done + len(self._queue))

    def drain(
        self, sources: Sequence[torch.Tensor], behind: Mark | None, *, and_zero: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        if behind is not None:
            behind.wait()
        return HostStream().drain(sources, None, and_zero=and_zero)

    def run(self, upto: int) -> None:
        while self._done < upto:
            self._queue.popleft()()
            self._done += 1
            self.after_each()

    @property
    def pending(self) -> int:
        return len(self._queue)


class LateMark:
    def __init__(self, stream: LateStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def synchronize(self) -> None:
        self._stream.run(self._position)

    def wait(self) -> None:
        """The reader's stream is the test itself, so what it waits for is done now."""
        self._stream.run(self._position)

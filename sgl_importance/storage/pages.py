"""The interface of a place that holds pages, as a transfer uses it."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Page = NDArray[np.uint8]

RUN_BYTES = 1 << 20
RUN_PAGES = 16

WRITE_REASONS = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EFBIG: "budget",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
    errno.ENOENT: "directory_missing",
    errno.ENOTDIR: "directory_missing",
}

UNREADABLE = frozenset((errno.EIO, errno.EUCLEAN, errno.EACCES, errno.EPERM))
"""Errors of one file, which stay until it is replaced; too few descriptors, say, pass."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Number of threads that may use a place at once, by what they do."""

    look: int
    read: int
    write: int


class StoredPages(Protocol):
    """A place that holds pages: a directory, or records inside a backend of upstream.

    A run is a few neighbouring pages of a sequence, moved by one thread in one go.

    Attributes:
        touch_holds_seconds: for which a sequence that was touched need not be touched again.
    """

    touch_holds_seconds: float

    def lanes(self, page_bytes: int) -> Lanes: ...

    def run_pages(self, page_bytes: int) -> int:
        """Most pages of a run."""
        ...

    def count_present(self, identity: bytes, keys: Sequence[str]) -> int:
        """Number of the first ``keys`` that are there, without a gap; they may still be damaged."""
        ...

    def read_run(self, identity: bytes, keys: Sequence[str], stage: Callable[[], Page]) -> Iterator[Page]:
        """Verified pages, in order, each in a buffer of ``stage``.

        Raises:
            PageMiss: at the first page that cannot be served.
        """
        ...

    def write_run(
        self,
        identity: bytes,
        keys: Sequence[str],
        bodies: Sequence[Page],
        *,
        before: str | None,
        depth: int,
        moment: int,
    ) -> list[bool | Exception]:
        """Stores neighbouring pages of a sequence that is used at ``moment`` (ns).

        Args:
            before: key of the page in front of the first; None at the start of a sequence.
            depth: pages in front of the first.

        Returns:
            Of each page, whether it is new, or why it is not stored.
        """
        ...

    def touch(self, identity: bytes, keys: list[str], moment: int) -> None:
        """Marks the first pages of a sequence, in order from its start, as used at ``moment`` (ns)."""
        ...


class PageByPage(ABC):
    """A place whose pages are looked for, read and written one at a time, by several threads."""

    touch_holds_seconds = 30.0

    @abstractmethod
    def exists(self, identity: bytes, key: str) -> bool:
        """Whether there is a page, which ``read`` may still find damaged."""

    @abstractmethod
    def read(self, identity: bytes, key: str, body: Page) -> None:
        """Reads a page into ``body`` [page bytes], which holds garbage where this raises.

        Raises:
            PageMiss: the page is absent, or cannot be read.
            PageDamaged: it failed a check and has been set aside.
        """

    @abstractmethod
    def write(self, identity: bytes, key: str, body: Page, *, depth: int, moment: int) -> bool:
        """Publishes a page; False where it was there already.

        Args:
            depth: pages in front of this one in its sequence.
            moment: when the sequence is used, in ns; one for all its pages.
        """

    def lanes(self, page_bytes: int) -> Lanes:
        # Threads that make small files in one folder wait for each other's entry, and twice as long in all.
        return Lanes(look=2, read=4, write=1 if page_bytes < RUN_BYTES else 2)

    def run_pages(self, page_bytes: int) -> int:
        return max(1, min(RUN_PAGES, RUN_BYTES // page_bytes))

    def count_present(self, identity: bytes, keys: Sequence[str]) -> int:
        return next((i for i, key in enumerate(keys) if not self.exists(identity, key)), len(keys))

    def read_run(self, identity: bytes, keys: Sequence[str], stage: Callable[[], Page]) -> Iterator[Page]:
        for key in keys:
            body = stage()
            self.read(identity, key, body)
            yield body

    def write_run(
        self,
        identity: bytes,
        keys: Sequence[str],
        bodies: Sequence[Page],
        *,
        before: str | None,
        depth: int,
        moment: int,
    ) -> list[bool | Exception]:
        outcomes: list[bool | Exception] = []
        for index, (key, body) in enumerate(zip(keys, bodies, strict=True)):
            try:
                outcomes.append(self.write(identity, key, body, depth=depth + index, moment=moment))
            except Exception as error:
                outcomes.append(error)
        return outcomes


def write_reason(error: Exception) -> str:
    """The label under which a failed write is counted."""
    if isinstance(error, OSError) and error.errno is not None:
        return WRITE_REASONS.get(error.errno, os.strerror(error.errno).lower().replace(" ", "_"))
    return "error"

"""Batches of pages to and from a store: in parallel, in order, and never waiting longer than agreed."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from sgl_importance.background.daemon_pool import DaemonPool
from sgl_importance.storage.late_call import LateCall
from sgl_importance.storage.page_record import MissReason, PageMiss
from sgl_importance.storage.pages import Page, StoredPages
from sgl_importance.storage.recent_uses import RecentUses
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.write_run import WriteRun

STAGED_BYTES = 32 << 20
WRITE_SECONDS = 10.0
HANG_SECONDS = 10.0
"""After which the thread that moves a few pages does not come back any more, as far as anybody can tell."""
MOST_AT_LEISURE = 64
TOUCH_SECONDS = 0.1
"""For which a write, which may evict, waits until what was used before it has been dated."""


class PageTransfer:
    """Moves the pages of one rank.

    Pages travel through staging buffers of our own: a read that comes too late must not write into host
    memory that has been given to another page by then.

    Args:
        pages: where they are.
        page_bytes: size of each.
        timeout: longest wait for the next page, in seconds.
        counters: counts reads, misses and writes.
    """

    def __init__(
        self, pages: StoredPages, *, page_bytes: int, timeout: float, counters: StoreCounters
    ) -> None:
        assert page_bytes > 0
        assert timeout > 0
        self.pages = pages
        self._page_bytes = page_bytes
        self._timeout = timeout
        self._patience = max(HANG_SECONDS, 2 * timeout)
        self.counters = counters
        lanes = pages.lanes(page_bytes)
        self._lookers = self._pool(lanes.look, "look")
        self._readers = self._pool(lanes.read, "read")
        self._writers = self._pool(lanes.write, "write")
        # Apart from the writes: a prefix of thousands of pages takes seconds to date in a slow directory.
        self._leisure = self._pool(1, "leisure", most_waiting=MOST_AT_LEISURE)
        self._late_look, self._late_write = LateCall(self._patience), LateCall(self._patience)
        self._recent = RecentUses(pages.touch_holds_seconds)
        self._last_touch = threading.Event()
        self._last_touch.set()
        self._run_pages = pages.run_pages(page_bytes)
        runs = STAGED_BYTES // (self._run_pages * page_bytes)
        self._reads_ahead = max(lanes.read, min(2 * lanes.read, runs))
        self._writes_ahead = max(lanes.write, min(2 * lanes.write, runs))
        # Reused: a fresh buffer costs a page fault every 4 KiB.
        self._staging: deque[Page] = deque(maxlen=max(2 * lanes.read, STAGED_BYTES // page_bytes))

    def _pool(self, threads: int, what: str, *, most_waiting: float = math.inf) -> DaemonPool:
        return DaemonPool(
            threads,
            f"kv-importance-{what}",
            patience=self._patience,
            most_waiting=most_waiting,
            on_given_up=partial(self.counters.add, "replaced_threads", what),
        )

    def close(self) -> None:
        self._lookers.close()
        self._readers.close()
        self._writers.close()
        self._leisure.close()

    # ---- reading ----

    def count_present(self, identity: bytes, keys: Sequence[str]) -> int:
        """Number of the first ``keys`` that are there, without a gap; 0 where the answer takes too long."""
        found = PageMiss(MissReason.TIMEOUT) if self._late_look.hangs() else self._look(identity, keys)
        if isinstance(found, PageMiss):
            self.counters.add("missed_pages", found.reason.value)
            return 0
        return found

    def _look(self, identity: bytes, keys: Sequence[str]) -> int | PageMiss:
        look = _Look(self.pages, identity, keys)
        self._lookers.submit(look)
        try:
            return look.answer.get(timeout=self._timeout)
        except queue.Empty:
            look.abandon()
            self._late_look.note(look.answer)
            return PageMiss(MissReason.TIMEOUT)

    def read(self, identity: bytes, keys: Sequence[str]) -> Iterator[Page]:
        """The first of ``keys`` that can be served, each verified; ends at the first miss, which is counted.

        A page is valid until the next one is asked for.
        """
        runs: deque[_ReadRun] = deque()
        readable = self._in_front_of_hung(identity, keys)
        starts = iter(range(0, len(readable), self._run_pages))

        def start_runs() -> None:
            while len(runs) < self._reads_ahead and (start := next(starts, None)) is not None:
                run = _ReadRun(self, identity, readable[start : start + self._run_pages])
                runs.append(run)
                self._readers.submit(run)

        try:
            start_runs()
            while runs:
                for _ in runs[0].keys:
                    page = runs[0].take(self._timeout)
                    yield page
                    self._staging.append(page)
                    self.counters.add("read_pages")
                    self.counters.add("read_bytes", amount=self._page_bytes)
                runs.popleft()
                start_runs()
            if len(readable) < len(keys):
                raise PageMiss(MissReason.TIMEOUT)
        except PageMiss as miss:
            self.counters.add("missed_pages", miss.reason.value)
        finally:
            for run in runs:
                run.abandoned = True

    def _in_front_of_hung(self, identity: bytes, keys: Sequence[str]) -> Sequence[str]:
        """The keys up to the first page in whose read a thread hangs: it would take the next thread too."""
        hung = {run.awaited for run in self._readers.hung() if isinstance(run, _ReadRun)}
        return list(itertools.takewhile(lambda key: (identity, key) not in hung, keys)) if hung else keys

    def stage(self) -> Page:
        """A buffer [page bytes] that nobody else uses."""
        try:
            return self._staging.pop()
        except IndexError:
            return np.empty(self._page_bytes, np.uint8)

    # ---- writing ----

    def write(
        self,
        identity: bytes,
        keys: Sequence[str],
        copy_page: Callable[[int, Page], None],
        *,
        prefix: Sequence[str] = (),
    ) -> list[bool]:
        """Writes consecutive pages of a sequence; which of them are stored.

        The rest of a batch is given up at the first run that takes too long, and so are the batches that come
        while it hangs.

        Args:
            identity: digest of the model.
            keys: of the pages.
            prefix: keys of all pages in front of them.
            copy_page: copies page i into a buffer; called here, so that host memory may change afterwards.
        """
        done = [False] * len(keys)
        if self._late_write.hangs():
            self.counters.add("unwritten_pages", "timeout", len(keys))
            return done
        moment = self.touch(identity, prefix)
        self._last_touch.wait(TOUCH_SECONDS)
        runs: deque[WriteRun] = deque()

        def finish_run() -> bool:
            run = runs[0]
            try:
                run.finished.get(timeout=max(WRITE_SECONDS, self._timeout))
            except queue.Empty:
                self._late_write.note(run.finished)
                self.counters.add("unwritten_pages", "timeout", len(keys) - run.start)
                return False
            runs.popleft()
            done[run.start : run.start + len(run.keys)] = run.stored
            self._staging.extend(run.bodies)
            return True

        try:
            for start in range(0, len(keys), self._run_pages):
                run_keys = keys[start : start + self._run_pages]
                run = WriteRun(
                    pages=self.pages,
                    counters=self.counters,
                    identity=identity,
                    keys=run_keys,
                    bodies=[self.stage() for _ in run_keys],
                    start=start,
                    before=keys[start - 1] if start else prefix[-1] if prefix else None,
                    depth=len(prefix) + start,
                    moment=moment,
                )
                for index, body in enumerate(run.bodies):
                    copy_page(start + index, body)
                runs.append(run)
                self._writers.submit(run)
                if len(runs) >= self._writes_ahead and not finish_run():
                    return done
            while runs and finish_run():
                pass
        finally:
            for run in runs:
                run.abandon()
        if done and all(done):
            self._recent.add(identity, keys[-1], moment)
        return done

    def touch(self, identity: bytes, keys: Sequence[str]) -> int:
        """Marks the start of a sequence as used, at leisure; as of when it is used, in ns.

        That is a little in the past where it has been marked shortly before: then it is not marked again, and
        what is written behind it is to be no newer than it.
        """
        moment = time.time_ns()
        if not keys:
            return moment
        earlier = self._recent.find(identity, keys[-1], moment)
        if earlier is not None:
            return earlier
        self._recent.add(identity, keys[-1], moment)
        self._last_touch = touched = threading.Event()

        def touch() -> None:
            try:
                self.pages.touch(identity, list(keys), moment)
            finally:
                touched.set()

        self.at_leisure(touch)
        return moment

    def at_leisure(self, call: Callable[[], None]) -> None:
        """Runs what nobody waits for, beside the writes; on a disk that is too slow, only the newest."""

        def silent() -> None:
            with suppress(Exception):
                call()

        self._leisure.submit(silent)


class _Look:
    """How many of the first keys are there; behind a disk that hangs, what nobody waits for keeps no keys."""

    def __init__(self, pages: StoredPages, identity: bytes, keys: Sequence[str]) -> None:
        self.answer: queue.SimpleQueue[int | PageMiss] = queue.SimpleQueue()
        self._pages = pages
        self._identity = identity
        self._keys: Sequence[str] | None = keys

    def abandon(self) -> None:
        self._keys = None

    def __call__(self) -> None:
        keys = self._keys  # read once: it may be abandoned meanwhile
        if keys is None:
            self.answer.put(0)
            return
        try:
            self.answer.put(self._pages.count_present(self._identity, keys))
        except Exception:
            self.answer.put(PageMiss(MissReason.IO))


class _ReadRun:
    """Neighbouring pages that one worker reads."""

    def __init__(self, transfer: PageTransfer, identity: bytes, keys: Sequence[str]) -> None:
        self.keys = keys
        self.abandoned = False
        self.awaited = (identity, keys[0])
        """Model and key of the page that is read now."""
        self._transfer = transfer
        self._identity = identity
        self._results: queue.SimpleQueue[Page | PageMiss] = queue.SimpleQueue()

    def __call__(self) -> None:
        if self.abandoned:
            return
        try:
            pages = self._transfer.pages.read_run(self._identity, self.keys, self._transfer.stage)
            for page, following in zip(pages, (*self.keys[1:], ""), strict=True):
                self._results.put(page)
                if self.abandoned:
                    return
                self.awaited = (self._identity, following)
        except PageMiss as miss:
            self._results.put(miss)
        except Exception:
            self._results.put(PageMiss(MissReason.IO))

    def take(self, timeout: float) -> Page:
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            raise PageMiss(MissReason.TIMEOUT) from None
        if isinstance(result, PageMiss):
            raise result
        return result

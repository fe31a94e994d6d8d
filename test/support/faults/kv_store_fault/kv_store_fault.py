"""A plugin that breaks a running server's storage on demand: what breaks stands in a file.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROL_FILE = "KV_STORE_FAULT_FILE"
HANG_SECONDS = 60.0
# Upstream keeps 10 GiB of the host's memory free; these pools are small, and machines of tests busy.
RESERVE_BYTES = 1 << 30


def active(fault: str) -> bool:
    try:
        return Path(os.environ[CONTROL_FILE]).read_text() == fault
    except (FileNotFoundError, KeyError):
        return False


def on_thread(function: str) -> bool:
    return function in threading.current_thread().name


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Calls ``act`` with the arguments of each call of ``owner.name`` in front of it."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def fails(fault: str, error: BaseException, *, thread: str = "") -> Callable[..., None]:
    def act(*_: Any, **__: Any) -> None:
        if on_thread(thread) and active(fault):
            if isinstance(error, SystemExit):
                Path(os.environ[CONTROL_FILE]).unlink(missing_ok=True)  # a thread dies once
            raise error

    return act


def hangs(*_: Any, **__: Any) -> None:
    """Until the disk is mended."""
    deadline = time.monotonic() + HANG_SECONDS
    while active("hangs") and time.monotonic() < deadline:
        time.sleep(0.01)


def lost_completion(ack: Any, *_: Any, completed_req: bool = False, **__: Any) -> None:
    if completed_req:
        fails("prefetch_io_dies", SystemExit(), thread="prefetch_io_aux_func")()


def register() -> None:
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from sgl_importance.storage.store import PageStore

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
    before(PageStore, "_read", hangs)
    before(PageStore, "exists", hangs)
    before(PageStore, "_read", fails("read_raises", RuntimeError("injected")))
    before(PageStore, "_publish", fails("disk_full", OSError(errno.ENOSPC, "injected")))
    before(PageStore, "_publish", fails("read_only", OSError(errno.EROFS, "injected")))
    before(hybrid_cache_controller, "get_storage_hash_str", fails("prefetch_raises", RuntimeError("no hash")))
    before(
        MHATokenToKVPoolHost,
        "set_from_flat_data_page",
        fails("prefetch_io_raises", RuntimeError("injected"), thread="prefetch_io_aux_func"),
    )
    before(
        MHATokenToKVPoolHost,
        "get_data_page",
        fails("backup_raises", RuntimeError("injected"), thread="backup_thread_func"),
    )
    # Between the steps that are guarded one by one: these end the loop of a thread, and what it held is lost.
    before(
        hybrid_cache_controller.PrefetchOperation,
        "is_terminated",
        fails("prefetch_dies", SystemExit(), thread="prefetch_thread_func"),
    )
    before(cache_controller.PrefetchAck, "__init__", lost_completion)
    before(
        hybrid_cache_controller.HybridCacheController,
        "_reduce_prefetch_ack",
        fails("prefetch_sync_dies", SystemExit(), thread="prefetch_sync_thread_func"),
    )
    before(queue.Queue, "put", fails("backup_dies", SystemExit(), thread="backup_thread_func"))

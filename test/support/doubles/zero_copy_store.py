"""A zero-copy backend in the manner of upstream's mooncake, with faults: K and V halves under two names.

As there, values are bytes at addresses of the registered host pool (``get_page_buffer_meta``), a name that is
there is not written again, and nothing can be deleted. Values lie in a folder, so that servers can share it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig


class ZeroCopyStore(HiCacheStorage):
    """``extra_config["folder"]`` takes the values; ``fault`` is what goes wrong with every read or write."""

    def __init__(self, config: HiCacheStorageConfig, _: dict[str, Any]) -> None:
        settings = config.extra_config
        assert settings is not None
        self.folder = Path(settings["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fault = ""
        self.answer = threading.Event()
        self.batches: list[tuple[str, int]] = []
        self.inside: dict[str, int] = {}
        self.most_inside = 0
        self._lock = threading.Lock()

    def files(self, key: str) -> list[Path]:
        return [self.folder / f"{key}_{half}" for half in ("k", "v")]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        there = (all(file.exists() for file in self.files(key)) for key in keys)
        return next((index for index, found in enumerate(there) if not found), len(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self._enter("get", keys)
        try:
            if self.fault == "get raises":
                raise RuntimeError("injected")
            if self.fault == "get hangs":
                self.answer.wait(30)
            if self.fault == "get brings nothing":
                return [True] * len(keys)
            if self.fault == "get answers for fewer":
                return [True] * (len(keys) - 1)
            return [self._get(key, meta) for key, meta in zip(keys, self._metas(host_indices), strict=True)]
        finally:
            self._leave("get")

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self._enter("set", keys)
        try:
            if self.fault == "set raises":
                raise RuntimeError("injected")
            if self.fault == "set fails":
                return [False] * len(keys)
            for key, meta in zip(keys, self._metas(host_indices), strict=True):
                for file, (address, size) in zip(self.files(key), meta, strict=True):
                    if not file.exists():
                        file.write_bytes(ctypes.string_at(address, size))
            return [True] * len(keys)
        finally:
            self._leave("set")

    def _get(self, key: str, meta: list[tuple[int, int]]) -> bool:
        for number, (file, (address, size)) in enumerate(zip(self.files(key), meta, strict=True)):
            if not file.exists():
                return False
            if self.fault == "get brings K only" and number:
                continue
            data = file.read_bytes()[:size]
            ctypes.memmove(address, data, len(data))
        return True

    def _metas(self, host_indices: torch.Tensor) -> list[list[tuple[int, int]]]:
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        pairs = list(zip(addresses, sizes, strict=True))
        return [pairs[start : start + 2] for start in range(0, len(pairs), 2)]

    def _enter(self, way: str, keys: list[str]) -> None:
        with self._lock:
            self.batches.append((way, len(keys)))
            self.inside[way] = self.inside.get(way, 0) + 1
            self.most_inside = max(self.most_inside, self.inside[way])
        time.sleep(0.001)

    def _leave(self, way: str) -> None:
        with self._lock:
            self.inside[way] -= 1

    # ---- what zero-copy backends leave out ----

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

"""Upstream's file backend as a dynamic backend of somebody's: values of the page size only."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig


class ValueStore(HiCacheFile):
    def __init__(self, config: HiCacheStorageConfig, _: dict[str, Any]) -> None:
        super().__init__(config)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        assert value.nbytes == self.mem_pool_host.get_dummy_flat_data_page().nbytes
        return super().set(key, value)

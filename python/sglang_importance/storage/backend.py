"""The HiCache backend that serves nothing but verified pages."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from sgl_importance.storage.page_record import MissReason, ModelIdentity
from sgl_importance.storage.page_transfer import PageTransfer
from sgl_importance.storage.pages import Page, StoredPages
from sgl_importance.storage.presence import Presence
from sgl_importance.storage.store import PageStore
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.storage.tier_chain.chain import TierChain
from sgl_importance.storage.tier_chain.kinds.backend_tier import RecordBackend
from sgl_importance.storage.tier_chain.open_chain import OpenChain
from sgl_importance.storage.tier_chain.tier_file import TierSpec
from sglang_importance.storage.backend_records import open_records, warn_of_its_limit
from sglang_importance.storage.interfaces import TESTED, Interface, interface_of
from sglang_importance.storage.page_buffers import StagingPool, create_backend
from sglang_importance.storage.served_chain import SERVED
from sglang_importance.storage.store_metrics import StorePublisher
from sglang_importance.storage.weights import WATCH, Weights
from sglang_importance.storage.wrapped import Names, ValuePages, ZeroCopyPages
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import data_parallel_rank

logger = logging.getLogger(__name__)

KV_POOL = "kv"

Result = TypeVar("Result")


class VerifiedStorage(HiCacheStorage):
    """Pages of one rank in a ``PageStore``, or in records inside another backend of upstream.

    Whatever goes wrong with a page is a miss: no method that a storage thread calls raises.

    Args:
        config: rank, model and our own settings, in ``extra_config`` as ``install.mount`` wrote them.
        _: nothing; upstream passes it to every dynamic backend.
    """

    def __init__(self, config: HiCacheStorageConfig, _: dict[str, Any]) -> None:
        settings = config.extra_config
        assert settings is not None
        self.counters: StoreCounters = WATCH.counters
        self._config = config
        self._directory = Path(settings["directory"])
        self._timeout = settings["fetch_timeout_ms"] / 1000
        self._budget_bytes: int = settings["budget_bytes"]
        self._ranks: int = settings["ranks"]
        self._wrapped: str | None = settings.get("wrapped")
        self._tiers: str | None = settings.get("tiers")
        self._opened: OpenChain | None = None
        self._publisher = StorePublisher.create(enabled=config.enable_storage_metrics)
        self._identity: tuple[Weights, bytes] | None = None
        self._backend: HiCacheStorage | None = None

    # ---- what upstream registers ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if self._config.is_mla_model and self._config.tp_size > 1:
            # All ranks would read what rank 0 alone has stored, which no test has run.
            raise LaunchRefused(
                ["--kv-importance-store does not support MLA on several ranks: use --tp-size 1 or drop it"]
            )
        self._page_size: int = mem_pool_host.page_size
        self._page_bytes: int = mem_pool_host.get_dummy_flat_data_page().nbytes
        self._pages = self._open_pages()
        self._transfer = PageTransfer(
            self._pages, page_bytes=self._page_bytes, timeout=self._timeout, counters=self.counters
        )
        self._presence = Presence(self._directory, self.counters)
        self._presence.look()

    def _open_pages(self) -> StoredPages:
        if self._tiers:
            config, replica = self._config, data_parallel_rank()
            owner = f"tp{config.tp_rank}-pp{config.pp_rank}-cp{config.attn_cp_rank}"
            if replica:  # upstream counts ranks within each
                owner += f"-dp{replica}"
            self._opened, lines = SERVED.open(
                Path(self._tiers),
                owner=owner,
                page_bytes=self._page_bytes,
                open_backend=self._open_records,
            )
            logger.info("KV importance tiers by %s: %s", SERVED.ranking, "; ".join(lines))
            return self._opened.chain
        store = PageStore(
            self._directory, budget_bytes=self._budget_bytes, ranks=self._ranks, counters=self.counters
        )
        if self._wrapped is None:
            return store
        return self._wrap(self._wrapped, Names(store.quarantine, self.counters))

    def _open_records(self, tier: TierSpec, size: int, owner: str) -> RecordBackend:
        _warn_if_untested(tier.backend)
        # Backends put the model's name into those of records: another --served-model-name would lose them.
        config = replace(self._config, model_name=owner)
        pin_memory = self.mem_pool_host.pin_memory
        return open_records(
            tier.backend,
            dict(tier.config),
            config,
            size=size,
            capacity=tier.capacity,
            pin_memory=pin_memory,
        )

    def _wrap(self, name: str, names: Names) -> StoredPages:
        settings: dict[str, Any] = (self._config.extra_config or {}).get("wrapped_config") or {}
        interface = interface_of(name, settings)
        _warn_if_untested(name)
        is_zero_copy = interface is Interface.ZERO_COPY
        staging = StagingPool(
            ZeroCopyPages.slots_for(self._page_bytes) if is_zero_copy else 1,
            self._page_bytes,
            allocator=name,
            pin_memory=self.mem_pool_host.pin_memory,
        )
        self._backend = backend = create_backend(name, self._config, settings, staging)
        warn_of_its_limit(name, backend, None)
        if is_zero_copy:
            return ZeroCopyPages(backend, names, staging)
        fixed = interface is Interface.BLOCKS
        return ValuePages(backend, names, staging.record_bytes if fixed else None)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Accepts the pool of the KV cache only: pages of others would need the same care.

        Raises:
            LaunchRefused: the model has another one.
        """
        if str(host_pool_name) != KV_POOL:
            raise LaunchRefused(
                [
                    f"--kv-importance-store does not support this model (host pool {host_pool_name}): "
                    "serve a model with full attention only, or drop --kv-importance-store"
                ]
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def close(self) -> None:
        self._transfer.close()
        self._presence.leave()
        if self._backend is not None and hasattr(self._backend, "close"):
            self._backend.close()
        if self._opened is not None:
            SERVED.close(self._opened)

    def clear(self) -> None:
        """What ``POST /hicache/storage-backend/clear`` asks for; sglang logs what this raises, in one line.

        Raises:
            NotImplementedError: there is a chain of tiers, of which other servers may share some.
        """
        if self._backend is not None:
            self._backend.clear()
        elif isinstance(self._pages, PageStore):
            self._pages.clear()
        else:
            raise NotImplementedError(
                "the pages of --kv-importance-tiers stay: stop the server and delete the folders of its tiers"
            )

    # ---- what the storage threads call ----

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        identity = self._current_identity(to_write=False)
        if identity is None:
            return 0
        return self._published(self._transfer.count_present(identity, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Puts verified pages into host memory; those behind the first miss are not looked at.

        Args:
            keys: of consecutive pages.
            host_indices: their slots [len(keys) * page_size].
            extra_info: the keys in front of them.
        """
        identity = self._current_identity(to_write=False)
        if identity is None:
            return [False] * len(keys)
        slots = host_indices[:: self._page_size].tolist()
        done = 0
        for done, page in enumerate(self._transfer.read(identity, keys), start=1):
            data = torch.from_numpy(page).view(self.mem_pool_host.dtype)
            self.mem_pool_host.set_from_flat_data_page(slots[done - 1], data)
        if self._current_identity(to_write=False) != identity:
            done = 0  # the weights have changed since
        self._transfer.touch(identity, _prefix(extra_info) + keys[:done])
        return self._published([True] * done + [False] * (len(keys) - done))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Stores pages of host memory; arguments as for ``batch_get_v1``."""
        identity = self._current_identity(to_write=True)
        if identity is None:
            self.counters.add("unwritten_pages", MissReason.WEIGHTS.value, len(keys))
            return self._published([False] * len(keys))
        slots = host_indices[:: self._page_size].tolist()

        def copy_page(index: int, body: Page) -> None:
            source = self.mem_pool_host.get_data_page(slots[index], flat=False)
            torch.from_numpy(body).view(source.dtype).view(source.shape).copy_(source)

        return self._published(self._transfer.write(identity, keys, copy_page, prefix=_prefix(extra_info)))

    # ---- single pages, which the controller never asks for ----

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError("pages go straight to the host pool: use batch_get_v1")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError("pages go straight to the host pool: use batch_get_v1")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError("pages come straight from the host pool: use batch_set_v1")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError("pages come straight from the host pool: use batch_set_v1")

    # ---- identity ----

    def _current_identity(self, *, to_write: bool) -> bytes | None:
        """The digest of what a page must have been computed with; None where nothing may be moved."""
        weights = WATCH.current
        if weights is None or (to_write and not weights.pages_match):
            return None
        known = self._identity  # read once: another thread may replace it for newer weights
        if known is not None and known[0] == weights:
            return known[1]
        identity = self._identify(weights)
        digest = identity.digest()
        self._identity = (weights, digest)
        if isinstance(self._pages, PageStore | TierChain):
            self._transfer.at_leisure(partial(self._pages.describe, digest, identity.to_json()))
        return digest

    def _identify(self, weights: Weights) -> ModelIdentity:
        pool, config = self.mem_pool_host, self._config
        return ModelIdentity(
            weights=weights.fingerprint,
            weights_version=weights.version,
            config=weights.config,
            dtype=str(pool.dtype),
            layout=pool.layout,
            page_size=self._page_size,
            page_bytes=self._page_bytes,
            layers=pool.layer_num,  # type: ignore[attr-defined]  # of each kind of pool, not of their base
            heads=getattr(pool, "head_num", 0),
            head_dim=getattr(pool, "head_dim", 0),
            # Upstream stores what all ranks hold alike from rank 0 only.
            tp_rank=0 if config.is_mla_model else config.tp_rank,
            tp_size=1 if config.is_mla_model else config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            cp_rank=config.attn_cp_rank,
            cp_size=config.attn_cp_size,
            sglang=version("sglang"),
        )

    def _published(self, result: Result) -> Result:
        """Passes a result on, and publishes what was counted on the way to it."""
        if self._presence.is_due():
            self._transfer.at_leisure(self._presence.look)
        if self._publisher is not None:
            self._publisher.publish(self.counters)
            self._publisher.publish_tiers(SERVED.counters)
        return result


def _warn_if_untested(backend: str) -> None:
    if backend not in TESTED:
        logger.warning(
            "KV importance store: no test has run a real %s under the wrapper; its pages are verified "
            "all the same (docs/storage.md)",
            backend,
        )


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str]:
    return list(extra_info.prefix_keys or ()) if extra_info is not None else []

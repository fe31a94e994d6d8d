"""Real host pools of a small model, and the verified backend over them, without a server."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import sglang  # noqa: F401  # first: with it come the shims
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sglang_importance.storage.backend import VerifiedStorage
from sglang_importance.storage.weights import Weights
from sglang_importance.upstream.differences import host_pool

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # for pools of a few kB, 10 GiB need not be free

PAGE_TOKENS, PAGES = 4, 8
KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(PAGES)]
WEIGHTS = Weights("w", "1", "c", pages_match=True)


def make_pool(layout: str, seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPoolHost:
    device = MHATokenToKVPool(
        size=PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=dtype,
        head_num=2,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    pool = host_pool(device, 2.0 * PAGES, PAGE_TOKENS, layout, pin_memory=False)
    generator = torch.Generator().manual_seed(seed)
    content = torch.rand(pool.kv_buffer.shape, generator=generator).to(dtype)
    pool.kv_buffer.copy_(content.view(pool.dtype))  # bytes, where the format is quantized
    return pool


def make_backend(pool: MHATokenToKVPoolHost, folder: Path, **changes: Any) -> VerifiedStorage:
    settings = {
        "directory": str(folder),
        "budget_bytes": 1 << 30,
        "ranks": 1,
        "fetch_timeout_ms": changes.pop("timeout_ms", 5000),
        "tiers": changes.pop("tiers", None),
        "wrapped": changes.pop("wrapped", None),
        "wrapped_config": changes.pop("wrapped_config", {}),
    }
    config = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "m",
    }
    backend = VerifiedStorage(HiCacheStorageConfig(**{**config, **changes}, extra_config=settings), {})
    backend.register_mem_pool_host(pool)
    return backend


def slots(first: int, pages: int = PAGES) -> torch.Tensor:
    return torch.arange(first * PAGE_TOKENS, (first + pages) * PAGE_TOKENS)


def pages_of(pool: MHATokenToKVPoolHost, first: int, pages: int = PAGES) -> list[torch.Tensor]:
    return [pool.get_data_page((first + page) * PAGE_TOKENS).clone() for page in range(pages)]

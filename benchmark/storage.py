"""Throughput of verified pages against upstream's bare file backend, and of the checksum alone.

Both move the same pages between the same HiCache host pool and the same file system, in turn, each through
the calls that HiCache's storage threads make. Reads come from the page cache: the share of the disk is nil,
which is the hardest case for anything that computes on the way.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sglang  # noqa: F401  # first: with it come the shims
import torch
from results import print_rows, write_results
from rich.progress import Progress
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sgl_importance.storage.checksum import crc32c
from sglang_importance.storage.backend import VerifiedStorage
from sglang_importance.storage.weights import WATCH, Weights
from sglang_importance.upstream.differences import host_pool

base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30  # the pools of this program are small

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
LAYOUT = "page_first_direct"
ROUNDS = 15
BATCH = 128  # pages, as upstream


def filled_host_pool(pages: int, page_tokens: int) -> MHATokenToKVPoolHost:
    """A host pool of ``pages`` pages of a model with 32 layers and 8 KV heads, in bfloat16."""
    device = MHATokenToKVPool(
        size=page_tokens,
        page_size=page_tokens,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    pool = host_pool(device, float(pages), page_tokens, LAYOUT, pin_memory=False)
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, dtype=torch.bfloat16))
    return pool


def storage_config(extra: dict[str, Any]) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="benchmark",
        extra_config=extra,
    )


class Bare:
    """Upstream's file backend, used as ``_generic_page_get`` and ``_generic_page_set`` use it."""

    def __init__(self, pool: MHATokenToKVPoolHost, folder: Path) -> None:
        self.pool = pool
        self.backend = HiCacheFile(storage_config({}), file_path=str(folder))

    def write(self, keys: list[str], slots: torch.Tensor) -> None:
        data = [self.pool.get_data_page(slots[i * self.pool.page_size]) for i in range(len(keys))]
        assert self.backend.batch_set(keys, data)

    def read(self, keys: list[str], slots: torch.Tensor) -> None:
        buffers = [self.pool.get_dummy_flat_data_page() for _ in keys]
        for i, page in enumerate(self.backend.batch_get(keys, buffers)):
            assert page is not None
            self.pool.set_from_flat_data_page(slots[i * self.pool.page_size], page)


class Verified:
    """Ours, used as ``_page_get_zero_copy`` and ``_page_set_zero_copy`` use it."""

    def __init__(self, pool: MHATokenToKVPoolHost, folder: Path) -> None:
        WATCH.current = Weights("benchmark", "1", "config", pages_match=True)
        settings = {"directory": str(folder), "budget_bytes": 1 << 50, "ranks": 1, "fetch_timeout_ms": 60_000}
        self.backend = VerifiedStorage(storage_config(settings), {})
        self.backend.register_mem_pool_host(pool)

    def write(self, keys: list[str], slots: torch.Tensor) -> None:
        assert all(self.backend.batch_set_v1(keys, slots))

    def read(self, keys: list[str], slots: torch.Tensor) -> None:
        assert all(self.backend.batch_get_v1(keys, slots))


def seconds(move: Callable[[list[str], torch.Tensor], None], keys: list[str], page_tokens: int) -> float:
    slots = torch.arange(len(keys) * page_tokens)
    start = time.perf_counter()
    for first in range(0, len(keys), BATCH):
        last = first + BATCH
        move(keys[first:last], slots[first * page_tokens : last * page_tokens])
    return time.perf_counter() - start


def checksum_rate(page_bytes: int, pages: int) -> float:
    """GB/s of the checksum over ``pages`` different pages, which no cache holds."""
    data = np.random.default_rng(0).integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    start = time.perf_counter()
    for page in data:
        crc32c(page)
    return data.nbytes / (time.perf_counter() - start) / 1e9


def measure(pages: int, page_tokens: int, directory: Path | None, progress: Progress) -> dict[str, Any]:
    torch.set_num_threads(1)
    pool = filled_host_pool(pages, page_tokens)
    page_bytes = pool.get_dummy_flat_data_page().nbytes
    gigabytes = pages * page_bytes / 1e9
    keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(pages)]
    expected = pool.kv_buffer.clone()
    rates: dict[str, list[float]] = {
        f"{kind} {way}": [] for kind in ("bare", "verified") for way in ("read", "write")
    }
    task = progress.add_task(f"pages of {page_bytes >> 10} KiB", total=2 * (ROUNDS + 1))
    for number in range(ROUNDS + 1):
        # Who goes first changes from round to round; the first round only warms up.
        for kind, make in sorted((("bare", Bare), ("verified", Verified)), reverse=bool(number % 2)):
            folder = Path(tempfile.mkdtemp(dir=directory))
            try:
                backend = make(pool, folder)
                written = seconds(backend.write, keys, page_tokens)
                pool.kv_buffer.zero_()
                read = seconds(backend.read, keys, page_tokens)
                assert torch.equal(pool.kv_buffer[:, :pages], expected[:, :pages])
                pool.kv_buffer.copy_(expected)
            finally:
                shutil.rmtree(folder)
            if number:
                rates[f"{kind} write"].append(gigabytes / written)
                rates[f"{kind} read"].append(gigabytes / read)
            progress.advance(task)
    row: dict[str, Any] = {"page KiB": page_bytes >> 10, "pages": pages}
    for way in ("read", "write"):
        bare, verified = rates[f"bare {way}"], rates[f"verified {way}"]
        row[f"bare {way} GB/s"] = statistics.median(bare)
        row[f"verified {way} GB/s"] = statistics.median(verified)
        low, middle, high = statistics.quantiles((v / b for v, b in zip(verified, bare, strict=True)), n=4)
        row[f"{way} ratio"] = middle
        row[f"{way} ratio quartiles"] = f"{low:.2f} - {high:.2f}"
    row["checksum GB/s"] = checksum_rate(page_bytes, pages)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=256, help="of pages in each round")
    parser.add_argument("--page-tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--directory", type=Path, help="where to store; a temporary directory where absent")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with Progress() as progress:
        for page_tokens in args.page_tokens:
            page_bytes = 2 * 2 * LAYERS * HEADS * HEAD_DIM * page_tokens
            pages = (args.megabytes << 20) // page_bytes
            if pages < LAYERS:  # upstream's page-first pool looks a page up by the number of a layer
                needed = -(-LAYERS * page_bytes >> 20)
                parser.error(f"--megabytes {args.megabytes}: pages of {page_tokens} tokens need {needed}")
            rows.append(measure(pages, page_tokens, args.directory, progress))
    print_rows("verified pages against upstream's file backend", rows)
    write_results("storage", rows, out=args.out)


if __name__ == "__main__":
    main()

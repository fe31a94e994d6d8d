"""Chains of small tiers in a folder, and the pages that tests put into them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from sgl_importance.storage.tier_chain.chain import TierChain
from sgl_importance.storage.tier_chain.kinds.backend_tier import BackendTier
from sgl_importance.storage.tier_chain.kinds.file_tier import FileTier
from sgl_importance.storage.tier_chain.kinds.mapped_tier import MappedTier
from sgl_importance.storage.tier_chain.kinds.record_index import RecordIndex
from sgl_importance.storage.tier_chain.kinds.tier import DramTier, StorageTier
from sgl_importance.storage.tier_chain.kinds.tier_record import Bytes, PageName, record_bytes
from sgl_importance.storage.tier_chain.measure import FetchCost
from sgl_importance.storage.tier_chain.member import ChainMember
from sgl_importance.storage.tier_chain.page_mover import Point
from sgl_importance.storage.tier_chain.ranking import LruRanking
from sgl_importance.storage.tier_chain.tier_counters import TierCounters
from sgl_importance.storage.tier_chain.tier_file import TierSpec

from support.record_backend import FolderBackend

PAGE_BYTES = 600
SIZE = record_bytes(PAGE_BYTES)
MODEL = bytes(range(32))
CAPACITIES = {"dram": 3, "cxl": 4, "fs": 6, "hicache": 6}


def body_of(key: str) -> np.ndarray:
    return np.random.default_rng(list(key.encode())).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


class FullTier(DramTier):
    """A medium that holds fewer records than its tier was given."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def put(self, name: PageName, record: Bytes) -> None:
        if len(self._records) >= self.most and not self.contains(name):
            raise OSError(errno.ENOSPC, "no space left")
        super().put(name, record)


def open_tier(kind: str, folder: Path, pages: int) -> StorageTier:
    match kind:
        case "dram":
            return DramTier()
        case "cxl":
            return MappedTier(folder / kind / "slots", SIZE, pages)
        case "hicache":
            return BackendTier("test", RecordIndex(folder / kind), SIZE, FolderBackend(folder / "backend"))
        case _:
            return FileTier(folder / kind, SIZE, direct=kind == "nvme")


def open_chain(
    folder: Path,
    kinds: Sequence[str] = ("dram", "cxl", "fs"),
    *,
    tiers: dict[str, StorageTier] | None = None,
    at: Callable[[Point], None] = lambda point: None,
    clock: Callable[[], float] = lambda: 0.0,
) -> TierChain:
    """Least recently used pages go first, and every tier is ten times as fast as the next."""
    members = [
        ChainMember(
            kind,
            kind,
            (tiers or {}).get(kind) or open_tier(kind, folder, CAPACITIES[kind]),
            CAPACITIES[kind],
            FetchCost(1e9 / 10**level),
        )
        for level, kind in enumerate(kinds)
    ]
    ranking = LruRanking(len(members))
    return TierChain(
        members, page_bytes=PAGE_BYTES, ranking=ranking, counters=TierCounters(), at=at, clock=clock
    )


def no_backend(spec: TierSpec, size: int, owner: str) -> NoReturn:
    """For chains without a tier of kind ``hicache``."""
    raise AssertionError(spec)


def keys_of(session: str, pages: int) -> list[str]:
    return [f"{session}{number}" for number in range(pages)]


def write(
    chain: TierChain, keys: Sequence[str], *, moment: int = 1, start: int = 0
) -> list[bool | Exception]:
    """Writes the pages of a sequence from ``start`` on, and says that those in front were used."""
    chain.touch(MODEL, list(keys[:start]), moment)
    before = keys[start - 1] if start else None
    bodies = [body_of(key) for key in keys[start:]]
    return chain.write_run(MODEL, keys[start:], bodies, before=before, depth=start, moment=moment)


def wrong_pages(chain: TierChain, keys: Sequence[str]) -> list[str]:
    """Reads what the chain says it has of a sequence; the keys that came with other bytes."""
    present = list(keys[: chain.count_present(MODEL, keys)])
    pages = chain.read_run(MODEL, present, lambda: np.empty(PAGE_BYTES, np.uint8))
    return [key for key, page in zip(present, pages, strict=True) if not (page == body_of(key)).all()]

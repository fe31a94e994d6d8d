"""The verified store below the host tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sgl_importance.options.setting import option

StoreBackends = Literal["tested", "any"]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where verified pages lie, how many, and how long a request waits for one."""

    directory: str = option(
        "",
        help="directory of verified pages below the host tier, under any policy; with "
        "--hicache-storage-backend, the pages lie there and this directory takes what fails a check",
        flag="--kv-importance-store",
        is_path=True,
        process="both",
        cost="a copy of each page in host memory, a checksum per read and write, a file per page",
    )
    max_bytes: int = option(
        64 << 30,
        help="size of the store beyond which its least recently used pages are deleted",
        flag="--kv-importance-store-bytes",
        unit="bytes",
        minimum=1,
        cost="so much disk, and a sixteenth more for each further server on the directory",
    )
    tiers: str = option(
        "",
        help="TOML file of a chain of storage tiers that hold the pages of the store instead of its "
        "directory (docs/storage.md)",
        flag="--kv-importance-tiers",
        is_path=True,
        cost="the bytes that the file gives each tier, for each rank; moves between them",
    )
    backends: StoreBackends = option(
        "tested",
        help="which --hicache-storage-backend, or backend of a tier, may hold the store's pages: 'tested' is "
        "file, 'any' takes those too that no test has run for real (docs/storage.md)",
        flag="--kv-importance-store-backends",
        choices=get_args(StoreBackends),
        process="launcher",
        cost="'any' trusts code that nobody has run here; wrong pages are still refused",
    )
    fetch_timeout_ms: int = option(
        1000,
        help="longest wait for the next page of the store; a slower one is computed",
        unit="ms",
        minimum=1,
        cost="so long may a request wait for a page before it is computed",
    )

"""What is kept longest, what is remembered over a restart, and what is brought in before anyone asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sgl_importance.options.setting import option

Switch = Literal["on", "off"]
PrewarmAt = Literal["off", "start", "idle"]


@dataclass(frozen=True, slots=True)
class PinOptions:
    """Soft pins."""

    budget: float = option(
        0.2,
        help="part of each tier's tokens that soft pins may hold, divided among the cache salts that pin; "
        "0 holds none",
        flag="--kv-importance-pin-budget",
        unit="share",
        minimum=0,
        maximum=1,
        whole=False,
        cost="room of unpinned text, as far as pins hold it",
    )


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """What was learnt, from one start to the next."""

    place: str = option(
        "auto",
        help="directory of the ledger, which keeps from one start to the next what was learnt about prefixes "
        "and their reuse, or postgresql://user@host/database, where servers of several machines learn "
        "together; 'auto' is the directory of the store, and none without a store; 'off' keeps nothing",
        flag="--kv-importance-ledger",
        is_path=True,
        process="both",
        cost="a thread of the scheduler, 64 MiB of queue, a file or a database with the token ids of prompts",
    )
    token_ids: Switch = option(
        "on",
        help="'on' keeps the token ids of prompts and answers in the ledger; 'off' keeps only digests of "
        "their pages: scores and reuse survive a restart, but nothing can be pre-warmed from the ledger",
        flag="--kv-importance-ledger-token-ids",
        choices=get_args(Switch),
        cost="'on' keeps the text of prompts on disk; 'off' costs pre-warms, and pins at a restart",
    )
    megabytes: int = option(
        256,
        help="size of the ledger beyond which what is worth least is forgotten",
        unit="MiB",
        minimum=1,
        cost="up to three times as much disk",
    )


@dataclass(frozen=True, slots=True)
class PrewarmOptions:
    """Prefixes that are brought in before anyone asks."""

    at: PrewarmAt = option(
        "start",
        help="'start' brings the most valuable prefixes of the ledger into free device memory when the "
        "server has started, 'idle' also whenever no request runs; 'off' leaves it to "
        "POST /kv_importance/prewarm. Under --kv-policy observe nothing is brought in unasked, beside "
        "several tokenizer workers nothing at all",
        flag="--kv-importance-prewarm",
        choices=get_args(PrewarmAt),
        process="launcher",
        cost="a request waits for the rest of one step, about 50 ms; 'idle' computes whenever nobody asks",
    )
    seconds: int = option(
        60,
        help="longest time that one pre-warming may take",
        unit="s",
        minimum=1,
        process="launcher",
    )


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

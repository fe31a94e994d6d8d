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

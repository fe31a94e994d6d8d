"""Every option of ours: what it means, which values it takes, its name and its flag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

KvPolicy = Literal["default", "observe", "importance"]
ImportanceG = Literal["auto", "on", "off", "shuffled"]
ImportanceGate = Literal["auto", "on", "off"]
AutoPins = Literal["off", "on"]
TraceDetail = Literal["folds", "steps"]
StoreBackends = Literal["tested", "any"]
Switch = Literal["on", "off"]
Prewarm = Literal["off", "start", "idle"]
Residency = Literal["full", "tiered"]
ResidencyPolicy = Literal["lru", "bucketed_lru", "lfu", "ema", "importance"]
SparseSelector = Literal["all", "bits", "rep", "quest", "infllm", "mean", "window", "token", "oracle"]

KV_POLICIES: tuple[KvPolicy, ...] = get_args(KvPolicy)
IMPORTANCE_G: tuple[ImportanceG, ...] = get_args(ImportanceG)
IMPORTANCE_GATE: tuple[ImportanceGate, ...] = get_args(ImportanceGate)
AUTO_PINS: tuple[AutoPins, ...] = get_args(AutoPins)
TRACE_DETAILS: tuple[TraceDetail, ...] = get_args(TraceDetail)
STORE_BACKENDS: tuple[StoreBackends, ...] = get_args(StoreBackends)
SWITCHES: tuple[Switch, ...] = get_args(Switch)
PREWARM: tuple[Prewarm, ...] = get_args(Prewarm)
RESIDENCY: tuple[Residency, ...] = get_args(Residency)
RESIDENCY_POLICIES: tuple[ResidencyPolicy, ...] = get_args(ResidencyPolicy)
SPARSE_SELECTORS: tuple[SparseSelector, ...] = get_args(SparseSelector)

LARGEST = 2**62
"""Largest number that an option takes: nobody means a larger one, and arithmetic works with it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Meaning and values of one option; its flag and its checks are derived from this.

    Attributes:
        help: what ``--help`` says, without unit and default.
        unit: unit of a number; None for a word.
        minimum: smallest number allowed.
        maximum: largest number allowed.
        above_minimum: whether the minimum itself is already too small.
        whole: whether a number must be whole.
        choices: the words allowed; empty where they are not known here.
        process: where the option acts. The launcher, which serves HTTP, checks every one.
        cost: what it takes from requests, memory, disk or privacy; empty where nothing.
    """

    help: str
    unit: str | None = None
    minimum: float = -math.inf
    maximum: float = math.inf
    above_minimum: bool = False
    whole: bool = True
    choices: tuple[str, ...] = ()
    process: Literal["scheduler", "launcher", "both"] = "scheduler"
    cost: str = ""

    def problem(self, value: object) -> str | None:
        """The problem with ``value``, to go on with behind the option's name; None where there is none."""
        if self.choices:
            return (
                None if value in self.choices else f"must be one of {', '.join(self.choices)}, not {value!r}"
            )
        if self.unit is None:
            return None if isinstance(value, str) else f"must be a word, not {value!r}"
        numbers = value if isinstance(value, tuple) else (value,)
        if all(self._allows(number) for number in numbers):
            return None
        kind = "a whole number" if self.whole else "a number"
        bound = "above" if self.above_minimum else "of at least"
        is_huge = any(isinstance(number, int) and number > LARGEST for number in numbers)
        most = LARGEST if is_huge else self.maximum
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        return f"must be {kind} {bound} {self.minimum:g}{limit} ({self.unit}), not {value!r}"

    def _allows(self, number: object) -> bool:
        if isinstance(number, bool) or not isinstance(number, int if self.whole else int | float):
            return False
        if abs(number) > LARGEST or not number <= self.maximum:  # not a number is neither
            return False
        return number > self.minimum if self.above_minimum else number >= self.minimum


SETTINGS: dict[str, Setting] = {
    "policy": Setting(
        "who ranks the KV cache: 'default' is stock sglang; 'observe' keeps stock's evictions and reports "
        "what importance would have done; 'importance' evicts by importance",
        choices=KV_POLICIES,
        process="both",
        cost="but for 'default': sglang's tree in Python instead of Rust, and page scores",
    ),
    "source": Setting(
        "producer of the page scores; 'none' leaves attention alone, whatever its backend, and reuse is "
        "predicted without scores; 'auto' takes the producer of the attention backend in use where it has "
        "run on that kind of device, else 'none'",
        cost="but for 'none': work in the layers that emit; on a CPU a second pass over queries and keys",
    ),
    "interval": Setting(
        "decode steps from one emitting step to the next; the first of a request always emits",
        unit="decode steps",
        minimum=1,
        cost="page scores in one of so many decode steps of a request: half of it doubles that work",
    ),
    "layers": Setting(
        "attention layers that emit, separated by commas; 'auto' leaves the choice to the producer",
        unit="layer index",
        minimum=0,
        cost="page scores in each layer named",
    ),
    "window": Setting(
        "last prompt tokens whose attention is observed at prefill",
        unit="tokens",
        minimum=1,
        cost="page scores of so many tokens per prefill; on a CPU they are computed when the request ends",
    ),
    "sink_tokens": Setting(
        "first tokens of a sequence that are left out of its scores", unit="tokens", minimum=0
    ),
    "local_tokens": Setting(
        "last tokens before the query that are left out of its scores", unit="tokens", minimum=0
    ),
    "half_life_queries": Setting(
        "visits of a node after which the weight of a query has halved",
        unit="queries",
        minimum=0,
        above_minimum=True,
        whole=False,
    ),
    "g": Setting(
        "'on' lets importance move the ranking; 'off' fixes its factor at 1; 'auto' is 'off' as long as no "
        "measurement has shown that the factor helps (docs/findings.md); 'shuffled' gives each node "
        "the factor of another, the control arm of experiments",
        choices=IMPORTANCE_G,
    ),
    "gate": Setting(
        "'on' copies to host and storage only what is worth its bytes, 'off' copies what sglang's write "
        "policy offers; 'auto' is 'off'",
        choices=IMPORTANCE_GATE,
        cost="'on' leaves less in the store for the time after a restart",
    ),
    "gate_payback": Setting(
        "what the gate stores: pages that are read back, while they stay, with at least this probability; at "
        "0.1 ten bytes may be written for one that is read",
        unit="probability",
        minimum=0,
        maximum=1,
        whole=False,
        cost="the higher, the less is stored, and found after a restart",
    ),
    "pin_budget": Setting(
        "part of each tier's tokens that soft pins may hold, divided among the cache salts that pin; "
        "0 holds none",
        unit="share",
        minimum=0,
        maximum=1,
        whole=False,
        cost="room of unpinned text, as far as pins hold it",
    ),
    "auto_pins": Setting(
        "'on' pins what many distinct queries attended to, within what the budget has left; needs g; no "
        "measurement has shown that it helps",
        choices=AUTO_PINS,
        cost="room of unpinned text, within the budget of pins",
    ),
    "trace": Setting(
        "directory to record requests, page scores and tree events in; read by 'study'",
        cost="scheduler time for digests and copies, a thread, disk",
    ),
    "trace_detail": Setting(
        "'folds' records what is handed to the tree, 'steps' also the page scores of each emitting step",
        choices=TRACE_DETAILS,
        cost="'steps' makes recordings larger, and a first token waits for its prefill's page scores",
    ),
    "trace_megabytes": Setting(
        "size of a recording beyond which its oldest part is deleted",
        unit="MiB",
        minimum=1,
        cost="so much disk",
    ),
    "trace_pages": Setting(
        "records, for every generated token, layer and KV head, which pages got the most attention, best "
        "first: this share of the context's pages; 0 records none. A selector's choices are recorded too",
        unit="share",
        minimum=0,
        maximum=1,
        whole=False,
        cost="every layer's attention weights are computed once more in each step; at 0.4, 1.6 bytes of disk "
        "for each page, layer and KV head of a step",
    ),
    "store": Setting(
        "directory of verified pages below the host tier, under any policy; with --hicache-storage-backend, "
        "the pages lie there and this directory takes what fails a check",
        process="both",
        cost="a copy of each page in host memory, a checksum per read and write, a file per page",
    ),
    "store_bytes": Setting(
        "size of the store beyond which its least recently used pages are deleted",
        unit="bytes",
        minimum=1,
        cost="so much disk, and a sixteenth more for each further server on the directory",
    ),
    "store_backends": Setting(
        "which --hicache-storage-backend, or backend of a tier, may hold the store's pages: 'tested' is "
        "file, 'any' takes those too that no test has run for real (docs/reliability.md)",
        choices=STORE_BACKENDS,
        process="launcher",
        cost="'any' trusts code that nobody has run here; wrong pages are still refused",
    ),
    "tiers": Setting(
        "TOML file of a chain of storage tiers that hold the pages of the store instead of its directory "
        "(docs/tier_chain.md)",
        cost="the bytes that the file gives each tier, for each rank; moves between them",
    ),
    "fetch_timeout_ms": Setting(
        "longest wait for the next page of the store; a slower one is computed",
        unit="ms",
        minimum=1,
        cost="so long may a request wait for a page before it is computed",
    ),
    "ledger": Setting(
        "directory of the ledger, which keeps from one start to the next what was learnt about prefixes and "
        "their reuse, or postgresql://user@host/database, where servers of several machines learn together; "
        "'auto' is the directory of the store, and none without a store; 'off' keeps nothing",
        process="both",
        cost="a thread of the scheduler, 64 MiB of queue, a file or a database with the token ids of prompts",
    ),
    "ledger_token_ids": Setting(
        "'on' keeps the token ids of prompts and answers in the ledger; 'off' keeps only digests of their "
        "pages: scores and reuse survive a restart, but nothing can be pre-warmed from the ledger",
        choices=SWITCHES,
        cost="'on' keeps the text of prompts on disk; 'off' costs pre-warms, and pins at a restart",
    ),
    "ledger_megabytes": Setting(
        "size of the ledger beyond which what is worth least is forgotten",
        unit="MiB",
        minimum=1,
        cost="up to three times as much disk",
    ),
    "prewarm": Setting(
        "'start' brings the most valuable prefixes of the ledger into free device memory when the server has "
        "started, 'idle' also whenever no request runs; 'off' leaves it to POST /kv_importance/prewarm. "
        "Under --kv-policy observe nothing is brought in unasked, beside several tokenizer workers nothing "
        "at all",
        choices=PREWARM,
        process="launcher",
        cost="a request waits for the rest of one step, about 50 ms; 'idle' computes whenever nobody asks",
    ),
    "prewarm_seconds": Setting(
        "longest time that one pre-warming may take",
        unit="s",
        minimum=1,
        process="launcher",
    ),
    "residency": Setting(
        "where the KV of running requests is: 'full' keeps all of it on the device, as sglang does; 'tiered' "
        "keeps it on the host, where --max-total-tokens counts, and reads it through a smaller cache of "
        "pages on the device",
        choices=RESIDENCY,
        cost="'tiered' copies pages to the device that are not there when a step reads them",
    ),
    "device_tokens": Setting(
        "device memory of tiered pages with all their tables, in tokens whose KV would fill it; below "
        "1, by their share of --max-total-tokens",
        unit="tokens or share",
        minimum=0,
        above_minimum=True,
        whole=False,
    ),
    "residency_policy": Setting(
        "which page leaves the device for one that a selector chose: the least recently read ('lru'; "
        "'bucketed_lru' with ages in powers of two), the least often chosen ('lfu'), the least often chosen "
        "of late ('ema'), or the one that was chosen for the least attention of late ('importance')",
        choices=RESIDENCY_POLICIES,
    ),
    "sparse_selector": Setting(
        "which pages of its context a generated token reads, of tiered pages: 'all', or those that the named "
        "selector estimates highest (docs/sparse.md), which may change answers",
        choices=SPARSE_SELECTORS,
        cost="but for 'all', 'window' and 'oracle': device memory for what the selector keeps of every page",
    ),
    "sparse_budget": Setting(
        "tokens that a query may read where a selector chooses, first and last ones of the context included; "
        "below 1, their share of the context",
        unit="tokens or share",
        minimum=0,
        above_minimum=True,
        whole=False,
    ),
    "sparse_prune": Setting(
        "reads fewer pages than the budget where the rest would matter little: 'topp:P' stops at a share P "
        "of the estimated attention, 'blasst:L' leaves out pages without a key of at least L times the "
        "largest estimated weight; 'none' uses the budget up",
    ),
    "sparse_min_context": Setting("a token with fewer before it reads all of them", unit="tokens", minimum=0),
    "sparse_prompt_tokens": Setting(
        "last tokens of a prompt, from the start of a page, that read chosen pages too; they enter no cache. "
        "At 0 all of a prompt is read exactly",
        unit="tokens",
        minimum=0,
    ),
    "sparse_dense_layers": Setting(
        "attention layers that read every page all the same, separated by commas",
        unit="layer index",
        minimum=0,
        cost="every step loads the whole context in each layer named, as far as it is not resident",
    ),
    "sparse_resident_bias": Setting(
        "a page on the device counts (1 + X)-fold when a selector chooses: fewer pages are loaded, and "
        "answers depend on what is on the device",
        unit="times",
        minimum=0,
        whole=False,
        cost="above 0 the same prompt may be answered with other tokens at another time",
    ),
    "sparse_audit_interval": Setting(
        "generated tokens from one audit of a request to the next: one layer's choice of pages is compared "
        "with exact attention; 0 for none",
        unit="generated tokens",
        minimum=0,
        cost="one layer of one step in N attends to its whole context on the host",
    ),
    "sparse_audit_missed_page": Setting(
        "an audit fails where a head has a larger share of its attention on one page that was not read: its "
        "layer's output becomes the exact one, and the request's budget doubles until an audit passes; at 1 "
        "none fails",
        unit="share",
        minimum=0,
        maximum=1,
        whole=False,
    ),
    "sparse_audit_confidence": Setting(
        "a token whose probability is less than this doubles the budget of those behind it, until one is "
        "surer; 0 for never",
        unit="probability",
        minimum=0,
        maximum=1,
        whole=False,
    ),
}

_OWN_KEYWORDS = {
    "policy",
    "residency",
    "residency_policy",
    "device_tokens",
    *(name for name in SETTINGS if "sparse" in name),
}
"""Options that are about KV, not about importance alone."""


def keyword(name: str) -> str:
    """An option's name among sglang's arguments: ``interval`` is ``kv_importance_interval``."""
    return f"kv_{name}" if name in _OWN_KEYWORDS else f"kv_importance_{name}"


def has_home(path: str) -> bool:
    """Whether a ``~`` at the start of a path, if there is one, stands for somebody's home."""
    try:
        Path(path).expanduser()
    except RuntimeError:  # as pathlib says it
        return False
    return True


def flag(name: str) -> str:
    """An option's flag on the command line."""
    return "--" + keyword(name).replace("_", "-")

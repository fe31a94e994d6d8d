"""Which attention is observed, and how long it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sgl_importance.options.setting import option

AttentionFactor = Literal["off", "on", "shuffled"]


@dataclass(frozen=True, slots=True)
class SignalOptions:
    """Page scores: when they are taken, from which tokens, and how they age."""

    g: AttentionFactor = option(
        "off",
        help="'on' lets page scores move the ranking, by a factor g: a loss on every model that was measured "
        "(docs/evidence/attention.md), here for measuring another; 'shuffled' gives each node the factor of "
        "another, its control arm",
        choices=get_args(AttentionFactor),
    )
    interval: int = option(
        8,
        help="decode steps from one emitting step to the next; the first of a request always emits",
        unit="decode steps",
        minimum=1,
        cost="page scores in one of so many decode steps of a request: half of it doubles that work",
    )
    layers: tuple[int, ...] = option(
        (),
        help="attention layers that emit; 'auto' leaves the choice to the producer. The laboratory's "
        "'sgl-importance layers' finds those of a model that look at an answer",
        unit="layer index",
        minimum=0,
        cost="page scores in each layer named",
    )
    window: int = option(
        32,
        help="last prompt tokens whose attention is observed at prefill",
        unit="tokens",
        minimum=1,
        cost="page scores of so many tokens per prefill; on a CPU they are computed when the request ends",
    )
    sink_tokens: int = option(
        4, help="first tokens of a sequence that are left out of its scores", unit="tokens", minimum=0
    )
    local_tokens: int = option(
        16, help="last tokens before the query that are left out of its scores", unit="tokens", minimum=0
    )
    half_life_queries: float = option(
        32.0,
        help="visits of a node after which the weight of a query has halved",
        unit="queries",
        minimum=0,
        above_minimum=True,
        whole=False,
    )


TraceDetail = Literal["folds", "steps"]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is recorded, and where."""

    directory: str = option(
        "",
        help="directory to record requests, page scores and tree events in",
        flag="--kv-importance-trace",
        is_path=True,
        cost="scheduler time for digests and copies, a thread, disk",
    )
    detail: TraceDetail = option(
        "folds",
        help="'folds' records what is handed to the tree, 'steps' also the page scores of each emitting step",
        choices=get_args(TraceDetail),
        cost="'steps' makes recordings larger, and a first token waits for its prefill's page scores",
    )
    megabytes: int = option(
        1024,
        help="size of a recording beyond which its oldest part is deleted",
        unit="MiB",
        minimum=1,
        cost="so much disk",
    )
    pages: float = option(
        0.0,
        help="records, for every generated token, layer and KV head, which pages got the most attention, "
        "best first: this share of the context's pages; 0 records none. A selector's choices are recorded "
        "too",
        unit="share",
        minimum=0,
        maximum=1,
        whole=False,
        cost="every layer's attention weights are computed once more in each step; at 0.4, 1.6 bytes of disk "
        "for each page, layer and KV head of a step",
    )


@dataclass(frozen=True, slots=True)
class MissOptions:
    """How long the server remembers what its cache has held."""

    memory: float = option(
        4.0,
        help="KV that the server remembers after its cache has given it up, to tell why a prompt was not "
        "found, in sizes of the device pool and up to 262,144 pages; 0 keeps no account",
        unit="device pools",
        minimum=0,
        whole=False,
        cost="eight bytes of scheduler memory for each token that is held or remembered, and scheduler time "
        "for each request (benchmark/misses.py)",
    )

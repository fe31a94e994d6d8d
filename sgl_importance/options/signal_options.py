"""Which attention is observed, and how long it counts."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.options.setting import option


@dataclass(frozen=True, slots=True)
class SignalOptions:
    """Page scores: when they are taken, from which tokens, and how they age."""

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

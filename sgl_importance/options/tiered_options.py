"""Tiered pages: KV on the host, read through a smaller cache on the device, whole or by choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sgl_importance.options.setting import option

Residency = Literal["full", "tiered"]
SparseSelector = Literal["all", "bits", "token", "oracle", "quest", "infllm", "mean", "window"]

SPARSE_SELECTORS: tuple[SparseSelector, ...] = get_args(SparseSelector)
CONTROL_SELECTORS: tuple[SparseSelector, ...] = ("oracle", "quest", "infllm", "mean", "window")
"""Of the laboratory."""


@dataclass(frozen=True, slots=True)
class TieredOptions:
    """Where the KV of running requests is."""

    residency: Residency = option(
        "full",
        help="where the KV of running requests is: 'full' keeps all of it on the device, as sglang does; "
        "'tiered' keeps it on the host, where --max-total-tokens counts, and reads it through a smaller "
        "cache of pages on the device",
        flag="--kv-residency",
        choices=get_args(Residency),
        cost="'tiered' copies pages to the device that are not there when a step reads them",
    )
    device_tokens: float = option(
        1 / 16,
        help="device memory of tiered pages with all their tables, in tokens whose KV would fill it; below "
        "1, by their share of --max-total-tokens",
        flag="--kv-device-tokens",
        unit="tokens or share",
        minimum=0,
        above_minimum=True,
        whole=False,
    )


@dataclass(frozen=True, slots=True)
class SparseOptions:
    """Which of its pages a step reads."""

    selector: SparseSelector = option(
        "all",
        help="which pages of its context a generated token reads, of tiered pages: 'all', or those with the "
        "largest estimated logits, which may change answers: by a few bits of every key ('bits') or by "
        "eight of each number ('token'); the others are control arms of experiments",
        flag="--kv-sparse-selector",
        choices=SPARSE_SELECTORS,
        replaced={"rep": "bits"},
        cost="device memory for what the selector keeps of every page: 'bits' 7 % of its KV in 16 bits, "
        "'token' 25 %",
    )
    budget: float = option(
        2048.0,
        help="tokens that a query may read where a selector chooses, first and last ones of the context "
        "included; below 1, their share of the context",
        flag="--kv-sparse-budget",
        unit="tokens or share",
        minimum=0,
        above_minimum=True,
        whole=False,
    )
    min_context: int = option(
        1024,
        help="a token with fewer before it reads all of them",
        flag="--kv-sparse-min-context",
        unit="tokens",
        minimum=0,
    )
    prompt_tokens: int = option(
        0,
        help="last tokens of a prompt, from the start of a page, that read chosen pages too; they enter no "
        "cache. At 0 all of a prompt is read exactly",
        flag="--kv-sparse-prompt-tokens",
        unit="tokens",
        minimum=0,
    )

"""Golden cases: what is done to a producer or an accumulator, and what it must say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_importance.interface import Importance, SignalKind

Floats = npt.NDArray[np.float32]

PRODUCER_FILE = "producer.json"
CONSUMER_FILE = "consumer.json"


@dataclass(frozen=True, slots=True)
class ProducerCase:
    """Attention inputs of the last query tokens of one sequence.

    Values of ``q`` and ``k`` are multiples of 1/64 below 4, so that half precision holds them exactly.

    Attributes:
        name: what the case is about.
        q: queries by sampled layer, after positional encoding, float32 [layers, num_q, heads, head_dim]; the
            query tokens are the last ``num_q`` of the sequence.
        k: keys by sampled layer, float32 [layers, kv_len, kv_heads, head_dim].
        scale: factor on the dot product.
        logit_cap: soft cap of the scaled logits; 0 means none.
        page_size: tokens per page.
        sink_tokens: S of the specification.
        local_tokens: R of the specification.
        mass, body_mass, peak: what the definition gives, float32 [num_pages].
    """

    name: str
    q: Floats
    k: Floats
    scale: float
    logit_cap: float
    page_size: int
    sink_tokens: int
    local_tokens: int
    mass: Floats
    body_mass: Floats
    peak: Floats


@dataclass(frozen=True, slots=True)
class Observed:
    """One query's scores of its context, per page of the sequence from page 0 on, float32.

    Attributes:
        body_mass: sums to at most 1; the accumulator normalises it, and folds nothing where it is all 0.
        peak: in [0, 1].
    """

    body_mass: Floats
    peak: Floats


@dataclass(frozen=True, slots=True)
class ServedQuery:
    """One request from its prefill to its finish.

    Attributes:
        prompt: token ids; whole pages of them are in the cache from the end of the prefill on.
        generated: token ids that follow; whole pages of the sequence are in the cache after the finish.
        extra_key, cache_salt: namespace of its pages.
        prefill: folded at the end of the prefill, into the pages of the prompt; None folds nothing.
        decode: folded at the finish, into the pages of prompt and answer; None folds nothing.
    """

    prompt: list[int]
    generated: list[int]
    extra_key: str | None
    cache_salt: str | None
    prefill: Observed | None
    decode: Observed | None


@dataclass(frozen=True, slots=True)
class Evict:
    """Every page leaves every tier; what is known of it stays known."""


@dataclass(frozen=True, slots=True)
class Ask:
    """``get_importance(key)`` must answer ``expected``."""

    key: bytes
    expected: Importance | None


Step = ServedQuery | Evict | Ask


@dataclass(frozen=True, slots=True)
class ConsumerCase:
    """A history that an empty accumulator goes through.

    Attributes:
        name: what the case is about.
        page_size: tokens per page.
        half_life_queries: as in the specification.
        ghost_pages: evicted pages that must be remembered.
        steps: what happens, in order.
    """

    name: str
    page_size: int
    half_life_queries: float
    ghost_pages: int
    steps: list[Step]


@cache
def producer_cases() -> list[ProducerCase]:
    return [
        ProducerCase(**{**row, **{name: _floats(row[name]) for name in _VECTORS}})
        for row in _read(PRODUCER_FILE)
    ]


@cache
def consumer_cases() -> list[ConsumerCase]:
    return [ConsumerCase(**{**row, "steps": list(map(_step, row["steps"]))}) for row in _read(CONSUMER_FILE)]


_VECTORS = ("q", "k", "mass", "body_mass", "peak")


def _read(name: str) -> list[dict[str, Any]]:
    document = json.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))
    cases: list[dict[str, Any]] = document["cases"]
    return cases


def _step(row: dict[str, Any]) -> Step:
    match row["do"]:
        case "serve":
            return ServedQuery(
                prompt=row["prompt"],
                generated=row["generated"],
                extra_key=row["extra_key"],
                cache_salt=row["cache_salt"],
                prefill=_observed(row["prefill"]),
                decode=_observed(row["decode"]),
            )
        case "evict":
            return Evict()
        case "ask":
            expected = row["expected"]
            if expected is not None:
                expected = Importance(**{**expected, "kind": SignalKind(expected["kind"])})
            return Ask(bytes.fromhex(row["key"]), expected)
        case unknown:
            raise ValueError(f"no such step: {unknown}")


def _observed(row: dict[str, Any] | None) -> Observed | None:
    return None if row is None else Observed(_floats(row["body_mass"]), _floats(row["peak"]))


def _floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float32)

"""What the operator chose: one frozen record, carried from the launcher into every scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

KvPolicy = Literal["default", "observe", "importance"]
ImportanceG = Literal["auto", "off"]

KV_POLICIES: tuple[KvPolicy, ...] = get_args(KvPolicy)
IMPORTANCE_G: tuple[ImportanceG, ...] = get_args(ImportanceG)


@dataclass(frozen=True, slots=True)
class ImportanceOptions:
    """Options of the importance signal and of the policy that consumes it.

    Attributes:
        policy: ``default`` (stock), ``observe`` (stock evictions, ours only reported) or ``importance``.
        source: producer of the scores; ``auto`` picks the one that fits the attention backend.
        interval: decode steps between two emitting steps; the first decode step always emits.
        layers: indices of the sampled attention layers; empty means chosen by the producer.
        window: last prompt tokens whose attention is observed at prefill, in tokens.
        sink_tokens: first tokens of a sequence that are left out of the body mass, in tokens.
        local_tokens: last tokens before the query that are left out of the body mass, in tokens.
        half_life_queries: visits of a node after which a query's weight has halved, in queries.
        g: ``auto`` lets importance move the ranking, ``off`` fixes its factor at 1 (a control arm).
    """

    policy: KvPolicy = "default"
    source: str = "auto"
    interval: int = 8
    layers: tuple[int, ...] = ()
    window: int = 32
    sink_tokens: int = 4
    local_tokens: int = 16
    half_life_queries: float = 32.0
    g: ImportanceG = "auto"

    def __post_init__(self) -> None:
        problems = []
        if self.policy not in KV_POLICIES:
            problems.append(f"policy must be one of {', '.join(KV_POLICIES)}, not {self.policy!r}")
        if self.g not in IMPORTANCE_G:
            problems.append(f"g must be one of {', '.join(IMPORTANCE_G)}, not {self.g!r}")
        if self.interval < 1:
            problems.append(f"interval must be at least 1 decode step, not {self.interval}")
        if any(layer < 0 for layer in self.layers):
            problems.append(f"layers must be indices from 0 on, not {self.layers}")
        if self.window < 1:
            problems.append(f"window must be at least 1 token, not {self.window}")
        if self.sink_tokens < 0:
            problems.append(f"sink_tokens must not be negative, not {self.sink_tokens}")
        if self.local_tokens < 0:
            problems.append(f"local_tokens must not be negative, not {self.local_tokens}")
        if not self.half_life_queries > 0:
            problems.append(f"half_life_queries must be positive, not {self.half_life_queries}")
        if problems:
            raise ValueError("; ".join(problems))

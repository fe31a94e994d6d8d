"""A whole decode step without a model: a stack of attention layers, of which few are sampled, in few steps.

What a server's step does beside attention is left out, so the ratio is above that of a real step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from decode_shape import LAYERS, Inputs
from timing import Step, captured

from sgl_importance_kernels.triton.logit_reduction import DecodeLogits, ObservedLogits, reduce_logits

INTERVAL = 8  # Decode steps from one observation of a request to its next, the server's default.


@dataclass(frozen=True)
class Depth:
    """Layers of the stack and the indices of the sampled ones; layer i has the keys of pool i % LAYERS."""

    layers: int
    sampled: tuple[int, ...]

    def __post_init__(self) -> None:
        # So that the rows are those of the definition over every pool.
        assert sorted(layer % LAYERS for layer in self.sampled) == list(range(LAYERS))


DEFAULT_DEPTH = Depth(32, (16, 21, 26, 31))
DRY_DEPTH = Depth(5, (1, 2, 3, 4))


class Attention(Protocol):
    """One layer of decode attention, stock's and ours."""

    emitted: DecodeLogits
    starts: torch.Tensor

    def run_stock(self, pool: int) -> None: ...

    def run_ours(self, pool: int, index: int | None) -> None: ...


class DecodeStack:
    """Steps through a stack; ours as one graph that serves every step, whomever it observes."""

    def __init__(self, attention: Attention, inputs: Inputs, depth: Depth, body: dict[str, int]) -> None:
        self._attention = attention
        self._inputs = inputs
        self._depth = depth
        self._body = body
        self.rows = inputs.rows()
        batch = inputs.shape.batch
        self._everybody = self._observation(list(range(batch)))
        self._shares = [self._observation(list(range(step, batch, INTERVAL))) for step in range(INTERVAL)]
        self._nobody = self._observation([])
        self._gate = torch.ones(1, dtype=torch.int32, device=inputs.device)
        on_device = inputs.device != "cpu"
        make: Callable[[Step], Step] = captured if on_device else lambda step: step
        self._name(self._nobody)
        self._stock = make(self._stock_layers)
        self._ours = make(self._our_layers)

    def _stock_layers(self) -> None:
        for layer in range(self._depth.layers):
            self._attention.run_stock(layer % LAYERS)

    def _our_layers(self) -> None:
        for layer in range(self._depth.layers):
            sampled = layer in self._depth.sampled
            index = self._depth.sampled.index(layer) if sampled else None
            self._attention.run_ours(layer % LAYERS, index)

    def _observation(self, requests: list[int]) -> tuple[torch.Tensor, ObservedLogits | None]:
        """Starts of the batch, and what the reduction is handed."""
        shape = self._inputs.shape
        int32 = {"dtype": torch.int32, "device": self._inputs.device}
        starts = torch.full((shape.batch,), -1, **int32)
        if not requests:
            return starts, None
        chosen = torch.tensor(requests, **int32)
        places = torch.arange(len(requests), **int32) * shape.context
        starts[chosen.long()] = places
        lengths = torch.full_like(chosen, shape.context)
        return starts, ObservedLogits(starts=places, seq_lens=lengths, batch_rows=chosen, slots=chosen)

    def _name(self, observation: tuple[torch.Tensor, ObservedLogits | None]) -> None:
        self._attention.starts.copy_(observation[0])

    def _reduce(self, observation: tuple[torch.Tensor, ObservedLogits | None]) -> None:
        if observation[1] is None:
            return
        settings: dict[str, Any] = {"page_size": self._inputs.shape.page_size, **self._body}
        reduce_logits(
            self._attention.emitted,
            observation[1],
            self.rows,
            gate=self._gate,
            max_seq_len=self._inputs.shape.context,
            log_sums_in_base_2=True,
            **settings,
        )

    def stock(self) -> None:
        """``INTERVAL`` steps of stock."""
        for _ in range(INTERVAL):
            self._stock()

    def unobserved(self) -> None:
        """As many of ours that observe nobody."""
        self._name(self._nobody)
        for _ in range(INTERVAL):
            self._ours()

    def together(self) -> None:
        """As many, the first of which observes every request."""
        self._name(self._everybody)
        self._ours()
        self._reduce(self._everybody)
        self._name(self._nobody)
        for _ in range(INTERVAL - 1):
            self._ours()

    def in_turns(self) -> None:
        """As many, each of which observes its share of the requests, as requests that came one by one do."""
        for share in self._shares:
            self._name(share)
            self._ours()
            self._reduce(share)

    def arms(self) -> dict[str, Step]:
        return {
            "whole step, stock": self.stock,
            "whole step, unobserved": self.unobserved,
            "whole step, together": self.together,
            "whole step, in turns": self.in_turns,
        }

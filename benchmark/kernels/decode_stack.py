"""A whole decode step without a model: a stack of attention layers, of which few are sampled, in few steps.

What a server's step does beside attention is left out, so a ratio to stock's is above that of a real step:
``model_step`` says by how much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

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

    def index_of(self, layer: int) -> int | None:
        """Index of a layer among the sampled ones; None where it is not sampled."""
        return self.sampled.index(layer) if layer in self.sampled else None


DEFAULT_DEPTH = Depth(32, (16, 21, 26, 31))
DRY_DEPTH = Depth(5, (1, 2, 3, 4))


class Attention(Protocol):
    """One layer of decode attention, stock's and ours."""

    emitted: DecodeLogits
    starts: torch.Tensor

    def run_stock(self, pool: int) -> None: ...

    def run_ours(self, pool: int, index: int | None) -> None: ...


Observation = TypeVar("Observation")


class ObservedSteps(ABC, Generic[Observation]):
    """Steps of one graph that serves them all, whomever it observes, beside stock's.

    Args:
        inputs: of the step.
        at_once: requests that one step can observe.
    """

    def __init__(self, inputs: Inputs, at_once: int) -> None:
        self._inputs = inputs
        self.rows = inputs.rows()
        self._gate = torch.ones(1, dtype=torch.int32, device=inputs.device)
        batch = inputs.shape.batch
        first = [list(range(start, min(start + at_once, batch))) for start in range(0, batch, at_once)]
        assert len(first) <= INTERVAL, (batch, at_once)
        self._together = [self.observation(requests) for requests in first]
        shares = [list(range(step, batch, INTERVAL)) for step in range(INTERVAL)]
        assert max(map(len, shares)) <= at_once, (batch, at_once)
        self._shares = [self.observation(share) for share in shares]
        self._nobody = self.observation([])
        make: Callable[[Step], Step] = captured if inputs.device != "cpu" else lambda step: step
        self.name(self._nobody)
        self._stock = make(self.stock_layers)
        self._ours = make(self.our_layers)

    @abstractmethod
    def stock_layers(self) -> None:
        """One step of stock's."""

    @abstractmethod
    def our_layers(self) -> None:
        """One step of ours, which observes those that were named."""

    @abstractmethod
    def observation(self, requests: list[int]) -> Observation:
        """These requests of the batch, as ``name`` and ``reduce`` take them."""

    @abstractmethod
    def name(self, observation: Observation) -> None:
        """Names whom the next steps observe."""

    @abstractmethod
    def reduce(self, observation: Observation) -> None:
        """Adds the scores of the last step to the rows."""

    def stock(self) -> None:
        """``INTERVAL`` steps of stock."""
        for _ in range(INTERVAL):
            self._stock()

    def unobserved(self) -> None:
        """As many of ours that observe nobody."""
        self.name(self._nobody)
        for _ in range(INTERVAL):
            self._ours()

    def together(self) -> None:
        """As many, the first of which observe every request: one where it has room for all."""
        self._observing(self._together)
        self.name(self._nobody)
        for _ in range(INTERVAL - len(self._together)):
            self._ours()

    def in_turns(self) -> None:
        """As many, each of which observes its share of the requests, as requests that came one by one do."""
        self._observing(self._shares)

    def _observing(self, observations: list[Observation]) -> None:
        for observation in observations:
            self.name(observation)
            self._ours()
            self.reduce(observation)


class DecodeStack(ObservedSteps["tuple[torch.Tensor, ObservedLogits | None]"]):
    """Steps through a stack of attention layers that decode through the variant."""

    def __init__(self, attention: Attention, inputs: Inputs, depth: Depth, body: dict[str, int]) -> None:
        self._attention = attention
        self._depth = depth
        self._body = body
        super().__init__(inputs, inputs.shape.batch)

    def stock_layers(self) -> None:
        for layer in range(self._depth.layers):
            self._attention.run_stock(layer % LAYERS)

    def our_layers(self) -> None:
        for layer in range(self._depth.layers):
            self._attention.run_ours(layer % LAYERS, self._depth.index_of(layer))

    def observation(self, requests: list[int]) -> tuple[torch.Tensor, ObservedLogits | None]:
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

    def name(self, observation: tuple[torch.Tensor, ObservedLogits | None]) -> None:
        self._attention.starts.copy_(observation[0])

    def reduce(self, observation: tuple[torch.Tensor, ObservedLogits | None]) -> None:
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

    def arms(self) -> dict[str, Step]:
        return {
            "whole step, stock": self.stock,
            "whole step, unobserved": self.unobserved,
            "whole step, together": self.together,
            "whole step, in turns": self.in_turns,
        }

"""Whole decode steps of stock attention with qk-probe behind sampled layers, as the producer captures it."""

from __future__ import annotations

from typing import Any

import torch
from decode_shape import LAYERS, Inputs
from decode_stack import INTERVAL, Attention, Depth, ObservedSteps
from timing import Step

from sgl_importance_kernels.triton.log_sums import LogSums
from sgl_importance_kernels.triton.page_reduction import reduce_log_sums
from sgl_importance_kernels.triton.paged_queries import PagedQueries, observed_at_once
from sgl_importance_kernels.triton.qk_probe import probe_layer


class ProbeStack(ObservedSteps[PagedQueries]):
    """The probe is in the graph of every step, over static buffers that name whom it observes."""

    def __init__(self, attention: Attention, inputs: Inputs, depth: Depth, body: dict[str, int]) -> None:
        self._attention = attention
        self._depth = depth
        self._settings: dict[str, Any] = {"page_size": inputs.shape.page_size, **body}
        at_once = observed_at_once(inputs.shape.batch, INTERVAL)
        queries = inputs.queries()
        self._named = queries.only(list(range(at_once)))
        self.log_sums = LogSums(
            num_layers=LAYERS,
            max_requests=at_once,
            max_queries=1,
            num_heads=inputs.shape.heads,
            max_pages=inputs.max_pages,
            device=inputs.device,
        )
        super().__init__(inputs, at_once)

    def stock_layers(self) -> None:
        for layer in range(self._depth.layers):
            self._attention.run_stock(layer % LAYERS)

    def our_layers(self) -> None:
        for layer in range(self._depth.layers):
            pool = layer % LAYERS
            self._attention.run_stock(pool)
            index = self._depth.index_of(layer)
            if index is not None:
                probe_layer(
                    self._inputs.q[pool],
                    self._inputs.k[pool],
                    self._named,
                    self.log_sums,
                    index,
                    gate=self._gate,
                    scale=self._inputs.shape.scale,
                    **self._settings,
                )

    def observation(self, requests: list[int]) -> PagedQueries:
        return self._inputs.queries().only(requests)

    def name(self, observation: PagedQueries) -> None:
        count = observation.num_requests
        self._named.num_queries.zero_()
        for numbers in ("location_starts", "seq_lens", "first_query_rows", "num_queries", "slots"):
            target: torch.Tensor = getattr(self._named, numbers)
            target[:count] = getattr(observation, numbers)

    def reduce(self, observation: PagedQueries) -> None:
        if observation.num_requests:
            reduce_log_sums(self.log_sums, observation, self.rows, gate=self._gate, **self._settings)

    def arms(self) -> dict[str, Step]:
        return {
            "whole step, qk-probe, unobserved": self.unobserved,
            "whole step, qk-probe, together": self.together,
            "whole step, qk-probe, in turns": self.in_turns,
        }

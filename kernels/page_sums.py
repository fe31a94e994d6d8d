"""Sums of attention probabilities over pages, for layers and query tokens of one forward pass."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from sgl_importance_kernels import compiled
from sgl_importance_kernels.page_rows import EMPTY_BODY


class PageSums(Protocol):
    """Mass and peak of pages over all query tokens, and the body of each; all float32.

    Args:
        num_q: query tokens.
        num_pages: pages of the sequence.
        page_size: tokens per page.
        body_start: first token of the body.
    """

    def __init__(self, *, num_q: int, num_pages: int, page_size: int, body_start: int) -> None: ...

    def add(self, probabilities: torch.Tensor, first_token: int, first_body_end: int) -> None:
        """Adds one layer of some query tokens.

        Args:
            probabilities: 0 where a token sees nothing; float32 [num_heads, tokens, num_pages * page_size].
            first_token: number of the first of these tokens.
            first_body_end: first column behind its body; each next token's is one further.
        """

    def normalised(self, num_layers: int) -> torch.Tensor:
        """Means over layers, normalised bodies: mass, body mass and peak; float32 [3, num_pages]."""


class EagerPageSums:
    """``PageSums`` in torch, on any device."""

    def __init__(
        self, *, num_q: int, num_pages: int, page_size: int, body_start: int, device: torch.device | str
    ) -> None:
        self._num_pages, self._page_size, self._body_start = num_pages, page_size, body_start
        self._mass = torch.zeros(num_pages, device=device)
        self._peak = torch.zeros(num_pages, device=device)
        self._body = torch.zeros(num_q, num_pages, device=device)

    def add(self, probabilities: torch.Tensor, first_token: int, first_body_end: int) -> None:
        per_head = self._pages_of(probabilities)
        self._mass += per_head.sum(dim=1).mean(dim=0)
        self._peak = torch.maximum(self._peak, per_head.amax(dim=(0, 1)))

        _, num_tokens, num_columns = probabilities.shape
        column = torch.arange(num_columns, device=probabilities.device)
        body_end = first_body_end + torch.arange(num_tokens, device=probabilities.device)
        outside = (column < self._body_start) | (column >= body_end[:, None])
        body = self._pages_of(probabilities.mean(dim=0).masked_fill_(outside, 0.0))
        self._body[first_token : first_token + num_tokens] += body

    def normalised(self, num_layers: int) -> torch.Tensor:
        body = self._body / num_layers
        total = body.sum(dim=-1, keepdim=True)
        body = torch.where(total > EMPTY_BODY, body / total, torch.zeros_like(body))
        return torch.stack((self._mass / num_layers, body.sum(dim=0), self._peak))

    def _pages_of(self, token_values: torch.Tensor) -> torch.Tensor:
        if self._page_size == 1:
            return token_values
        by_page: torch.Tensor = token_values.unflatten(-1, (self._num_pages, self._page_size))
        return by_page.sum(dim=-1)


class CompiledPageSums:
    """On a CPU, where a pass of eager torch per quantity and the calls themselves cost more than the sums."""

    def __init__(self, *, num_q: int, num_pages: int, page_size: int, body_start: int) -> None:
        self._page_size, self._body_start = page_size, body_start
        sums = np.zeros((2 + num_q, num_pages), dtype=np.float32)
        self._mass, self._peak, self._body = sums[0], sums[1], sums[2:]

    def add(self, probabilities: torch.Tensor, first_token: int, first_body_end: int) -> None:
        body = self._body[first_token : first_token + probabilities.shape[1]]
        compiled.add_probabilities(
            probabilities.numpy(),
            self._page_size,
            self._body_start,
            first_body_end,
            self._mass,
            self._peak,
            body,
        )

    def add_queries(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        locations: torch.Tensor,
        *,
        local_tokens: int,
        scale: float,
        logit_cap: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Adds one layer of all query tokens, from the keys where they lie.

        Args:
            queries: float32 [num_q, num_heads, head_dim].
            keys: the pool; float32 [slots, num_kv_heads, head_dim].
            locations: slot of each token of the sequence; int32 [seq_len].
            local_tokens: last tokens seen by a query token, itself included, outside its body.
            scale: factor on the dot product.
            logit_cap: soft cap of the scaled logits; 0 means none.
            sinks: learnt logit of each query head that takes part in its softmax, any float dtype,
                [num_heads]; None where the layer has none.
        """
        if sinks is None:
            sinks = torch.full((queries.shape[1],), float("-inf"))
        add = compiled.add_query if len(queries) == 1 else compiled.add_queries
        add(
            queries.numpy(),
            keys.numpy(),
            locations.numpy(),
            sinks.float().numpy(),
            scale,
            logit_cap,
            self._page_size,
            self._body_start,
            local_tokens,
            self._mass,
            self._peak,
            self._body,
        )

    def normalised(self, num_layers: int) -> torch.Tensor:
        return torch.from_numpy(
            compiled.normalised(self._mass, self._peak, self._body, num_layers, EMPTY_BODY)
        )

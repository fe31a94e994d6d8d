"""Log-sums of exponentials per page: what a pass over the keys leaves behind for the reduction."""

from __future__ import annotations

import torch

SINK_BORDER, QUERY_BORDER = 0, 1
BORDERS = 2
CONTROLS = 3  # Gate, sink tokens and local tokens, for kernels that can be handed nothing but this buffer.


class LogSums:
    """Static buffer of page log-sums, one row per sampled layer, query token and query head.

    Entry b of a row is ``log(sum(exp(logit)))`` over the tokens of page b that the query token sees, -inf
    where it sees none: 4 bytes per page and head where raw logits would be ``4 * page_size``. A page that the
    body covers only in part needs a second number, the log-sum over its body tokens. A query token has at
    most two such pages, the one where the sinks end and the one where its neighbourhood begins, so they lie
    behind the pages: entry ``max_pages + SINK_BORDER`` and ``max_pages + QUERY_BORDER``. What was not written
    by the pass at hand is never read. The last entries of the first row of a layer tell a decode kernel of
    upstream what it cannot be told otherwise (``score_mod`` takes one tensor): see ``set_controls``.

    Args:
        num_layers: sampled layers.
        max_requests: requests of a launch.
        max_queries: query tokens per request and launch.
        num_heads: query heads of this rank.
        max_pages: pages of the longest sequence.
        device: where attention runs.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        max_requests: int,
        max_queries: int,
        num_heads: int,
        max_pages: int,
        device: torch.device | str,
    ) -> None:
        self.max_requests = max_requests
        self.max_queries = max_queries
        self.max_pages = max_pages
        shape = (num_layers, max_requests * max_queries, num_heads, max_pages + BORDERS + CONTROLS)
        self.values = torch.empty(shape, dtype=torch.float32, device=device)
        # Over all pages and over the body: what probabilities are divided by.
        self.totals = torch.empty((*shape[:3], 2), dtype=torch.float32, device=device)

    def set_controls(self, *, gate: bool, sink_tokens: int, local_tokens: int) -> None:
        """Sets what ``score_mod`` reads from the buffer itself; before the step, outside a graph."""
        controls = torch.tensor([float(gate), sink_tokens, local_tokens], dtype=torch.float32)
        self.values[:, 0, 0, -CONTROLS:] = controls.to(self.values.device, non_blocking=True)

    @property
    def num_layers(self) -> int:
        return int(self.values.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.values.shape[2])

    @property
    def num_bytes(self) -> int:
        return 4 * (self.values.numel() + self.totals.numel())

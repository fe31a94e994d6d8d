"""Log-sums of exponentials per page: what a pass over the keys leaves behind for the reduction."""

from __future__ import annotations

import torch

SINK_BORDER, QUERY_BORDER = 0, 1
BORDERS = 2
TOTALS = 2  # Of a head, over all pages and over the body: what probabilities are divided by.


def bytes_per_query(num_layers: int, num_heads: int, max_pages: int) -> int:
    """What ``LogSums`` takes for one query token of a request of ``max_pages`` pages, at most."""
    return 4 * (num_layers * num_heads * (max_pages + BORDERS + TOTALS) + 2 * max_pages)


class LogSums:
    """Static buffer of page log-sums, one row per sampled layer, query token and query head.

    Entry b of a row is ``log(sum(exp(logit)))`` over the tokens of page b that the query token sees, -inf
    where it sees none: 4 bytes per page and head where raw logits would be ``4 * page_size``. A page that the
    body covers only in part needs a second number, the log-sum over its body tokens. A query token has at
    most two such pages, the one where the sinks end and the one where its neighbourhood begins, so they lie
    behind the pages: entry ``max_pages + SINK_BORDER`` and ``max_pages + QUERY_BORDER``. What was not written
    by the pass at hand is never read.

    Args:
        num_layers: sampled layers.
        max_requests: requests of a launch.
        max_queries: query tokens per request and launch.
        num_heads: query heads of this rank.
        max_pages: pages of the longest sequence.
        device: where attention runs.
        header_floats: room before the first row of every layer, see ``DecodeLogSums``.
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
        header_floats: int = 0,
    ) -> None:
        self.max_requests = max_requests
        self.max_queries = max_queries
        self.max_pages = max_pages
        width = max_pages + BORDERS
        header_rows = -(-header_floats // (num_heads * width))
        rows = max_requests * max_queries
        float32 = {"dtype": torch.float32, "device": device}
        self.storage = torch.empty((num_layers, header_rows + rows, num_heads, width), **float32)
        self.values = self.storage[:, header_rows:]
        self.totals = torch.empty((num_layers, rows, num_heads, TOTALS), **float32)
        # Body and peak of each query token, on their way to the row of its request; None where it is alone.
        self.partials = torch.empty((rows, 2, max_pages), **float32) if max_queries > 1 else None

    @property
    def num_layers(self) -> int:
        return int(self.values.shape[0])

    @property
    def num_heads(self) -> int:
        return int(self.values.shape[2])

    @property
    def num_bytes(self) -> int:
        partials = 0 if self.partials is None else self.partials.numel()
        return 4 * (self.storage.numel() + self.totals.numel() + partials)


class DecodeLogSums(LogSums):
    """Log-sums of one decode step, for a kernel that can be handed nothing but one tensor per layer.

    A batch has many requests and a step observes few of them, so rows belong to the observed ones. The header
    of each layer tells the kernel which: sink tokens, local tokens, and for every request of the batch its
    row counted from the start of ``aux(layer)``, 0 where the request is not observed.

    Args:
        max_observed: requests that one step can observe.
        max_batch: requests of a batch, padding included.
        sink_tokens, local_tokens: as for the reduction.
    """

    SETTINGS = 2

    def __init__(
        self,
        *,
        num_layers: int,
        max_observed: int,
        max_batch: int,
        num_heads: int,
        max_pages: int,
        sink_tokens: int,
        local_tokens: int,
        device: torch.device | str,
    ) -> None:
        super().__init__(
            num_layers=num_layers,
            max_requests=max_observed,
            max_queries=1,
            num_heads=num_heads,
            max_pages=max_pages,
            device=device,
            header_floats=self.SETTINGS + max_batch,
        )
        self.first_row = self.storage.shape[1] - max_observed
        assert self.storage.shape[1] < 1 << 24, "rows are float32 in the header"
        header = self.storage[:, : self.first_row].flatten(1)[:, : self.SETTINGS + max_batch]
        header.zero_()
        header[:, 0] = sink_tokens
        header[:, 1] = local_tokens
        self._table = header[:, self.SETTINGS :]

    def aux(self, layer: int) -> torch.Tensor:
        """The tensor that ``score_mod`` is handed for a layer, float32 [any, num_heads, max_pages + 2]."""
        return self.storage[layer]

    def observe(self, rows: torch.Tensor) -> None:
        """Names the observed requests of the next step; on the stream that attention runs on.

        Args:
            rows: index of each request of the batch among the observed ones, -1 where it is not observed,
                int32 [max_batch] on the device.
        """
        self._table.copy_(torch.where(rows >= 0, rows + self.first_row, 0))

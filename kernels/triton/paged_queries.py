"""The query tokens that one launch scores, and where the keys that they see lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

MIN_OBSERVED = 16
"""Requests that a step can observe whatever the interval is: those of a small batch came together, often."""


def observed_at_once(batch: int, interval: int) -> int:
    """Requests of a batch that one step can observe.

    Of requests that came at different times, ``batch / interval`` are due in a step. Where more are, the
    others are observed in the steps behind it.
    """
    return min(batch, max(MIN_OBSERVED, -(-batch // interval)))


@dataclass(frozen=True, slots=True)
class PagedQueries:
    """Some last tokens of each of several sequences, as index tensors on the device of the keys.

    The token at position i of request r has its key at row ``locations[location_starts[r] + i]`` of the key
    buffer; a request table ``[slots, max_context]`` is such a ``locations`` when flattened, and so are the
    concatenated ``kv_indices`` of a paged wrapper. All tensors may be static buffers of a CUDA graph: a row
    with ``num_queries`` 0 is padding.

    Attributes:
        locations: rows of the key buffer, int32 or int64 [any].
        location_starts: first entry of each request in ``locations``, int64 [num_requests].
        seq_lens: tokens of each sequence, the query tokens included, int32 [num_requests].
        first_query_rows: row of the query tensor that holds the first query token, int32 [num_requests].
        num_queries: query tokens, the last ones of the sequence, int32 [num_requests], at most
            ``max_queries``.
        slots: row of the score rows that each request adds to, int32 [num_requests]; no two that have
            queries share one.
        max_queries: most query tokens of any request.
        max_seq_len: upper bound of ``seq_lens``, on the host.
    """

    locations: torch.Tensor
    location_starts: torch.Tensor
    seq_lens: torch.Tensor
    first_query_rows: torch.Tensor
    num_queries: torch.Tensor
    slots: torch.Tensor
    max_queries: int
    max_seq_len: int

    def __post_init__(self) -> None:
        per_request = (
            self.location_starts,
            self.seq_lens,
            self.first_query_rows,
            self.num_queries,
            self.slots,
        )
        assert {tuple(tensor.shape) for tensor in per_request} == {(self.num_requests,)}, [
            tuple(tensor.shape) for tensor in per_request
        ]
        assert self.location_starts.dtype == torch.int64, "offsets into a request table pass 2**31"
        assert all(tensor.dtype == torch.int32 for tensor in per_request[1:])
        assert self.locations.dtype in (torch.int32, torch.int64), self.locations.dtype
        assert self.locations.is_contiguous(), "locations are addressed flat"
        assert self.max_queries > 0, self.max_queries

    @property
    def num_requests(self) -> int:
        return int(self.seq_lens.shape[0])

    def only(self, requests: list[int]) -> PagedQueries:
        """Some of the requests, in that order."""
        chosen = torch.tensor(requests, dtype=torch.int64, device=self.seq_lens.device)
        return replace(
            self,
            location_starts=self.location_starts[chosen],
            seq_lens=self.seq_lens[chosen],
            first_query_rows=self.first_query_rows[chosen],
            num_queries=self.num_queries[chosen],
            slots=self.slots[chosen],
        )

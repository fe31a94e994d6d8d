"""One decode step over several layers: sizes, inputs that rotate, and the bytes that it must move."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sgl_importance_kernels.page_rows import PageRows
from sgl_importance_kernels.triton.logit_reduction import ObservedLogits
from sgl_importance_kernels.triton.paged_queries import PagedQueries

LAYERS = 4
"""Sampled layers, each with keys and values of its own: no layer finds another's in the cache."""


@dataclass(frozen=True)
class DecodeShape:
    batch: int
    context: int
    group: int
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.context} tokens, GQA {self.group}"

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def kv_bytes(self) -> int:
        """Keys and values that the attention of one layer reads."""
        return 2 * self.tokens * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def emitted_bytes(self) -> int:
        """Logits of one layer, in half precision."""
        return 2 * self.tokens * self.heads

    @property
    def total_bytes(self) -> int:
        return LAYERS * (self.kv_bytes + self.emitted_bytes)


SHAPES = tuple(
    DecodeShape(batch, context, group)
    # The shapes of the cost contract first: what the time limit cuts off is at the end.
    for batch, context in (
        (8, 8192),
        (32, 8192),
        (8, 32768),
        (1, 8192),
        (128, 4096),
        (32, 32768),
        (1, 131072),
        (8, 131072),
    )
    for group in (4, 8)
)
TINY = tuple(
    DecodeShape(batch, context, group, kv_heads=2, head_dim=64)
    for batch, context, group in ((2, 40, 4), (1, 24, 8))
)


@dataclass
class Inputs:
    """Random queries, keys and values of every layer; a sequence's tokens lie scattered over the pool."""

    shape: DecodeShape
    device: str
    q: list[torch.Tensor] = field(init=False)
    k: list[torch.Tensor] = field(init=False)
    v: list[torch.Tensor] = field(init=False)
    indptr: torch.Tensor = field(init=False)
    indices: torch.Tensor = field(init=False)
    gate: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        random = torch.Generator(device=self.device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random, device=self.device).to(shape.dtype)

        self.q = [2 * normal(shape.batch, shape.heads, shape.head_dim) for _ in range(LAYERS)]
        pool = (shape.tokens, shape.kv_heads, shape.head_dim)
        self.k = [normal(*pool) for _ in range(LAYERS)]
        self.v = [normal(*pool) for _ in range(LAYERS)]
        int32 = {"dtype": torch.int32, "device": self.device}
        self.indptr = torch.arange(0, shape.tokens + 1, shape.context, **int32)
        self.indices = torch.randperm(shape.tokens, generator=random, device=self.device).to(torch.int32)
        self.gate = torch.ones(1, **int32)

    @property
    def max_pages(self) -> int:
        return -(-self.shape.context // self.shape.page_size)

    def rows(self) -> PageRows:
        return PageRows.zeros(self.shape.batch, self.max_pages, self.device)

    def observed(self) -> ObservedLogits:
        """Every request of the batch."""
        return ObservedLogits(
            starts=self.indptr[:-1].contiguous(),
            seq_lens=self.indptr.diff(),
            batch_rows=self.slots(),
            slots=self.slots(),
        )

    def slots(self) -> torch.Tensor:
        return torch.arange(self.shape.batch, dtype=torch.int32, device=self.device)

    def queries(self) -> PagedQueries:
        ones = torch.ones(self.shape.batch, dtype=torch.int32, device=self.device)
        return PagedQueries(
            locations=self.indices,
            location_starts=self.indptr[:-1].long(),
            seq_lens=ones * self.shape.context,
            first_query_rows=self.slots(),
            num_queries=ones,
            slots=self.slots(),
            max_queries=1,
            max_seq_len=self.shape.context,
        )

"""One run of the probe and the reductions per shape of tile, so that Triton has compiled them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sgl_importance_kernels.page_rows import PageRows
from sgl_importance_kernels.triton.log_sums import LogSums
from sgl_importance_kernels.triton.logit_reduction import DecodeLogits, ObservedLogits, reduce_logits
from sgl_importance_kernels.triton.page_reduction import reduce_log_sums
from sgl_importance_kernels.triton.paged_queries import PagedQueries
from sgl_importance_kernels.triton.qk_probe import MAX_TILE_ROWS, probe_layer

TOKENS = 64
BODY = {"sink_tokens": 4, "local_tokens": 16}


@dataclass(frozen=True)
class WarmUp:
    """The facts that kernels are specialised to.

    Attributes:
        key_dtype: of the KV cache; that of the queries where None.
        logit_cap: soft cap of the logits; 0 means none.
    """

    head_dim: int
    heads: int
    kv_heads: int
    page_size: int
    layers: int
    dtype: torch.dtype
    device: str
    key_dtype: torch.dtype | None = None
    logit_cap: float = 0.0

    def windows(self, longest: int) -> list[int]:
        """Query tokens per request that between them need every kernel up to ``longest``.

        Tiles have a power of two of rows; longer windows only use more of the largest.
        """
        group = self.heads // self.kv_heads
        windows, num_q = [1], 2
        while num_q < longest:
            windows.append(num_q)
            num_q *= 2
        largest = next((w for w in windows if w * group >= MAX_TILE_ROWS), longest)
        return sorted({w for w in windows if w <= largest} | {max(1, longest)})

    def run(self, num_q: int) -> None:
        """Scores ``num_q`` last tokens of one random sequence."""
        tokens = max(TOKENS, num_q)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        queries = PagedQueries(
            locations=torch.arange(tokens, **int32),
            location_starts=torch.zeros(1, dtype=torch.int64, device=self.device),
            seq_lens=torch.full((1,), tokens, **int32),
            first_query_rows=torch.zeros(1, **int32),
            num_queries=torch.full((1,), num_q, **int32),
            slots=torch.zeros(1, **int32),
            max_queries=num_q,
            max_seq_len=tokens,
        )
        max_pages = -(-tokens // self.page_size)
        log_sums = LogSums(
            num_layers=self.layers,
            max_requests=1,
            max_queries=num_q,
            num_heads=self.heads,
            max_pages=max_pages,
            device=self.device,
        )
        real: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        q = torch.randn(num_q, self.heads, self.head_dim, **real)
        k = torch.randn(tokens, self.kv_heads, self.head_dim, **real).to(self.key_dtype or self.dtype)
        rows = PageRows.zeros(1, max_pages, self.device)
        gate = torch.ones(1, **int32)
        for layer in range(self.layers):
            probe_layer(
                q,
                k,
                queries,
                log_sums,
                layer,
                gate=gate,
                scale=self.head_dim**-0.5,
                logit_cap=self.logit_cap,
                page_size=self.page_size,
                **BODY,
            )
        reduce_log_sums(log_sums, queries, rows, gate=gate, page_size=self.page_size, **BODY)
        _check_mass(rows, num_q)

    def run_logits(self) -> None:
        """Reduces the logits of one random decode step, as FlashInfer's kernels would leave them behind."""
        step = DecodeLogits(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            group=self.heads // self.kv_heads,
            max_tokens=TOKENS,
            max_requests=1,
            max_pages=-(-TOKENS // self.page_size),
            device=self.device,
        )
        step.logits.normal_()
        log_sums = step.logits.float().logsumexp(dim=2) / math.log(2)
        step.log_sums.copy_(log_sums.view(self.layers, 1, self.heads))
        int32: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        zero = torch.zeros(1, **int32)
        rows = PageRows.zeros(1, step.body.shape[1], self.device)
        reduce_logits(
            step,
            ObservedLogits(starts=zero, seq_lens=zero + TOKENS, batch_rows=zero, slots=zero),
            rows,
            gate=torch.ones(1, **int32),
            max_seq_len=TOKENS,
            page_size=self.page_size,
            log_sums_in_base_2=True,
            **BODY,
        )
        _check_mass(rows, 1)


def _check_mass(rows: PageRows, num_q: int) -> None:
    mass = float(rows.mass[0])
    assert abs(mass - num_q) < 1e-2 * num_q, f"a kernel just built gives mass {mass}, not {num_q}"

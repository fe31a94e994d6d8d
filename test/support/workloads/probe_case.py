"""Random ragged batches over a scattered key pool, their scores by the kernels and by the definition."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from sgl_importance_kernels.page_rows import PageRows
from sgl_importance_kernels.triton.log_sums import LogSums
from sgl_importance_kernels.triton.page_reduction import reduce_log_sums
from sgl_importance_kernels.triton.paged_queries import PagedQueries
from sgl_importance_kernels.triton.qk_probe import FLOAT8, probe_layer
from sgl_importance_lab.conformance.page_scores import combine_layers, layer_page_scores

POISON = 1e30  # What no kernel may read: unused keys, queries and log-sums hold it.


@dataclass
class ProbeCase:
    """Sequences (tokens, query tokens) whose keys lie scattered over one pool per layer."""

    sequences: list[tuple[int, int]]
    page_size: int = 16
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    num_layers: int = 2
    logit_cap: float = 0.0
    sink_tokens: int = 4
    local_tokens: int = 16
    sharpness: float = 3.0
    key_dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype = torch.float32
    key_scale: float = 1.0
    location_dtype: torch.dtype = torch.int32
    seed: int = 0
    device: str = "cpu"
    q: list[torch.Tensor] = field(init=False)
    k: list[torch.Tensor] = field(init=False)
    queries: PagedQueries = field(init=False)
    tables: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        lengths = [length for length, _ in self.sequences]
        pool = sum(lengths) + 5
        shuffled = torch.randperm(pool, generator=random)
        self.tables = list(shuffled[: sum(lengths)].split(lengths))
        # A request table, as servers have it: one row per slot, entries behind the sequence are stale.
        width = max(lengths) + 3
        table = torch.full((len(lengths) + 2, width), pool - 1, dtype=self.location_dtype)
        slots = torch.randperm(len(lengths) + 2, generator=random)[: len(lengths)]
        for slot, locations in zip(slots.tolist(), self.tables, strict=True):
            table[slot, : len(locations)] = locations.to(self.location_dtype)
        used = torch.zeros(pool, dtype=torch.bool)
        used[shuffled[: sum(lengths)]] = True

        first_rows, rows = [], 1
        for _, num_q in self.sequences:
            first_rows.append(rows)
            rows += num_q + 1
        heads = self.num_kv_heads * self.group
        self.q, self.k = [], []
        for _ in range(self.num_layers):
            q = self.sharpness * torch.randn(rows, heads, self.head_dim, generator=random)
            k = torch.randn(pool, self.num_kv_heads, self.head_dim, generator=random)
            if self.key_dtype not in FLOAT8:
                k[~used] = POISON if self.key_dtype != torch.float16 else 6e4
            self.q.append(q.to(self.query_dtype).to(self.device))
            self.k.append(k.to(self.key_dtype).to(self.device))

        def int32(values: object) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device=self.device)

        self.queries = PagedQueries(
            locations=table.flatten().to(self.device),
            location_starts=(slots.long() * width).to(self.device),
            seq_lens=int32(lengths),
            first_query_rows=int32(first_rows),
            num_queries=int32([num_q for _, num_q in self.sequences]),
            slots=int32(slots),
            max_queries=max(1, max(num_q for _, num_q in self.sequences)),
            max_seq_len=max(lengths),
        )

    @property
    def max_pages(self) -> int:
        return -(-self.queries.max_seq_len // self.page_size)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 * self.key_scale

    def gate(self, value: int = 1) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=self.device)

    def empty_rows(self) -> PageRows:
        return PageRows.zeros(len(self.sequences) + 2, self.max_pages + 1, self.device)

    def log_sums(self) -> LogSums:
        buffer = LogSums(
            num_layers=self.num_layers,
            max_requests=len(self.sequences) + 1,
            max_queries=self.queries.max_queries + 1,
            num_heads=self.num_kv_heads * self.group,
            max_pages=self.max_pages + 2,
            device=self.device,
        )
        buffer.values.fill_(POISON)
        buffer.totals.fill_(POISON)
        assert buffer.partials is not None
        buffer.partials.fill_(POISON)
        return buffer

    def probed(self, *, gate: int = 1, rows: PageRows | None = None) -> np.ndarray:
        """``as_array`` of the rows after one step through the probe and the reduction."""
        rows = self.empty_rows() if rows is None else rows
        log_sums = self.log_sums()
        settings = {
            "gate": self.gate(gate),
            "page_size": self.page_size,
            "sink_tokens": self.sink_tokens,
            "local_tokens": self.local_tokens,
        }
        for layer in range(self.num_layers):
            probe_layer(
                self.q[layer],
                self.k[layer],
                self.queries,
                log_sums,
                layer,
                scale=self.scale,
                logit_cap=self.logit_cap,
                **settings,
            )
        reduce_log_sums(log_sums, self.queries, rows, **settings)
        return as_array(rows)

    def expected(self) -> np.ndarray:
        """The same by the definition."""
        rows = PageRows.zeros(len(self.sequences) + 2, self.max_pages + 1, "cpu")
        for request, (length, num_q) in enumerate(self.sequences):
            if num_q == 0:
                continue
            first = int(self.queries.first_query_rows[request])
            keys = [k.cpu().float()[self.tables[request]] for k in self.k]
            scores = combine_layers(
                [
                    layer_page_scores(
                        self.q[layer].cpu().float()[first : first + num_q],
                        keys[layer],
                        torch.arange(length - num_q, length),
                        scale=self.scale,
                        logit_cap=self.logit_cap,
                        page_size=self.page_size,
                        sink_tokens=self.sink_tokens,
                        local_tokens=self.local_tokens,
                    )
                    for layer in range(self.num_layers)
                ]
            )
            slot, num_pages = int(self.queries.slots[request]), scores.mass.shape[1]
            rows.mass[slot] = scores.mass.sum()
            rows.body[slot, :num_pages] = scores.body.sum(dim=0)
            rows.peak[slot, :num_pages] = scores.peak.amax(dim=0)
        return as_array(rows)


def as_array(rows: PageRows) -> np.ndarray:
    """Body mass, peak, and the mass in the first column of a third plane; float32 [3, slots, max_pages]."""
    mass = torch.zeros_like(rows.body)
    mass[:, 0] = rows.mass
    return torch.stack((rows.body, rows.peak, mass)).cpu().numpy()


@st.composite
def probe_cases(draw: st.DrawFn, device: str = "cpu") -> ProbeCase:
    sequences = draw(
        st.lists(
            st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n, 5)))),
            min_size=1,
            max_size=3,
        )
    )
    return ProbeCase(
        sequences=sequences,
        page_size=draw(st.sampled_from([1, 2, 5, 16, 32, 64, 128, 200, 256])),
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3, 4, 8])),
        head_dim=draw(st.sampled_from([8, 16, 24])),
        num_layers=draw(st.integers(1, 2)),
        logit_cap=draw(st.sampled_from([0.0, 2.5, 30.0])),
        sink_tokens=draw(st.sampled_from([0, 1, 4, 16, 17, 250])),
        local_tokens=draw(st.sampled_from([0, 1, 5, 16, 250])),
        sharpness=draw(st.sampled_from([0.1, 1.0, 6.0])),
        location_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 2**32)),
        device=device,
    )

"""A context in page slots, and dense attention to it."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_importance_kernels.sparse.page_slots import PageSlots

PAGE, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5


def filled_slots(num_slots: int, tokens: int, dtype: torch.dtype) -> PageSlots:
    """A pool whose pages 1, 2, ... hold a context of ``tokens`` tokens."""
    host = [[torch.zeros(-(-tokens // PAGE) * PAGE + PAGE, KV_HEADS, DIM, dtype=dtype)] for _ in range(2)]
    slots = PageSlots(*host, num_frames=1, num_slots=num_slots, page_size=PAGE, staging_pages=3, device="cpu")
    plan = slots.begin_pass(torch.arange(PAGE, PAGE + tokens))
    slots.write(0, plan, *(torch.randn(tokens, KV_HEADS, DIM).to(dtype) for _ in range(2)))
    return slots


def dense(queries: torch.Tensor, slots: PageSlots, tokens: int) -> torch.Tensor:
    """[tokens, heads, dimension]: the last tokens of a context attend to it."""
    slots.flush(0)
    keys, values = (host.flatten(0, 1)[PAGE : PAGE + tokens].movedim(0, 1) for host in slots.host[0])
    mask = torch.ones(len(queries), tokens, dtype=torch.bool).tril_(tokens - len(queries))
    output = scaled_dot_product_attention(
        queries.movedim(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    return output[0].movedim(0, 1)

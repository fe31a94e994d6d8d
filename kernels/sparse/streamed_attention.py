"""Exact attention over pages that pass through a bounded buffer, merged by online softmax."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sgl_importance_kernels.sparse.page_slots import PageSlots


class PartialAttention:
    """Attention over the keys seen so far, of queries [tokens, heads, head dimension].

    Merging follows "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018): each part
    brings its output and the log of its sum of exponentials.
    """

    def __init__(self) -> None:
        self._output: torch.Tensor | None = None
        self._log_sum: torch.Tensor | None = None

    def add(self, output: torch.Tensor, log_sum: torch.Tensor) -> None:
        """Adds a part.

        Args:
            output: softmax-weighted values of the part, float32 [tokens, heads, value dimension].
            log_sum: log of the sum of exponentials of its logits, float32 [tokens, heads].
        """
        if self._output is None or self._log_sum is None:
            self._output, self._log_sum = output, log_sum
            return
        total = torch.logaddexp(self._log_sum, log_sum)
        before, part = (self._log_sum - total).exp_(), (log_sum - total).exp_()
        self._output = self._output * before[..., None] + output * part[..., None]
        self._log_sum = total

    @property
    def output(self) -> torch.Tensor:
        """Of all parts, float32 [tokens, heads, value dimension]."""
        assert self._output is not None, "no part was added"
        return self._output


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query to every key, as a part for ``PartialAttention``.

    Args:
        queries: [tokens, heads, head dimension]; heads are a multiple of the KV heads.
        keys: [keys, KV heads, head dimension].
        values: [keys, KV heads, value dimension].
        scale: factor on the logits.
    """
    tokens, heads, _ = queries.shape
    kv_heads = keys.shape[1]
    # The query heads of a KV head are more rows of it: its keys are read once.
    rows = queries.view(tokens, kv_heads, heads // kv_heads, -1).permute(1, 0, 2, 3).flatten(1, 2)
    output, log_sum = _attention_with_log_sum(rows, keys.movedim(0, 1), values.movedim(0, 1), scale)
    by_head = (kv_heads, tokens, heads // kv_heads)
    output = output.view(*by_head, -1).movedim(0, 1).flatten(1, 2)
    return output, log_sum.view(by_head).movedim(0, 1).flatten(1, 2)


def attend_causally(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of tokens to themselves and those before them; arguments and results as in ``attend``."""
    groups = queries.shape[1] // keys.shape[1]
    output, log_sum = _attention_with_log_sum(
        queries.movedim(0, 1),
        keys.repeat_interleave(groups, dim=1).movedim(0, 1),
        values.repeat_interleave(groups, dim=1).movedim(0, 1),
        scale,
        causal=True,
    )
    return output.movedim(0, 1), log_sum.movedim(0, 1)


def _attention_with_log_sum(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[heads, rows, dimension] over [heads, keys, dimension]: output and log-sum, both float32."""
    # The public function keeps the log-sum to itself; these are the operators behind it.
    aten, inputs = torch.ops.aten, (rows[None], keys[None].to(rows.dtype), values[None].to(rows.dtype))
    if rows.device.type == "cpu":
        output, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, 0.0, causal, scale=scale)
    elif rows.dtype == torch.float32:
        output, log_sum, *_ = aten._scaled_dot_product_efficient_attention(
            *inputs, None, True, 0.0, causal, scale=scale
        )
    else:
        output, log_sum, *_ = aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal, scale=scale)
    # The log-sums of a GPU's kernels are padded to a multiple of rows.
    return output[0].float(), log_sum[0].view(len(rows), -1)[:, : rows.shape[1]].float()


def _tiles(pages: torch.Tensor, num_tokens: int, slots: PageSlots) -> Iterator[tuple[torch.Tensor, int]]:
    """Parts of a context that fit the staging buffer.

    Where a part begins depends on positions only, so that the same context gives the same sums whatever is
    resident.

    Args:
        pages: of the context, in order; int64 [pages].
        num_tokens: of the context; only the last page may be partial.
        slots: whose staging buffer bounds a part.

    Yields:
        Pages of a part, and its number of tokens.
    """
    for start in range(0, len(pages), slots.staging_pages):
        part = pages[start : start + slots.staging_pages]
        yield part, min(len(part) * slots.page_size, num_tokens - start * slots.page_size)


def stream_attention(
    sums: PartialAttention,
    queries: torch.Tensor,
    slots: PageSlots,
    layer: int,
    pages: torch.Tensor,
    num_tokens: int,
    scale: float,
    *,
    is_chosen: bool = False,
) -> None:
    """Adds the attention of ``queries`` to the first ``num_tokens`` tokens of ``pages``, all of them.

    Args:
        sums: what it is added to.
        queries: [tokens, heads, head dimension].
        slots: where the pages are.
        layer: index among the pool's layers.
        pages: of the context, in order; int64 [pages].
        num_tokens: of the context.
        scale: factor on the logits.
        is_chosen: whether a selector chose the pages; else they are all of them.
    """
    if not len(pages):
        return
    for part, valid in _tiles(pages, num_tokens, slots):
        keys, values = slots.read(layer, part, is_chosen=is_chosen)
        sums.add(*attend(queries, keys[:valid], values[:valid], scale))

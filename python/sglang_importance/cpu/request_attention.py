"""Attention of the last tokens of sequences to the KV pool, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

BLOCK_QUERIES = 64
"""Queries that attend through a window at a time: a block has a mask of them times the keys that they see."""

Parts = tuple[torch.Tensor, torch.Tensor]
"""Outputs [queries, heads, value dimension] and logs of the sums of exponentials [queries, heads]."""


@dataclass(frozen=True, slots=True)
class QueriedRequest:
    """One request of a batch.

    Attributes:
        row: of the request table.
        seq_len: tokens of the sequence, the queries included.
        first_query: row of its first query in the batch's query tensor.
        num_q: queries, the last tokens of the sequence.
    """

    row: int
    seq_len: int
    first_query: int
    num_q: int


def attend_requests(
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    requests: Iterable[QueriedRequest],
    *,
    scaling: float | None,
    window: int = -1,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    locate: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of each request's queries to its context.

    A request with one query reads keys and values where they lie, if they are float32.

    Args:
        query: [num_tokens, num_heads, head_dim], queries of all requests.
        output: [num_tokens, num_heads, value_dim], written in place and returned, but for rows of no request.
        keys: of the pool, [num_slots, num_kv_heads, head_dim].
        values: of the pool, [num_slots, num_kv_heads, value_dim].
        table: slots of each request's tokens, [max_requests, max_context].
        requests: the batch.
        scaling: factor on the logits; None for 1 / sqrt(head_dim).
        window: tokens before itself that a query sees; below 0, all.
        causal: whether a query sees only what is before it; else all of the sequence, without a window.
        sinks: learnt logit of each head that takes part in its softmax, [num_heads]; None for none.
        locate: where ``keys`` and ``values`` have what ``table`` says; None for there.
    """
    # numba, which a process that attends to nothing need not load.
    from sgl_importance_kernels.pool_attention import attend_pool, can_attend_pool

    if not causal:
        window = -1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    in_place = can_attend_pool(keys, values)
    alone: list[int] = []
    contexts: list[torch.Tensor] = []
    for request in requests:
        # What lies further back may be somebody else's by now.
        start = max(0, request.seq_len - request.num_q - window) if window >= 0 else 0
        locations = table[request.row, start : request.seq_len]
        if locate is not None:
            locations = locate(locations)
        if request.num_q == 1 and in_place:
            alone.append(request.first_query)
            contexts.append(locations)
            continue
        queries = slice(request.first_query, request.first_query + request.num_q)
        output[queries] = attend(
            query[queries],
            keys.index_select(0, locations),
            values.index_select(0, locations),
            scaling=scale,
            window=window,
            causal=causal,
            sinks=sinks,
        )
    if alone:
        attended = attend_pool(query[alone], keys, values, contexts, scale)
        output[alone] = _with_sinks(attended, sinks).to(output.dtype)
    return output


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    window: int = -1,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last tokens of a sequence over its end.

    Args:
        query: [num_q, num_heads, head_dim].
        keys: of the last tokens of the sequence, [kv_len, num_kv_heads, head_dim]; kv_len >= num_q.
        values: [kv_len, num_kv_heads, value_dim].
        scaling: factor on the logits.
        window: tokens before itself that a query sees; below 0, all.
        causal: whether a query sees only what is before it.
        sinks: learnt logit of each head that takes part in its softmax, [num_heads]; None for none.

    Returns:
        [num_q, num_heads, value_dim], in the queries' dtype.
    """
    num_q, kv_len = len(query), len(keys)
    if causal and 0 <= window < kv_len - 1:
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        for first in range(0, num_q, BLOCK_QUERIES):
            block = query[first : first + BLOCK_QUERIES]
            stop = kv_len - num_q + first + len(block)
            seen = slice(max(0, stop - len(block) - window), stop)
            attended = _attend_window(block, keys[seen], values[seen], scaling, window)
            output[first : first + len(block)] = _with_sinks(attended, sinks)
        return output
    if not causal or num_q == 1:
        return _with_sinks(_attend_all(query, keys, values, scaling), sinks).to(query.dtype)
    own = slice(kv_len - num_q, None)
    attended = _attend_heads(query, keys[own], values[own], scaling, causal=True)
    return _with_sinks(_behind(attended, query, keys, values, scaling), sinks).to(query.dtype)


def attend_masked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scaling: float
) -> torch.Tensor:
    """As ``attend``, where a mask says which of each other the queries see.

    Args:
        query: [num_q, num_heads, head_dim].
        keys: [kv_len, num_kv_heads, head_dim]; kv_len >= num_q.
        values: [kv_len, num_kv_heads, value_dim].
        mask: whether a query (row) sees another (column), each at least one; bool [num_q, num_q].
        scaling: factor on the logits.
    """
    own = slice(len(keys) - len(query), None)
    attended = _attend_heads(query, keys[own], values[own], scaling, hidden=~mask)
    return _behind(attended, query, keys, values, scaling)[0].to(query.dtype)


def _behind(
    own: Parts, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> Parts:
    """Adds to the queries' attention to each other that to everything before them."""
    before = len(keys) - len(query)
    if not before:
        return own
    output, log_sums = _attend_all(query, keys[:before], values[:before], scaling)
    share = torch.sigmoid(own[1] - log_sums)
    return output.float().lerp(own[0].float(), share[..., None]), torch.logaddexp(own[1], log_sums)


def _attend_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int
) -> Parts:
    """Attention of a few tokens, in memory of queries times keys."""
    num_q, kv_len = len(query), len(keys)
    behind = torch.arange(kv_len - num_q, kv_len)[:, None] - torch.arange(kv_len)
    return _attend_heads(query, keys, values, scaling, hidden=(behind < 0) | (behind > window))


def _attend_all(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> Parts:
    """Attention of every query to every key: the heads of a group are more rows of their KV head."""
    num_q, num_heads, _ = query.shape
    kv_heads = keys.shape[1]
    group = num_heads // kv_heads
    rows = query.unflatten(1, (kv_heads, group)).movedim(1, 0).flatten(1, 2)
    output, log_sums = _operator(
        rows[None], keys.movedim(0, 1)[None], values.movedim(0, 1)[None], scaling, causal=False
    )
    by_head = output[0].unflatten(1, (num_q, group)).movedim(0, 1).flatten(1, 2)
    return by_head, log_sums.view(kv_heads, num_q, group).movedim(0, 1).flatten(1, 2)


def _attend_heads(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    causal: bool = False,
    hidden: torch.Tensor | None = None,
) -> Parts:
    """Attention of which parts are hidden. ``hidden``: bool [queries, keys]."""
    kv_heads = keys.shape[1]
    group = query.shape[1] // kv_heads
    rows = query.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    mask = None
    if hidden is not None:
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))[None, None]
    # A KV head is an element of the batch: the heads of its group share it, without copies.
    shared = [tensor.movedim(0, 1)[:, None] for tensor in (keys, values)]
    output, log_sums = _operator(rows, shared[0], shared[1], scaling, causal=causal, mask=mask)
    return output.permute(2, 0, 1, 3).flatten(1, 2), log_sums.permute(2, 0, 1).flatten(1, 2)


def _operator(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> Parts:
    """Torch's attention of [batch, heads, tokens, dimension], whose public function keeps the log-sums."""
    value_dim = values.shape[-1]
    width = max(query.shape[-1], value_dim)  # which the operator wants to be one
    inputs = (
        tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))
        for tensor in (query, keys.to(query.dtype), values.to(query.dtype))
    )
    query, keys, values = inputs
    group = (-1, query.shape[1], -1, -1)
    output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys.expand(group), values.expand(group), 0.0, causal, attn_mask=mask, scale=scaling
    )
    return output[..., :value_dim], log_sums


def _with_sinks(attended: Parts, sinks: torch.Tensor | None) -> torch.Tensor:
    output, log_sums = attended
    if sinks is None:
        return output
    # A sink is one more logit in the softmax: this part of it goes to keys.
    return output * torch.sigmoid(log_sums - sinks.float())[..., None]

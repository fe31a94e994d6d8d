"""Page scores of a sequence's last tokens in eager torch: the reference's numbers without its matrices.

The reference materialises full masks and scores one layer at a time. Here the queries are consecutive and
end with the sequence, so only the last few columns need a mask, pages are a reshape of padded keys, and
queries go in blocks that bound the memory of long contexts. On a CPU the sums over pages are compiled.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from sgl_importance_kernels.page_sums import CompiledPageSums, EagerPageSums, PageSums

BLOCK_LOGITS = 1 << 19
"""Logits held at once, 2 MiB in float32. One block for a window of 32 x 8k was three times as slow with
8 heads of 32 dimensions, and a fifth faster with 16 of 128."""
COMPILED_PRODUCTS = 1 << 22
"""Products of a query's and a key's number up to which several query tokens are scored in one compiled pass.
From there on a BLAS makes up for the calls around it."""


class PageScoreAccumulator:
    """Scores of the last ``num_q`` tokens of a sequence, gathered layer by layer in one forward pass.

    The definition is that of ``sgl_importance_lab.conformance.page_scores``; all arithmetic is float32.

    Args:
        seq_len: tokens of the sequence, the query tokens included.
        num_q: query tokens, the last ones of the sequence.
        page_size: tokens per page.
        sink_tokens: first tokens of the sequence outside the body.
        local_tokens: last tokens seen by a query token, itself included, outside the body.
        device: where queries and keys are.
        compiled: whether one compiled pass sums the pages, which only a CPU can; None: wherever it can.
    """

    def __init__(
        self,
        *,
        seq_len: int,
        num_q: int,
        page_size: int,
        sink_tokens: int,
        local_tokens: int,
        device: torch.device | str = "cpu",
        compiled: bool | None = None,
    ) -> None:
        assert 0 < num_q <= seq_len, (num_q, seq_len)
        self.seq_len = seq_len
        self.num_q = num_q
        self.page_size = page_size
        self.num_pages = -(-seq_len // page_size)
        self.num_layers = 0
        self._first_hidden = seq_len - num_q + 1
        self._local_tokens = local_tokens
        shape = {"num_q": num_q, "num_pages": self.num_pages, "page_size": page_size}
        self._compiled: CompiledPageSums | None = None
        self._sums: PageSums
        if torch.device(device).type == "cpu" if compiled is None else compiled:
            self._sums = self._compiled = CompiledPageSums(**shape, body_start=sink_tokens)
        else:
            self._sums = EagerPageSums(**shape, body_start=sink_tokens, device=device)

    @property
    def padded_len(self) -> int:
        """Keys that ``add_layer`` expects: the sequence, padded to whole pages."""
        return self.num_pages * self.page_size

    def add_layer(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        locations: torch.Tensor,
        *,
        scale: float,
        logit_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Adds one sampled layer.

        Args:
            q: queries after positional encoding, any float dtype, [num_q, num_heads, head_dim].
            keys: the pool of keys, any float dtype, [slots, num_kv_heads, head_dim].
            locations: slot of each token of the sequence, int32 [padded_len]; padding: any slot.
            scale: factor on the dot product.
            logit_cap: soft cap of the scaled logits; 0 means none.
            sinks: learnt logit of each query head that takes part in its softmax, any float dtype,
                [num_heads]; None where the layer has none.
        """
        num_q, num_heads, head_dim = q.shape
        _, num_kv_heads, _ = keys.shape
        assert num_q == self.num_q, (num_q, self.num_q)
        assert locations.shape == (self.padded_len,), (locations.shape, self.padded_len)
        self.num_layers += 1
        if self._compiled is not None and self._is_small(q) and q.dtype == keys.dtype == torch.float32:
            self._compiled.add_queries(
                q,
                keys,
                locations[: self.seq_len],
                local_tokens=self._local_tokens,
                scale=scale,
                logit_cap=logit_cap,
                sinks=sinks,
            )
            return
        # Query heads that share a KV head lie side by side: [kv head, group, token, dim].
        grouped = (q.float() * scale).view(num_q, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        # On a CPU four times as fast as indexing.
        columns = keys.index_select(0, locations).float().permute(1, 2, 0)
        block = max(1, BLOCK_LOGITS // (num_heads * self.padded_len))
        for start in range(0, num_q, block):
            queries = grouped[:, :, start : start + block]
            logits = torch.matmul(queries.reshape(num_kv_heads, -1, head_dim), columns)
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            self._add_block(logits.view(num_heads, -1, self.padded_len), start, sinks)

    def _is_small(self, q: torch.Tensor) -> bool:
        return len(q) == 1 or q.numel() * self.seq_len <= COMPILED_PRODUCTS

    def _add_block(self, logits: torch.Tensor, start: int, sinks: torch.Tensor | None) -> None:
        """Adds query tokens ``start`` and following, from logits [num_heads, tokens, padded_len]."""
        # The first token sees all but these columns, each next one a column more.
        first_hidden = self._first_hidden + start
        hidden = logits[..., first_hidden:]
        hidden.masked_fill_(_from_diagonal(*hidden.shape[1:], logits.device), float("-inf"))
        self._sums.add(_softmax_beside(logits, sinks), start, first_hidden - self._local_tokens)

    def sums(self) -> torch.Tensor:
        """Mass, body mass and peak over the query tokens: sum, sum and maximum; float32 [3, num_pages]."""
        assert self.num_layers > 0, "no layer was added"
        return self._sums.normalised(self.num_layers)


def _softmax_beside(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of rows [num_heads, tokens, columns] over the columns and the head's sink, if it has one."""
    probabilities = torch.softmax(logits, dim=-1)
    if sinks is None:
        return probabilities
    # The share that the sink leaves: exp(lse) / (exp(lse) + exp(sink)).
    left = torch.sigmoid(torch.logsumexp(logits, dim=-1, keepdim=True) - sinks.float().view(-1, 1, 1))
    return probabilities.mul_(left)


@lru_cache(maxsize=32)
def _from_diagonal(num_rows: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """True where the column is not left of the row; bool [num_rows, num_columns]."""
    return torch.ones(num_rows, num_columns, dtype=torch.bool, device=device).triu_()

"""Page scores of a sequence's last tokens on a CPU: the reference's numbers without its matrices.

The reference materialises full masks and scores one layer at a time. Here the queries are consecutive and
end with the sequence, so only the last few columns need a mask, pages are a reshape of padded keys, and
queries go in blocks that bound the memory of long contexts. The sums over pages are compiled: a pass of eager
torch per quantity and the calls themselves cost more than they do.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from sgl_importance_kernels import compiled
from sgl_importance_kernels.page_rows import EMPTY_BODY


class PageSums:
    """Mass and peak of pages over all query tokens, and the body of each; all float32.

    Args:
        num_q: query tokens.
        num_pages: pages of the sequence.
        page_size: tokens per page.
        body_start: first token of the body.
    """

    def __init__(self, *, num_q: int, num_pages: int, page_size: int, body_start: int) -> None:
        self._page_size, self._body_start = page_size, body_start
        sums = np.zeros((2 + num_q, num_pages), dtype=np.float32)
        self._mass, self._peak, self._body = sums[0], sums[1], sums[2:]

    def add(self, probabilities: torch.Tensor, first_token: int, first_body_end: int) -> None:
        """Adds one layer of some query tokens.

        Args:
            probabilities: 0 where a token sees nothing; float32 [num_heads, tokens, num_pages * page_size].
            first_token: number of the first of these tokens.
            first_body_end: first column behind its body; each next token's is one further.
        """
        body = self._body[first_token : first_token + probabilities.shape[1]]
        compiled.add_probabilities(
            probabilities.numpy(),
            self._page_size,
            self._body_start,
            first_body_end,
            self._mass,
            self._peak,
            body,
        )

    def add_queries(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        locations: torch.Tensor,
        *,
        local_tokens: int,
        scale: float,
        logit_cap: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Adds one layer of all query tokens, from the keys where they lie.

        Args:
            queries: float32 [num_q, num_heads, head_dim].
            keys: the pool; float32 [slots, num_kv_heads, head_dim].
            locations: slot of each token of the sequence; int32 [seq_len].
            local_tokens: last tokens seen by a query token, itself included, outside its body.
            scale: factor on the dot product.
            logit_cap: soft cap of the scaled logits; 0 means none.
            sinks: learnt logit of each query head that takes part in its softmax, any float dtype,
                [num_heads]; None where the layer has none.
        """
        if sinks is None:
            sinks = torch.full((queries.shape[1],), float("-inf"))
        add = compiled.add_query if len(queries) == 1 else compiled.add_queries
        add(
            queries.numpy(),
            keys.numpy(),
            locations.numpy(),
            sinks.float().numpy(),
            scale,
            logit_cap,
            self._page_size,
            self._body_start,
            local_tokens,
            self._mass,
            self._peak,
            self._body,
        )

    def normalised(self, num_layers: int) -> torch.Tensor:
        """Means over layers, normalised bodies: mass, body mass and peak; float32 [3, num_pages]."""
        return torch.from_numpy(
            compiled.normalised(self._mass, self._peak, self._body, num_layers, EMPTY_BODY)
        )


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
    """

    def __init__(
        self,
        *,
        seq_len: int,
        num_q: int,
        page_size: int,
        sink_tokens: int,
        local_tokens: int,
    ) -> None:
        assert 0 < num_q <= seq_len, (num_q, seq_len)
        self.seq_len = seq_len
        self.num_q = num_q
        self.page_size = page_size
        self.num_pages = -(-seq_len // page_size)
        self.num_layers = 0
        self._first_hidden = seq_len - num_q + 1
        self._local_tokens = local_tokens
        self._sums = PageSums(
            num_q=num_q, num_pages=self.num_pages, page_size=page_size, body_start=sink_tokens
        )

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
        if self._is_small(q) and q.dtype == keys.dtype == torch.float32:
            self._sums.add_queries(
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
        # Four times as fast as indexing.
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
        hidden.masked_fill_(_from_diagonal(*hidden.shape[1:]), float("-inf"))
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
def _from_diagonal(num_rows: int, num_columns: int) -> torch.Tensor:
    """True where the column is not left of the row; bool [num_rows, num_columns]."""
    return torch.ones(num_rows, num_columns, dtype=torch.bool).triu_()

"""Page scores of a sequence's last tokens in eager torch: the reference's numbers without its matrices.

The reference materialises full masks and scores one layer at a time. Here the queries are consecutive and
end with the sequence, so only the last few columns need a mask, pages are a reshape of padded keys, and
queries go in blocks that bound the memory of long contexts. On a CPU the sums over pages are compiled.
"""

from __future__ import annotations

import torch

from sgl_importance_kernels.page_sums import add_page_sums
from sgl_importance_kernels.reference.page_scores import EMPTY_BODY

BLOCK_LOGITS = 1 << 19
"""Logits held at once, 2 MiB in float32. One block for a window of 32 x 8k was three times as slow with
8 heads of 32 dimensions, and a fifth faster with 16 of 128."""


class PageScoreAccumulator:
    """Scores of the last ``num_q`` tokens of a sequence, gathered layer by layer in one forward pass.

    The definition is that of ``sgl_importance_kernels.reference.page_scores``; all arithmetic is float32.

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
        self._is_compiled = torch.device(device).type == "cpu" if compiled is None else compiled
        self._sink_tokens = sink_tokens
        self._local_tokens = local_tokens
        # Columns that some query token does not see: those behind it, and the padding of the last page.
        self._first_hidden = seq_len - num_q + 1
        column = torch.arange(self._first_hidden, self.padded_len, device=device)
        visible = torch.arange(self._first_hidden, seq_len + 1, device=device)
        self._hidden = column >= visible[:, None]
        self._mass = torch.zeros(self.num_pages, device=device)
        self._peak = torch.zeros(self.num_pages, device=device)
        self._body = torch.zeros(num_q, self.num_pages, device=device)

    @property
    def padded_len(self) -> int:
        """Keys that ``add_layer`` expects: the sequence, padded to whole pages."""
        return self.num_pages * self.page_size

    def add_layer(self, q: torch.Tensor, k: torch.Tensor, *, scale: float, logit_cap: float = 0.0) -> None:
        """Adds one sampled layer.

        Args:
            q: queries after positional encoding, any float dtype, [num_q, num_heads, head_dim].
            k: keys of the sequence, any float dtype, [padded_len, num_kv_heads, head_dim]; what the padding
                holds does not matter.
            scale: factor on the dot product.
            logit_cap: soft cap of the scaled logits; 0 means none.
        """
        num_q, num_heads, head_dim = q.shape
        _, num_kv_heads, _ = k.shape
        assert num_q == self.num_q, (num_q, self.num_q)
        assert k.shape == (self.padded_len, num_kv_heads, head_dim), (k.shape, self.padded_len)
        # Query heads that share a KV head lie side by side: [kv head, group, token, dim].
        grouped = (q.float() * scale).view(num_q, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        keys = k.float().permute(1, 2, 0)
        block = max(1, BLOCK_LOGITS // (num_heads * self.padded_len))
        for start in range(0, num_q, block):
            queries = grouped[:, :, start : start + block]
            logits = torch.matmul(queries.reshape(num_kv_heads, -1, head_dim), keys)
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            self._add_block(logits.view(num_heads, -1, self.padded_len), start)
        self.num_layers += 1

    def _add_block(self, logits: torch.Tensor, start: int) -> None:
        """Adds query tokens ``start`` and following, from logits [num_heads, tokens, padded_len]."""
        stop = start + logits.shape[1]
        logits[..., self._first_hidden :].masked_fill_(self._hidden[start:stop], float("-inf"))
        probabilities = torch.softmax(logits, dim=-1)
        first_body_end = self._first_hidden + start - self._local_tokens
        if self._is_compiled:
            add_page_sums(
                probabilities.numpy(),
                self.page_size,
                self._sink_tokens,
                first_body_end,
                self._mass.numpy(),
                self._peak.numpy(),
                self._body[start:stop].numpy(),
            )
            return
        per_head = self._pages_of(probabilities)
        self._mass += per_head.sum(dim=1).mean(dim=0)
        self._peak = torch.maximum(self._peak, per_head.amax(dim=(0, 1)))

        token_mass = probabilities.mean(dim=0)
        column = torch.arange(self.padded_len, device=logits.device)
        body_end = torch.arange(first_body_end, first_body_end + stop - start, device=logits.device)
        outside = (column < self._sink_tokens) | (column >= body_end[:, None])
        self._body[start:stop] += self._pages_of(token_mass.masked_fill_(outside, 0.0))

    def _pages_of(self, token_values: torch.Tensor) -> torch.Tensor:
        if self.page_size == 1:
            return token_values
        return token_values.unflatten(-1, (self.num_pages, self.page_size)).sum(dim=-1)

    def sums(self) -> torch.Tensor:
        """Mass, body mass and peak over the query tokens: sum, sum and maximum; float32 [3, num_pages]."""
        assert self.num_layers > 0, "no layer was added"
        body = self._body / self.num_layers
        total = body.sum(dim=-1, keepdim=True)
        body = torch.where(total > EMPTY_BODY, body / total, torch.zeros_like(body))
        return torch.stack((self._mass / self.num_layers, body.sum(dim=0), self._peak))

"""Greedy decoding with transformers in which each KV head of each layer sees only what is left of its KV.

A batch of requests; after every step a ``Reaction`` per request is told what each head attended to, and may
hide keys for good or write others in their place. For measurements: the whole KV stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_importance.cpu.imports import TorchvisionOperators

Floats = npt.NDArray[np.float32]
ATTENTION = "what is left"


@dataclass
class KeptKeys:
    """Keys and values of a batch, and which of them each head sees; columns are tokens, padded on the left.

    It is the cache that transformers writes to, too.

    Attributes:
        starts: first column of each request; int64 [batch].
        keys, values: float32 [layers, batch, KV heads, columns, head dimension].
        seen: bool [layers, batch, KV heads, columns].
        length: columns written.
        mass: of the last query, the mean over the heads that share a KV head; [layers, batch, KV heads,
            columns].
        most: the largest of them instead.
    """

    starts: Tensor
    keys: Tensor
    values: Tensor
    seen: Tensor
    length: int = 0
    mass: Tensor = field(init=False)
    most: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mass, self.most = (torch.zeros(self.seen.shape) for _ in range(2))

    @classmethod
    def of(cls, config: Any, starts: Tensor, columns: int) -> KeptKeys:
        """Empty, with room for so many columns."""
        shape = (config.num_hidden_layers, len(starts), config.num_key_value_heads, columns)
        keys, values = (torch.zeros(*shape, config.head_dim) for _ in range(2))
        return cls(starts, keys, values, torch.ones(shape, dtype=torch.bool))

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Appends to a layer, as transformers asks its caches to."""
        end = self.length + key.shape[2]
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def get_seq_length(self, _: int = 0) -> int:
        return self.length

    def rows(self, chosen: Tensor) -> KeptKeys:
        """Some of its requests alone; int64 [requests]."""
        kept = KeptKeys(
            self.starts[chosen], *(each[:, chosen] for each in (self.keys, self.values, self.seen))
        )
        kept.length = self.length
        return kept

    def visible(self, layer: int, queries: int, columns: int) -> Tensor:
        """Which keys the last queries see: bool [batch, KV heads, 1, queries, columns]; each sees itself."""
        key = torch.arange(columns)
        query = key[-queries:, None]
        causal = (key <= query)[None] & (key >= self.starts[:, None, None])
        left = self.seen[layer, :, :, None, :columns] & causal[:, None]
        return (left | (key == query))[:, :, None]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kept: KeptKeys,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention to what is left; notes the mass of the last query."""
    batch, heads, queries, dim = query.shape
    grouped = query.view(batch, key.shape[1], -1, queries, dim)
    logits = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) * scaling
    visible = kept.visible(module.layer_idx, queries, key.shape[2])
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    last = weights[:, :, :, -1]
    kept.mass[module.layer_idx, :, :, : key.shape[2]] = last.mean(2)
    kept.most[module.layer_idx, :, :, : key.shape[2]] = last.amax(2)
    output = torch.matmul(weights, value[:, :, None])
    return output.view(batch, heads, queries, dim).transpose(1, 2), None


class Reaction(Protocol):
    """What becomes of one request's KV behind each step."""

    def __call__(self, step: int, row: RowKeys) -> None:
        """Step 0 has read the prompt, step n the nth generated token."""


@dataclass(frozen=True, slots=True)
class RowKeys:
    """One request's part of a batch: views, heads are [layers, KV heads], columns its own tokens so far."""

    keys: Tensor
    values: Tensor
    seen: Tensor
    mass: Tensor
    most: Tensor


def load_model(path: Path) -> Any:
    """The checkpoint in transformers, float32, with attention to what is left."""
    shim = TorchvisionOperators()
    if shim.needed():
        shim.apply()
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attend)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=ATTENTION
    ).eval()


@torch.inference_mode()
def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rights: Sequence[Sequence[int]],
    reactions: Sequence[Reaction | None],
    *,
    advance: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Greedy output ids of each prompt, up to the first that is wrong.

    Args:
        model: of ``load_model``.
        prompts: token ids.
        rights: the right answers.
        reactions: one for each prompt; None leaves everything.
        advance: called after each step.
    """
    longest, steps = max(map(len, prompts)), max(map(len, rights))
    starts = torch.tensor([longest - len(prompt) for prompt in prompts])
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    kept = KeptKeys.of(model.config, starts, longest + steps)
    written: list[list[int]] = [[] for _ in prompts]
    in_batch = list(range(len(prompts)))
    going = set(in_batch)
    for step in range(steps):
        columns = torch.arange(kept.length, kept.length + ids.shape[1])
        output = model(
            ids,
            position_ids=(columns[None] - kept.starts[:, None]).clamp(min=0),
            past_key_values=kept,
            use_cache=True,
            logits_to_keep=1,
            kept=kept,
        )
        kept.length += ids.shape[1]
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
        for row, request in enumerate(in_batch):
            if request not in going:
                continue
            written[request].append(int(ids[row]))
            if written[request][-1] != rights[request][step] or step + 1 == len(rights[request]):
                going.remove(request)
            reaction = reactions[request]
            if reaction is not None:
                own = slice(int(kept.starts[row]), kept.length)
                views = (kept.keys, kept.values, kept.seen, kept.mass, kept.most)
                reaction(step, RowKeys(*(view[:, row, :, own] for view in views)))
        advance()
        if not going:
            break
        if 2 * len(going) <= len(in_batch):
            chosen = torch.tensor([row for row, request in enumerate(in_batch) if request in going])
            in_batch = [in_batch[row] for row in chosen.tolist()]
            kept, ids = kept.rows(chosen), ids[chosen]
    return written

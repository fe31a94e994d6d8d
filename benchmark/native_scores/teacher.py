"""What an indexer learns from: the inputs of a frozen model's layers, and where its queries look."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sgl_importance.sparse.selection_rule import SINK_TOKENS, WINDOW_TOKENS
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill
from sgl_importance_lab.trained_model.decoder_shape import UnknownModel

FIRST_ROW = 256
"""Position of the first query that is learned from: earlier ones have little to choose."""


class WatchedDecoder(Decoder):
    """Keeps what the last pass fed to the projections of every layer.

    Attributes:
        inputs: normed, float32 [tokens, width] for each layer.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if len(self.shape.whole_layers) < self.shape.layers:
            raise UnknownModel(f"{folder}: an indexer is for layers that see everything; some have a window")
        self.inputs: list[torch.Tensor] = [torch.empty(0)] * self.shape.layers

    def projected(self, layer: int, normed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.inputs[layer] = normed
        return super().projected(layer, normed)


def is_choosable(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which tokens a query may leave out, bool [rows, tokens]: neither a sink nor among its latest.

    Args:
        rows: positions of the queries, int64 [rows].
        tokens: of the text.
    """
    at = torch.arange(tokens)
    return (at >= SINK_TOKENS) & (at <= rows[:, None] - WINDOW_TOKENS)


def head_weights(queries: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Attention of single queries over their whole past, float32 [heads, rows, tokens].

    Args:
        queries: [rows, heads, dimension], unscaled.
        keys: [tokens, KV heads, dimension].
        rows: positions of the queries, int64 [rows].
    """
    count, _, dim = queries.shape
    by_kv_head = queries.view(count, keys.shape[1], -1, dim)
    logits = torch.einsum("rkgd,tkd->kgrt", by_kv_head, keys).flatten(0, 1) * dim**-0.5
    is_later = torch.arange(len(keys)) > rows[:, None]
    return logits.masked_fill_(is_later, float("-inf")).softmax(dim=-1)


def shared_attention(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Attention summed over heads, over what may be left out, normalised: [rows, tokens].

    Args:
        weights: as ``head_weights`` makes them.
        rows: positions of the queries, int64 [rows].
    """
    summed = weights.sum(dim=0).masked_fill_(~is_choosable(rows, weights.shape[2]), 0.0)
    return summed / summed.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def write_lesson(decoder: WatchedDecoder, tokens: torch.Tensor, rows: torch.Tensor, path: Path) -> None:
    """Runs the model over a text and writes, for each layer, its inputs and the attention of some queries.

    Args:
        decoder: the frozen model.
        tokens: int64 [tokens].
        rows: positions of the queries, int64 [rows].
        path: of the file; it is there only once it is whole.
    """
    found: dict[str, torch.Tensor] = {"rows": rows}
    prefill = Prefill(decoder, tokens, keeps_queries=True)
    for layer, (queries, keys) in enumerate(zip(prefill.queries, prefill.keys, strict=True)):
        parts = [shared_attention(head_weights(queries[part], keys, part), part) for part in rows.split(128)]
        found[f"inputs.{layer}"] = decoder.inputs[layer].half()
        found[f"attention.{layer}"] = torch.cat(parts).half()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    save_file(found, unfinished)
    unfinished.replace(path)


def read_lesson(path: Path, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one layer: inputs [tokens, width] and attention [rows, tokens] in float16; positions of the rows."""
    with safe_open(path, framework="pt") as file:
        return (
            file.get_tensor(f"inputs.{layer}"),
            file.get_tensor(f"attention.{layer}"),
            file.get_tensor("rows"),
        )

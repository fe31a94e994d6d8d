"""A judged window as the model has seen it once, kept in a file for all that is asked of it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmark.native_scores.teacher import WatchedDecoder
from sgl_importance_lab.trained_model.decoder import Prefill


class Seen(Prefill):
    """A window's keys, values and queries with exact attention, and the inputs of all layers.

    Attributes:
        inputs: float16 [layers, tokens, width].
    """

    def __init__(self, decoder: WatchedDecoder, tokens: torch.Tensor, path: Path) -> None:
        if path.exists():
            found = load_file(path)
            self.keys, self.values, self.queries, self.inputs = (
                found[name] for name in ("keys", "values", "queries", "inputs")
            )
            return
        super().__init__(decoder, tokens, keeps_queries=True)
        self.inputs = torch.stack(decoder.inputs).half()
        parts = {"keys": self.keys, "values": self.values, "queries": self.queries, "inputs": self.inputs}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        save_file(parts, unfinished)
        unfinished.replace(path)

"""Attention as transformers computes it, to hold page scores against; and prompts that plant it."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.families import VOCABULARY

ASKING, ASKED = 4, 24
"""Tokens that are tried as the ones that attend, and as those attended to."""


def attention(model: Path, prompts: Sequence[Sequence[int]], layers: Sequence[int]) -> np.ndarray:
    """Mean over heads and layers, float32 [prompts, tokens, tokens]; the share of learnt sinks is left out.

    Args:
        model: folder of a checkpoint.
        prompts: token ids, all of one length.
        layers: by number; all of them attend.
    """
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", dtype=torch.float32)
    if loaded.config.model_type == "deepseek_v2":
        _mend_deepseek_v2(loaded)
    with torch.no_grad():
        found = loaded(torch.tensor([list(prompt) for prompt in prompts]), output_attentions=True).attentions
    attending = [layer for layer in found if layer is not None]
    if len(found) == loaded.config.num_hidden_layers:
        attending = [found[layer] for layer in layers]
    assert len(attending) == len(layers), "some layers of linear attention are left out, or none is"
    return torch.stack([layer.mean(1) for layer in attending]).mean(0).numpy()


def _mend_deepseek_v2(model: Any) -> None:
    """What transformers 5.12 has for DeepSeek-V3 only: YaRN's part of the scale, the number of experts."""
    yarn = model.config.rope_parameters
    scale = (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2
    for module in model.modules():
        if hasattr(module, "num_group") and not hasattr(module, "num_experts"):
            module.num_experts = model.config.n_routed_experts
        if hasattr(module, "scaling") and "mscale" not in inspect.getsource(type(module).__init__):
            module.scaling *= scale


@dataclass(frozen=True)
class Planted:
    """A prompt, and how much of the attention a stretch of it gets.

    Attributes:
        prompt: token ids.
        stretch: of its tokens.
        rows: what its last tokens attend to, on average; float32 [tokens].
    """

    prompt: list[int]
    stretch: slice
    rows: np.ndarray

    @property
    def share(self) -> float:
        """Of the attention, that the stretch gets."""
        return float(self.rows[self.stretch].sum())


def planted(
    model: Path, layers: Sequence[int], *, tokens: int, stretch: slice, window: int, seed: int
) -> tuple[Planted, Planted]:
    """Two prompts that end alike, with a stretch of one token that is attended to little, and one much.

    Args:
        tokens: of a prompt.
        window: last tokens of it, whose attention counts: one token over and over, whose choice differs most.
    """
    rng = random.Random(seed)
    common = rng.choices(range(10, VOCABULARY), k=tokens)
    length = stretch.stop - stretch.start
    wanted = rng.sample(range(10, VOCABULARY), ASKED)
    pairs = []
    for asking in rng.sample(range(10, VOCABULARY), ASKING):
        prompts = []
        for token in wanted:
            prompts.append([*common[:-window], *[asking] * window])
            prompts[-1][stretch] = [token] * length
        rows = attention(model, prompts, layers)[:, -window:].mean(1)
        tried = [Planted(prompt, stretch, row) for prompt, row in zip(prompts, rows, strict=True)]
        tried.sort(key=lambda each: each.share)
        pairs.append((tried[0], tried[-1]))
    return max(pairs, key=lambda pair: pair[1].share / pair[0].share)

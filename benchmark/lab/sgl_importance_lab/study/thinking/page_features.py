"""What is known of each page after a step, for a rule that learns which will be wanted soon."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sgl_importance_lab.study.thinking.keep_rules import EMA_DECAY
from sgl_importance_lab.study.thinking.wants import Wants

Features = npt.NDArray[np.float32]

LEAST_MASS = 1e-6
"""Below what a recording lists."""
PAGE_FEATURES = (
    "steps since it was wanted",
    "largest gap between two wants",
    "times wanted",
    "wants per step of its life",
    "attention now",
    "attention, averaged",
    "attention, most",
    "tokens back",
    "wanted now",
    "never wanted yet",
    "of the prompt",
    "entropy of the head's attention",
    "position",
    "a milestone",
    "logit of the next token above the second",
)
"""Counts, steps, positions and attention as logarithms; 0 where nobody knows milestones or logits. Behind
these, which head it is, one for each."""


def page_features(wants: Wants) -> Iterator[Features]:
    """Features after each step, from what was seen up to it; float32 [heads, columns, features]."""
    shape = wants.wanted.shape[1:]
    last, gap, count, average, most = (np.zeros(shape, np.float32) for _ in range(5))
    born = np.zeros(shape[1], np.float32)
    existed = 0
    head = np.broadcast_to(np.eye(shape[0], dtype=np.float32)[:, None, :], (*shape, shape[0]))
    in_prompt = np.broadcast_to(np.arange(shape[1]) < wants.prompt_pages, shape)
    position = np.broadcast_to(np.log1p((wants.first_page + np.arange(shape[1])) * wants.page_size), shape)
    milestone = np.broadcast_to(False if wants.milestones is None else wants.milestones, shape)
    for step, (wanted, mass) in enumerate(zip(wants.wanted, wants.mass, strict=True)):
        num_pages = int(wants.num_pages[step])
        last[:, existed:num_pages] = born[existed:num_pages] = step
        existed = num_pages
        again = wanted & (count > 0)
        gap[again] = np.maximum(gap[again], (step - last)[again])
        last[wanted] = step
        count += wanted
        average += (1 - EMA_DECAY) * (mass - average)
        most = np.maximum(most, mass)
        listed = np.maximum(mass, LEAST_MASS)
        entropy = np.broadcast_to(-(listed * np.log(listed)).sum(1, keepdims=True), shape)
        back = np.broadcast_to(np.maximum(num_pages - 1 - np.arange(shape[1]), 0) * wants.page_size, shape)
        found = (
            np.log1p(step - last),
            np.log1p(gap),
            np.log1p(count),
            count / (1 + step - born),
            np.log(listed),
            np.log(np.maximum(average, LEAST_MASS)),
            np.log(np.maximum(most, LEAST_MASS)),
            np.log1p(back),
            wanted,
            count == 0,
            in_prompt,
            entropy,
            position,
            milestone,
            np.full(shape, 0.0 if wants.margins is None else wants.margins[step]),
        )
        assert len(found) == len(PAGE_FEATURES)
        yield np.concatenate([np.stack(found, axis=-1).astype(np.float32), head], axis=-1)

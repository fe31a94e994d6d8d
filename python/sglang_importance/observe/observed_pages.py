"""The pages that one token attends to, as attention hands them to the recorder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Chosen = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Pages that a selector chose, ascending, and the share of attention that it estimated in each."""


@dataclass(frozen=True, slots=True)
class ObservedPages:
    """Of one token, the last one of a request in a pass; pages are counted from the start of its sequence.

    Attributes:
        forward_pass: number of the pass, from 1.
        seq_len: tokens that it sees, itself included.
        new_tokens: tokens of the request that the pass computes.
        layers: attention layers.
        pages: of largest attention mass, best first; int64 [layers, KV heads, listed pages].
        mass: of these, float32, the same shape.
        chosen: of each layer; None where all pages were read.
    """

    forward_pass: int
    seq_len: int
    new_tokens: int
    layers: tuple[int, ...]
    pages: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float32]
    chosen: tuple[Chosen | None, ...]

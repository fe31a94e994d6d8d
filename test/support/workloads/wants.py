"""Answers of which it is known what each head wanted: by hand, and drawn."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from sgl_importance_lab.study.thinking.wants import Wants


def wants_of(rows: list[list[int]], num_pages: list[int], prompt_pages: int = 0) -> Wants:
    """One head that wants the given pages at each step, with equal attention."""
    wanted = np.zeros((len(rows), 1, max(num_pages)), np.bool_)
    for step, row in enumerate(rows):
        wanted[step, 0, row] = True
    wants = Wants("thought/0", 16, 0, prompt_pages, np.array(num_pages), wanted, wanted / np.float32(4))
    wants.check_integrity()
    return wants


HEADS = st.integers(1, 3)


@st.composite
def random_wants(draw: st.DrawFn, heads: st.SearchStrategy[int] = HEADS, share: float = 0.1) -> Wants:
    """An answer whose heads want that share of the pages, at random."""
    steps, num_heads = draw(st.integers(2, 24)), draw(heads)
    num_pages = np.sort(np.array(draw(st.lists(st.integers(1, 12), min_size=steps, max_size=steps))))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mass = rng.random((steps, num_heads, int(num_pages[-1]))).astype(np.float32) ** 6
    exists = np.arange(mass.shape[2]) < num_pages[:, None]
    mass *= exists[:, None, :]
    wanted = np.zeros(mass.shape, np.bool_)
    for step in range(steps):
        best = np.argsort(-mass[step], axis=-1)[:, : int(np.ceil(share * num_pages[step]))]
        wanted[step, np.arange(num_heads)[:, None], best] = True
    wants = Wants("thought/0", 16, 0, draw(st.integers(0, 3)), num_pages, wanted, mass)
    wants.check_integrity()
    return wants

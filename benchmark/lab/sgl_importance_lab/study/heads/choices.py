"""Who chooses pages, a head or a layer, and what is moved, a page whole or one head of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from sgl_importance_lab.study.thinking.wants import Bools, Counts, Floats32, Wants

SINGLE_HEADS = "each head, single heads"
WHOLE_PAGES = "each head, whole pages"
LAYER_CHOICE = "the layer, whole pages"
SAME_ATTENTION = "the layer, same attention"


@dataclass(frozen=True, slots=True)
class Arm:
    """What is read, and in which units it is moved.

    Attributes:
        wants: where pages are moved whole, a layer is one of its heads.
        pool_heads: heads of ``wants`` that share the slots of a layer.
        unit_heads: KV heads that are moved together.
        covered: attention on what is read, [steps], of one per KV head.
    """

    wants: Wants
    pool_heads: int
    unit_heads: int
    covered: Floats32


def arms_of(wants: Wants, kv_heads: int) -> Mapping[str, Arm]:
    """The same tokens with each way to choose and to move.

    - Each head reads the pages that it wants; slots hold single heads of pages, of all heads of the layer.
    - The same, but a page is moved and kept with all its heads.
    - The layer reads as many pages, those with the largest attention of any head: what the server does.
    - The same, with as many pages as come nearest to the attention that the heads' own choices cover.

    Args:
        kv_heads: of a layer; ``wants`` has those of the first layer first.
    """
    steps, heads, columns = wants.wanted.shape
    assert heads % kv_heads == 0, (heads, kv_heads)
    by_layer = (steps, heads // kv_heads, kv_heads, columns)
    wanted, mass = wants.wanted.reshape(by_layer), wants.mass.reshape(by_layer)
    own = (mass * wanted).sum((1, 2, 3))
    whole = replace(wants, wanted=np.logical_or.reduce(wanted, axis=2), mass=mass.mean(2))
    counts = wants.wanted[:, :1].sum(2)  # every head wants as many
    order = np.argsort(-mass.max(2), axis=2, kind="stable")
    found = np.take_along_axis(mass.sum(2), order, axis=2).cumsum(2)
    needed = (mass * wanted).sum((2, 3))[:, :, None]
    nearest = 1 + np.abs(found - needed).argmin(2)
    arms = {SINGLE_HEADS: Arm(wants, kv_heads, 1, own), WHOLE_PAGES: Arm(whole, 1, kv_heads, own)}
    for name, count in ((LAYER_CHOICE, counts), (SAME_ATTENTION, nearest)):
        chosen = _first(order, np.broadcast_to(count, nearest.shape))
        covered = (mass.sum(2) * chosen).sum((1, 2))
        arms[name] = Arm(replace(whole, wanted=chosen), 1, kv_heads, covered)
    return arms


def _first(order: Counts, counts: Counts) -> Bools:
    """Whether a column is among the first of an order; both [steps, layers, ...]."""
    chosen = np.zeros(order.shape, np.bool_)
    np.put_along_axis(chosen, order, np.arange(order.shape[2]) < counts[:, :, None], axis=2)
    return chosen

"""What a token waits for when pages lie in HBM, DRAM and on flash, placed by a rule that keeps pages."""

from __future__ import annotations

import numpy as np

from sgl_importance_lab.study.links import BY_GATHER, FROM_FLASH, LINKS, unit_bytes
from sgl_importance_lab.study.thinking.measures import Parts
from sgl_importance_lab.study.thinking.rule_run import RuleRun
from sgl_importance_lab.study.thinking.wants import Wants


def stall(wants: Wants, in_hbm: RuleRun, in_dram: RuleRun) -> Parts:
    """Microseconds that steps wait, and steps; [1, 2].

    Heads of pages as large models have them. What a layer's step lacks in HBM comes from DRAM in one gather,
    and what DRAM lacks from flash at once; layers wait one after the other.

    Args:
        wants: that both runs are of.
        in_hbm: with room for what HBM holds.
        in_dram: with room for what HBM and DRAM hold together; the rest is on flash.
    """
    from_flash = _by_layer(in_dram, wants)
    from_dram = np.maximum(_by_layer(in_hbm, wants) - from_flash, 0)
    unit = unit_bytes(wants.page_size, 1)
    seconds = sum(
        LINKS[link].seconds(int(units.sum()), int((units > 0).sum()), unit)
        for link, units in ((BY_GATHER, from_dram), (FROM_FLASH, from_flash))
    )
    return np.array([[1e6 * seconds, wants.num_steps]])


def _by_layer(run: RuleRun, wants: Wants) -> Parts:
    """Loads of each step and layer."""
    loads: Parts = run.loads.reshape(wants.num_steps, -1, wants.layer_heads).sum(2).astype(np.float64)
    return loads

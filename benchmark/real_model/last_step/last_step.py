"""A plugin for benchmarks: ``bits`` chooses pages by the query of the step before, one request at a time.

So every page could be copied while the rest of that step is computed. A request's first step goes by its own.
Found by sglang through the dist-info in its folder, where PYTHONPATH names it; no part of the package.
"""

from __future__ import annotations

from typing import Any

import torch

_before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Pages and queries of the last step in each layer."""


def estimate_by_last_step(estimate: Any, selector: Any, queries: torch.Tensor, pages: Any) -> torch.Tensor:
    numbers, last = pages.numbers, _before.get(pages.layer)
    _before[pages.layer] = numbers.clone(), queries.clone()
    if last is not None and goes_on(last[0], numbers):
        queries = last[1]
    result: torch.Tensor = estimate(selector, queries, pages)
    return result


def goes_on(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether these are pages of the same request a step later: another has fewer, or others."""
    return len(before) <= len(now) <= len(before) + 1 and torch.equal(before, now[: len(before)])


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    estimate = "sgl_importance_kernels.sparse.selectors.mean_and_bits.MeanAndBits.logits"
    HookRegistry.register(estimate, estimate_by_last_step, HookType.AROUND)

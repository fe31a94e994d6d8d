"""Shims without which unmodified sglang does not serve on a machine without an accelerator.

sglang calls ``activate`` through the ``sglang.srt.platforms`` entry point, inside the first ``import sglang``
of every process, early enough to mend imports; ``install`` comes with our plugin, when sglang can be
imported. Both do nothing where an accelerator is visible.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_applied: list[str] = []
_activated = False
_installed = False


def applied_shims() -> tuple[str, ...]:
    """Names of the shims that were needed in this process so far."""
    return tuple(_applied)


def accelerator_visible() -> bool:
    """Whether torch can see a GPU or another accelerator."""
    import torch

    return torch.accelerator.is_available()


def activate() -> None:
    """Mends the imports of this process, once. Returns no platform, so sglang keeps its own choice."""
    global _activated
    if _activated or accelerator_visible():
        return
    _activated = True
    from sglang_importance.cpu.defaults import SpinningThreads
    from sglang_importance.cpu.gated_delta import GatedDeltaKernels
    from sglang_importance.cpu.imports import CpuEngine, CudaOnlyPackages, SglKernel, TorchvisionOperators
    from sglang_importance.cpu.shim import apply_needed
    from sglang_importance.cpu.speculation import SpeculationKernels

    _applied.extend(
        apply_needed(
            (
                CpuEngine(),
                SpinningThreads(),
                TorchvisionOperators(),
                CudaOnlyPackages(),
                SglKernel(),
                SpeculationKernels(),
                GatedDeltaKernels(),
            )
        )
    )


def install() -> None:
    """Covers what fails after the imports: allocator, host tier, attention, pool size. Once per process.

    Raises:
        ValueError: the environment has a choice that does not exist.
    """
    global _installed
    if _installed or accelerator_visible():
        return
    from sglang_importance.cpu.allocator import PagedAllocatorKernels
    from sglang_importance.cpu.attention import (
        DecodeCopiesContext,
        ExtendComputesCachedRows,
        keeps_upstream,
    )
    from sglang_importance.cpu.defaults import (
        AbsorbedLatentAttention,
        CompiledSamplers,
        PaddedBatches,
        PoolTakesAllMemory,
        StatesWithoutBuffer,
    )
    from sglang_importance.cpu.experts import ExpertsOfOtherRanks, SharedExpertGate
    from sglang_importance.cpu.gated_delta import GatedNorm
    from sglang_importance.cpu.host_pool import (
        DirectTransfers,
        SmallerReserve,
        TransferKernels,
        UnpinnedHostMemory,
    )
    from sglang_importance.cpu.shim import apply_needed
    from sglang_importance.cpu.unpinned_adapters import UnpinnedAdapters
    from sglang_importance.cpu.verified_drafts import DraftsInTorch, VerifiedDrafts
    from sglang_importance.cpu.window_attention import WindowPoolAndSinks

    own_attention = () if keeps_upstream() else (ExtendComputesCachedRows(), DecodeCopiesContext())
    _installed = True
    applied = apply_needed(
        (
            PagedAllocatorKernels(),
            UnpinnedHostMemory(),
            SmallerReserve(),
            TransferKernels(),
            DirectTransfers(),
            *own_attention,
            VerifiedDrafts(),  # under the next: that one takes sinks
            WindowPoolAndSinks(),
            AbsorbedLatentAttention(),
            PaddedBatches(),
            UnpinnedAdapters(),
            ExpertsOfOtherRanks(),
            GatedNorm(),
            SharedExpertGate(),
            StatesWithoutBuffer(),
            DraftsInTorch(),
            CompiledSamplers(),
            PoolTakesAllMemory(),
        )
    )
    _applied.extend(applied)
    logger.info("KV importance: No accelerator is visible: serving on the CPU with %s", ", ".join(_applied))

"""Defaults that suit a machine whose only memory is the one that everything else lives in."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_importance.cpu.shim import Shim

logger = logging.getLogger(__name__)

DEFAULT_POOL_TOKENS = 16_384


class SpinningThreads(Shim):
    defect = "libgomp threads spin: on few cores a small linear takes 8 ms with 4 threads and 30 us with one"

    def needed(self) -> bool:
        return "OMP_NUM_THREADS" not in os.environ

    def apply(self) -> None:
        torch.set_num_threads(1)


class PoolTakesAllMemory(Shim):
    defect = "the KV pool is sized from free RAM: 17 GB for a 5 MB model (arg_groups/memory_hook.py:47)"

    def needed(self) -> bool:
        return True

    def apply(self) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        def bound_pool(server_args: Any, resolve: Callable[[Any], None]) -> None:
            given = resolving_view(server_args)
            if given.max_total_tokens is None and given.mem_fraction_static is None:
                declare_resolution(server_args, "sgl_importance.cpu", max_total_tokens=DEFAULT_POOL_TOKENS)
                logger.info(
                    "KV importance: CPU: the KV pool holds %d tokens; --max-total-tokens changes that",
                    DEFAULT_POOL_TOKENS,
                )
            resolve(server_args)

        register_resolution_hook("handle_gpu_memory_settings")(bound_pool)

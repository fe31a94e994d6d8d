"""Defaults that suit a machine whose only memory is the one that everything else lives in."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
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
    defect = "without --max-total-tokens the KV pool is sized from free RAM: 17 GB for a 5 MB model"

    def needed(self) -> bool:
        return True

    def apply(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def bound_pool(cls: Any, args: Namespace) -> None:
            if getattr(args, "max_total_tokens", None) is None:
                args.max_total_tokens = DEFAULT_POOL_TOKENS
                logger.info("CPU: --max-total-tokens defaults to %d", DEFAULT_POOL_TOKENS)

        HookRegistry.register("sglang.srt.server_args.ServerArgs.from_cli_args", bound_pool, HookType.BEFORE)

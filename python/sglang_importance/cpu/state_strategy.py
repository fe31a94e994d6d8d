"""How states of linear attention are kept for the radix tree on a CPU."""

from __future__ import annotations

from typing import Any

from sglang_importance.cpu.shim import Shim


class StatesWithoutBuffer(Shim):
    defect = (
        "'auto' chooses the strategy extra_buffer for linear attention (arg_groups/overrides.py:454), which "
        "a CPU is refused then (arg_groups/mamba_hook.py:106); XPUs are spared the choice"
    )

    def needed(self) -> bool:
        from sglang.srt.arg_groups import overrides

        return overrides.supports_mamba_cache_extra_buffer is not _never

    def apply(self) -> None:
        from sglang.srt.arg_groups import overrides

        overrides.supports_mamba_cache_extra_buffer = _never


def _never(view: Any, hf_config: Any) -> bool:
    return False

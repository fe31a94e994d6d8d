"""The arms: what distinguishes one server from the next. Everything else is the same for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmark.serving.workloads import Workload

PYTHON_CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
STOCK = "stock LRU"  # what every ratio is to
OURS = "ours"
# The goal compares with the best of these.
PUBLISHED = ("LRU (Python core)", "slru", "tlru", "lfu")


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration of the server.

    Attributes:
        flags: added to those that all arms share.
        env: added to the environment.
        learns: whether ``/flush_cache`` leaves something behind, so that each workload needs a fresh server.
        has_cache: whether tiers below the device can be attached.
        g: whether attention has a say in evictions, as ``signal.g`` says it.
        same_as: arm that makes the same decisions; its rows are copied, and say so.
        same_on: servers, by their lowest tier, where ``same_as`` holds.
    """

    flags: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    learns: bool = False
    has_cache: bool = True
    g: str = "off"
    same_as: str | None = None
    same_on: tuple[str, ...] = ("device", "host", "storage")

    def is_copy(self, tiers: str) -> bool:
        """Whether a server with these tiers need not be measured."""
        return self.same_as is not None and tiers in self.same_on


# sglang refuses T-LRU without: the tokens that may be computed within the target, and those of a next turn.
TLRU_CONFIG = {"threshold": 256, "next_prompt_estimate": 64}
BY_DEPTH = "importance, by depth"
"""A control of the replay only: a deep token's loss counts what attending to the tokens before it takes."""


def _published(policy: str, *flags: str) -> Arm:
    return Arm(("--kv-policy", "default", "--radix-eviction-policy", policy, *flags), env=PYTHON_CORE)


def _ours(*flags: str, **facts: Any) -> Arm:
    return Arm(("--kv-policy", "importance", *flags), learns=True, **facts)


ARMS: dict[str, Arm] = {
    "no cache": Arm(("--kv-policy", "default", "--disable-radix-cache"), has_cache=False),
    STOCK: Arm(("--kv-policy", "default")),
    "LRU (Python core)": _published("lru"),
    "slru": _published("slru"),
    "tlru": _published("tlru", "--radix-eviction-policy-config", json.dumps(TLRU_CONFIG)),
    "lfu": _published("lfu"),
    OURS: _ours(),
    # As shipped: g = 1, pins on request, pre-warms at start.
    "ours (g = 1)": _ours(same_as=OURS),
    "ours (no pins)": _ours("--kv-importance-pin-budget", "0", same_as=OURS),
    "ours (no pre-warm)": _ours("--kv-importance-prewarm", "off", same_as=OURS, same_on=("device", "host")),
    "ours (g on)": _ours(g="on"),
    "ours (g shuffled)": _ours(g="shuffled"),
}


def server_flags(
    arm: Arm, workload: Workload, parameters: Mapping[str, Any], device_tokens: int, store: str
) -> tuple[str, ...]:
    """All flags of the server that serves ``workload`` under ``arm``.

    Args:
        arm: of ``ARMS``.
        workload: says which tiers there are.
        parameters: what was committed.
        device_tokens: size of the device pool.
        store: directory of the storage tier.
    """
    flags = ["--page-size", str(parameters["page_tokens"]), "--max-total-tokens", str(device_tokens)]
    if workload.tiers != "device" and arm.has_cache:
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", str(parameters["host_ratio"])]
    if workload.tiers == "storage" and arm.has_cache:
        flags += ["--kv-importance-store", store, "--hicache-storage-prefetch-policy", "wait_complete"]
    return (*flags, *arm.flags)

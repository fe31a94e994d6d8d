"""Backends of upstream that can lie under the verified store, and how each moves values."""

from __future__ import annotations

from enum import Enum
from typing import Any

DYNAMIC = "dynamic"


class Interface(Enum):
    """The methods of a backend that upstream's controller calls (managers/cache_controller.py)."""

    VALUES = "get and set, with a tensor of any size"
    BLOCKS = "get and set, with a tensor of the host pool's page size"
    ZERO_COPY = "batch_get_v1 and batch_set_v1, straight from and to pages of the host pool"


INTERFACES: dict[str, Interface] = {
    "file": Interface.VALUES,
    "aibrix": Interface.BLOCKS,
    **dict.fromkeys(
        ("mooncake", "nixl", "hf3fs", "eic", "simm", "mori", "npu_memcache", "tensorcast"),
        Interface.ZERO_COPY,
    ),
}
# Backends that real servers have run under the wrapper, with faults injected.
TESTED = ("file",)
UNUSABLE = {
    "sim": "it keeps names and no bytes, so there is nothing to verify",
    "shm": "it stores nothing: it only places the host pool in shared memory",
}


def interface_of(name: str, settings: dict[str, Any]) -> Interface:
    """The interface of the backend ``name``; a dynamic one says so itself, as upstream has it.

    Raises:
        ValueError: nothing is known about ``name``.
    """
    if name == DYNAMIC:
        return Interface.ZERO_COPY if settings.get("interface_v1") else Interface.BLOCKS
    if name not in INTERFACES:
        raise ValueError(f"unknown storage backend {name}")
    return INTERFACES[name]

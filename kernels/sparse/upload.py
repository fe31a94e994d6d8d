"""Numbers of the host on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str) -> torch.Tensor:
    """Numbers as int64 on a device, of the shape of the lists; the host does not wait for it."""
    on_host = torch.tensor(numbers, dtype=torch.int64)
    if torch.device(device).type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)

"""FlashAttention 3's decode over the same paged cache, from whichever package brings it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from decode_shape import LAYERS, Inputs

PACKAGES = ("sgl_kernel.flash_attn", "flash_attn_interface")
TOLERANCE = 2e-2  # Of outputs in bfloat16, whose values are means of normal numbers.


@dataclass(frozen=True)
class Fa3Kernel:
    """FA3's ``flash_attn_with_kvcache`` of a package."""

    package: str
    decode: Callable[..., torch.Tensor]


def usable_kernel(inputs: Inputs) -> tuple[Fa3Kernel | None, str]:
    """The first that runs on this machine; else None and why not."""
    why = "no package has it: " + ", ".join(PACKAGES)
    for package in PACKAGES:
        try:
            kernel = Fa3Kernel(package, importlib.import_module(package).flash_attn_with_kvcache)
            Fa3Arm(inputs, kernel.decode).run(0)
        except (ImportError, AttributeError):
            continue
        except Exception as error:  # What foreign compiled code raises on a card that it is not made for.
            why = f"{package} does not run: {error}"
            continue
        return kernel, ""
    return None, why


class Fa3Arm:
    """Stock attention of FA3 over every layer; it cannot emit, so qk-probe runs beside it."""

    def __init__(self, inputs: Inputs, kernel: Callable[..., torch.Tensor]) -> None:
        shape = inputs.shape
        self._inputs = inputs
        self._kernel = kernel
        self._lengths = inputs.indptr.diff()
        self._page_table = inputs.indices.view(shape.batch, shape.context)

    def run(self, layer: int) -> torch.Tensor:
        inputs = self._inputs
        settings: dict[str, Any] = {"softmax_scale": inputs.shape.scale, "causal": True}
        output = self._kernel(
            inputs.q[layer].unsqueeze(1),
            inputs.k[layer].unsqueeze(1),  # Pages of one token, as SGLang plans them.
            inputs.v[layer].unsqueeze(1),
            cache_seqlens=self._lengths,
            page_table=self._page_table,
            **settings,
        )
        return output.squeeze(1)

    def step(self) -> None:
        for layer in range(LAYERS):
            self.run(layer)

    def difference(self, stock: list[torch.Tensor]) -> float:
        """Largest difference to stock's outputs."""
        return max(float((self.run(i).float() - stock[i].float()).abs().max()) for i in range(LAYERS))

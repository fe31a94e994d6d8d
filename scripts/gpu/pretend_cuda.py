"""Imports sglang's server as if a GPU were there: whether the stand-ins give what is imported on CUDA.

    python scripts/gpu/pretend_cuda.py

For a Python with a torch built for CUDA and no device, and what `scripts/gpu.sh serve` puts on its path.
Nothing is called, and nothing can be.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tokenizer_manager",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.layers.attention.triton_backend",
    "sglang.srt.compilation.weak_ref_tensor",
    "sglang.srt.models.llama",
)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    shared_memory_per_block_optin=232_448,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


def main() -> None:
    sys.path.append(str(Path(__file__).parent / "stand_ins"))
    os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    import torch

    if torch.version.cuda is None:
        sys.exit("error: this torch was not built for CUDA")
    pretended = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": H100.name,
        "get_device_capability": (H100.major, H100.minor),
        "get_device_properties": H100,
        "_lazy_init": None,
    }
    for name, value in pretended.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in MODULES:
        importlib.import_module(name)
        print("imported", name, flush=True)


if __name__ == "__main__":
    main()

"""Stands in for flashinfer-python, for which there is no room beside sglang: imported on CUDA, never called.

With --sampling-backend pytorch, --attention-backend triton and SGLANG_IS_FLASHINFER_AVAILABLE=false.
"""

from unusable import Submodules
from unusable import unusable as __getattr__  # noqa: F401

Submodules(__name__).install()

"""A plugin that keeps sglang from compiling its small functions: several seconds at each start of a server.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations


def register() -> None:
    import torch._dynamo

    torch._dynamo.config.disable = True

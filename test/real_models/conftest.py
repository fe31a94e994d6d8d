"""transformers can be imported on a machine without an accelerator once the CPU runtime is in place."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def runtime() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()

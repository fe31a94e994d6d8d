"""The CPU runtime installed, as sglang's processes have it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def runtime() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()

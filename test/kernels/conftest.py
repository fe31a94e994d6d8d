"""Where kernels run: on a CUDA device, or in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import os

import pytest
import torch

from support.interpreter import patch_once_a_launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    patch_once_a_launch()


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("triton") is None or INTERPRETED:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device: see test_interpreter.py"))

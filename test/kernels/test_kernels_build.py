"""``sgl-importance kernels build`` in the interpreter, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

COMMAND = [sys.executable, "-W", "ignore", "-c", "from sgl_importance_kernels.cli import app; app()", "build"]


def run(*arguments: str, interpreted: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_it_runs_every_window_once() -> None:
    sizes = ["--head-dim", "16", "--heads", "4", "--kv-heads", "2", "--layers", "1", "--window", "4"]
    done = run(*sizes, "--dtype", "float32", interpreted=True)
    assert done.returncode == 0, done.stderr
    assert "built for heads of 16, 4/2 heads, pages of 16 on cpu" in " ".join(done.stdout.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_device_it_says_where_to_build() -> None:
    done = run(interpreted=False)
    assert done.returncode == 1
    assert "compiled on the machine that runs them" in " ".join(done.stdout.split())


def test_bad_sizes_are_named() -> None:
    done = run("--heads", "6", "--kv-heads", "4", interpreted=True)
    assert done.returncode == 2
    assert "6 query heads over 4 KV heads" in done.stderr


def test_windows_cover_every_tile_once() -> None:
    from sgl_importance_kernels.triton.warm_up import WarmUp

    model = WarmUp(64, 8, 2, 16, 1, torch.float32, "cpu")
    assert model.windows(1) == [1]
    assert model.windows(32) == [1, 2, 4, 8, 16, 32]
    assert model.windows(100) == [1, 2, 4, 8, 16, 100]

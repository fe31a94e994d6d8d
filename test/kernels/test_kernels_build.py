"""``sgl-importance kernels build`` in the interpreter, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from sgl_importance_lab.kernels import cli
from sgl_importance_lab.kernels.cli import app

triton = pytest.importorskip("triton")

RUN = "from sgl_importance_lab.kernels.cli import app; app()"
COMMAND = [sys.executable, "-W", "ignore", "-c", RUN, "build"]


def plain(output: str) -> str:
    """Without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", output).split())


@pytest.mark.nightly
def test_it_runs_every_window_once_of_a_quantized_cache_with_a_soft_cap() -> None:
    """In the interpreter, which needs a process of its own."""
    sizes = ["--head-dim", "16", "--heads", "4", "--kv-heads", "2", "--layers", "1", "--window", "4"]
    form = ["--kv-cache-dtype", "fp8_e4m3", "--logit-cap", "30"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*COMMAND, *sizes, *form], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "built for heads of 16, 4/2 heads, pages of 16 on cpu" in " ".join(done.stdout.split())


def test_heads_without_a_kernel_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_device", lambda: "cpu")
    done = CliRunner().invoke(app, ["build", "--head-dim", "512"])
    assert done.exit_code == 2
    assert "heads of 512 dimensions, more than 256" in plain(done.output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter needs no device")
def test_without_a_device_it_says_where_to_build() -> None:
    done = CliRunner().invoke(app, ["build"])
    assert done.exit_code == 1
    assert "compiled on the machine that runs them" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "6", "--kv-heads", "4"], "6 query heads over 4 KV heads"),
        (["--dtype", "int8"], "must be one of bfloat16, float16, float32, not int8"),
        (["--kv-cache-dtype", "fp4"], "must be one of auto, fp8_e4m3, fp8_e5m2, not fp4"),
        *(
            ([option, "0"], f"Invalid value for '{option}'")
            for option in ("--head-dim", "--heads", "--kv-heads", "--page-size", "--window", "--layers")
        ),
    ],
)
def test_bad_values_are_named(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["build", *arguments])
    assert done.exit_code == 2
    assert words in plain(done.output)


def test_windows_cover_every_tile_once() -> None:
    from sgl_importance_lab.kernels.warm_up import WarmUp

    model = WarmUp(64, 8, 2, 16, 1, torch.float32, "cpu")
    assert model.windows(1) == [1]
    assert model.windows(32) == [1, 2, 4, 8, 16, 32]
    assert model.windows(100) == [1, 2, 4, 8, 16, 100]

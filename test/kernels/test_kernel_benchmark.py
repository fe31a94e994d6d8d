"""The kernel benchmark's own way through build, checks, arms and JSON, on tiny shapes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmark" / "kernels" / "run.py"

pytest.importorskip("triton")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_dry_run_checks_times_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    done = run("--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stderr
    facts, *rows = json.loads(out.read_text())["rows"]
    assert facts["device"] == "interpreter"
    assert set(facts["errors"]) == {"qk-probe", "reduction", "replays"}
    assert all(0 < error < 1e-4 for error in facts["errors"].values())
    assert {entry["arm"] for entry in rows} == {
        "stock",
        "emitting+reduction",
        "qk-probe alone",
        *(f"whole step, {how}" for how in ("stock", "unobserved", "together", "in turns")),
    }
    assert all(entry["to_stock"] == 1 for entry in rows if entry["arm"].endswith("stock"))
    assert len({entry["shape"] for entry in rows}) == 2


def test_shapes_beyond_the_time_limit_are_named(tmp_path: Path) -> None:
    done = run("--dry-run", "--minutes", "0", "--out", str(tmp_path / "kernels.json"))
    assert done.returncode != 0
    assert "raise --minutes" in done.stderr


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run()
    assert done.returncode != 0
    assert "no CUDA device: run it on a GPU, or with --dry-run" in done.stderr

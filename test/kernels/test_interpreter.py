"""Runs the Triton tests of this folder in Triton's interpreter.

Triton decides while it is imported whether kernels are compiled or interpreted, and sglang, which other tests
import, needs it to compile: so the interpreter gets a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
MODULES = sorted(path.name for path in HERE.glob("test_*.py") if "mark.triton" in path.read_text())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter's process")
@pytest.mark.parametrize("nightly", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_in_the_interpreter(nightly: bool) -> None:
    modules = [name for name in MODULES if name != Path(__file__).name]
    assert modules
    which = ["-m", f"{'' if nightly else 'not '}nightly and not gpu"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--maxfail=3",
        "-p",
        "no:cacheprovider",
        *which,
        *modules,
    ]
    run = subprocess.run(
        command,
        cwd=HERE,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,  # ends a hang, and says nothing of speed
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout, run.stdout
    assert " skipped" not in run.stdout, run.stdout

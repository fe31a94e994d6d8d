"""``benchmark/kernels/count_step.py``: by day test/kernels/test_counted_step.py counts smaller batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
MOST_LAUNCHES = 6
"""A layer's: write, scan, choose, place, bring, attend."""


@pytest.mark.nightly
def test_a_step_waits_for_nothing_and_launches_alike_for_any_batch(tmp_path: Path) -> None:
    """In a process of its own: Triton decides at its import whether it interprets."""
    out = tmp_path / "counts.json"
    command = [sys.executable, "benchmark/kernels/count_step.py", "--json", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=900)  # ends a hang
    rows = json.loads(out.read_text())["rows"]
    assert [(row["selector"], row["batch"]) for row in rows] == [
        (selector, batch) for selector in ("token", "bits") for batch in (1, 16, 64)
    ]
    assert not any(row["host_syncs_per_step"] for row in rows), rows[0]["syncs"]
    assert len({row["launches_per_layer"] for row in rows}) == 1
    assert len({row["launches_per_step"] for row in rows}) == 1
    assert rows[0]["launches_per_layer"] <= MOST_LAUNCHES

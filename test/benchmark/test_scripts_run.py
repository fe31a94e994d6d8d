"""Every benchmark script runs: not what it measures is looked at, but that it fits what it measures."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm_start

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmark"
REPLAYED = ("policy.py",)
DAY = "day.py"
SMALLEST = {
    "emission.py": ("--layers", "1", "--rounds", "1"),
    "get_importance.py": ("--prompts", "5", "--rounds", "2"),
    "metrics_publishing.py": ("--requests", "5"),
    "sparse/layer.py": ("--contexts", "4096", "--selected", "512", "--steps", "1"),
    "sparse/rebuilding.py": ("--context", "64", "--tries", "1"),
    "sparse/step.py": ("--dry-run",),
    "replay.py": ("--requests", "100", "--repeats", "1", "--jobs", "1"),
    "scheduler_cost.py": ("--lives", "3"),
    "states.py": ("--requests", "3", "--seeds", "1"),
    "storage.py": ("--megabytes", "8", "--page-tokens", "1"),
    "tree.py": ("--leaves", "20", "--rounds", "2"),
}
# They run for minutes, most of them with servers, and what they run has tests of its own.
COMPARED = "kv_size.py"
ONLY_READ = sorted(
    {
        str(file.relative_to(FOLDER))
        for file in FOLDER.rglob("*.py")
        if "lab" not in file.relative_to(FOLDER).parts and '__name__ == "__main__"' in file.read_text()
    }
    - {*SMALLEST, *REPLAYED, COMPARED, DAY}
)
TOO_SMALL = (("soak.py", ("--operations", "4999")), ("storage.py", ("--megabytes", "1")))
NO_OUT = ("metrics_publishing.py",)
INTERPRETED = ("sparse/step.py",)  # Triton's interpreter is chosen before Triton is imported
HANG_SECONDS = 600.0


def _ran(script: str, *arguments: str | Path, warm: bool = False) -> subprocess.CompletedProcess[str]:
    return warm_start.run(
        [sys.executable, str(FOLDER / script), *map(str, arguments)],
        env={**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        folder=ROOT,
        limit=HANG_SECONDS,
        imports_anew=not warm,
    )


def _run(script: str, *arguments: str | Path, warm: bool = False) -> str:
    ran = _ran(script, *arguments, warm=warm)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.stdout


# Most import sglang, numba or torch, and do so from a warm start, with the paths of a new interpreter. Two
# start as a user starts them, kv_size.py, and soak.py where it is to refuse; and what runs Triton.
@pytest.mark.parametrize("script", SMALLEST)
def test_script_runs_in_its_smallest_size(script: str, tmp_path: Path) -> None:
    if script in NO_OUT:
        assert "median" in _run(script, *SMALLEST[script], warm=True)
        return
    out = tmp_path / "rows.json"
    _run(script, *SMALLEST[script], "--out", out, warm=script not in INTERPRETED)
    assert json.loads(out.read_text())["rows"]


def test_committed_sizes_are_those_of_the_code(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    _run(COMPARED, "--out", out)
    committed = json.loads((FOLDER / "results" / "kv_size.json").read_text())
    assert json.loads(out.read_text())["rows"] == committed["rows"], "run python benchmark/kv_size.py"


@pytest.mark.parametrize("script", REPLAYED)
def test_script_replays_a_trace(script: str, tmp_path: Path) -> None:
    trace, out = tmp_path / "conversation.jsonl", tmp_path / "rows.json"
    _write_conversation(trace, requests=40)
    _run(script, "--mooncake", trace, "--jobs", "1", "--out", out, warm=True)
    assert json.loads(out.read_text())["rows"]


def test_a_day_is_made_of_traces_and_replayed(tmp_path: Path) -> None:
    traces, out = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"], tmp_path / "rows.json"
    for trace in traces:
        _write_conversation(trace, requests=40)
    _run(DAY, *traces, "--accesses", "3000", "--policies", "lru,importance", "--out", out, warm=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["lru", "importance"]
    assert all(2900 < row["accesses"] <= 3000 and 0 < row["block_hit_rate"] < 1 for row in rows)


def _write_conversation(path: Path, *, requests: int) -> None:
    """Turns of a few sessions, in the format of Mooncake's traces: blocks of 512 tokens by name."""
    dice, sessions, blocks = random.Random(0), [[0] for _ in range(5)], 1
    with path.open("w") as file:
        for number in range(requests):
            session = dice.choice(sessions)
            session += range(blocks, blocks + 3)
            blocks += 3
            turn = {"input_length": 512 * len(session), "output_length": 64, "hash_ids": session}
            file.write(json.dumps({"timestamp": 500 * number, **turn}) + "\n")


@pytest.mark.parametrize("script", ONLY_READ)
def test_script_explains_itself(script: str) -> None:
    assert "options" in _run(script, "--help", warm=True).lower()


@pytest.mark.parametrize(("script", "size"), TOO_SMALL)
def test_script_names_a_size_that_is_too_small(script: str, size: tuple[str, str], tmp_path: Path) -> None:
    ran = _ran(script, *size, "--out", tmp_path / "rows.json", warm=script != "soak.py")
    assert ran.returncode == 2, ran.stderr
    assert " ".join(size) in ran.stderr
    assert "Traceback" not in ran.stderr

"""Runs the core where only the wheel and what it asks for is installed: no sglang, no torch, no checkout.

With the laboratory's wheel beside it, what that adds is run too.

Run by scripts/release.py with the Python of an empty environment; prints one line for each thing that works.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import sgl_importance

HAS_LABORATORY = find_spec("sgl_importance_lab") is not None
ABSENT = ("sglang", "torch", "triton", "transformers", "matplotlib", "zstandard", "psycopg")
# Imported when a database is named, for the tree of sglang, for a model, for kernels, or in a server that
# runs a control arm.
NEEDS_MORE = (
    "sgl_importance.placement.ledger.postgres_database",
    "sgl_importance_lab.bench.harness_call",
    "sgl_importance_lab.conformance.page_scores",
    "sgl_importance_lab.kernels.warm_up",
    "sgl_importance_lab.offline.standalone_cache",
    "sgl_importance_lab.offline.tree_replay",
    "sgl_importance_lab.replay.residency.compared_histories",
    "sgl_importance_lab.replay.residency.residency_replay",
    "sgl_importance_lab.trained_model.decoder",
    "sgl_importance_lab.trained_model.decoder_shape",
    "sgl_importance_lab.trained_model.layer_choice",
    "sgl_importance_lab.trained_model.planted_questions",
)
CONTROL_ARMS = "sgl_importance_lab.selectors."

# One request for two blocks and one for a third, twice. With room for three all that come again are hit; with
# room for two LRU gives the second's place to the third, and the first is all that is hit.
TRACE = [(0, [0, 1]), (1, [2]), (2, [0, 1]), (3, [2])]
LRU_HITS = {2: 1, 3: 3}


def command(*arguments: str, fails: bool = False) -> str:
    """What a command prints; its error where it is to fail."""
    program = Path(sys.executable).with_name("sgl-importance")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert bool(done.returncode) == fails, f"{' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stderr if fails else done.stdout


def replayed_hits() -> dict[int, int]:
    lines = [
        {"timestamp": second * 1000, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for second, ids in TRACE
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    capacities = ",".join(map(str, LRU_HITS))
    command(
        "replay", "trace.jsonl", "--policies", "lru", "--capacity-blocks", capacities, "--json", "rows.json"
    )
    return {row["capacity_blocks"]: row["hit_blocks"] for row in json.loads(Path("rows.json").read_text())}


def check_imports(package: ModuleType) -> None:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names = {each.name for each in found if not each.name.startswith(CONTROL_ARMS)}.difference(NEEDS_MORE)
    assert names
    for name in names:
        importlib.import_module(name)
    assert not any(sys.modules.get(name) for name in ("sglang", "torch"))
    print(f"    {len(names)} modules of {package.__name__} import without {', '.join(ABSENT)}")


def check_core() -> None:
    check_imports(sgl_importance)
    print(f"    {command('--version').strip()}, help of {len(command('--help').splitlines())} lines")
    (line,) = command("replay", "trace.jsonl", fails=True).splitlines()
    assert "pip install './benchmark/lab'" in line
    print("    a command of the laboratory says how to get it")


def check_laboratory() -> None:
    check_imports(importlib.import_module("sgl_importance_lab"))
    assert replayed_hits() == LRU_HITS
    assert "FAIL" not in command("conformance", "consumer", "sgl_importance_lab.conformance.memory:model")
    assert json.loads(command("probe", "prompt", "--length", "64"))["answer"]
    for needs_torch in (("kernels", "build"), ("layers", ".")):
        assert "this command needs torch, which is not installed" in command(*needs_torch, fails=True)
    print("    a command that needs torch says so")
    print("    replay, conformance cases, prompts of the embedded model")


if __name__ == "__main__":
    present = [name for name in ABSENT if find_spec(name)]
    assert not present, f"this environment is not empty: it has {', '.join(present)}"
    assert Path(sgl_importance.__path__[0]).is_relative_to(sys.prefix), "a checkout stands in for the wheel"
    check_laboratory() if HAS_LABORATORY else check_core()

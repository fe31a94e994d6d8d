"""Runs the core where only the wheel and what it asks for is installed: no sglang, no torch, no checkout.

    python -P check_install.py VERSION

Run by scripts/release.py with the Python of an empty environment; prints one line for each thing that works.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ABSENT = ("sglang", "torch", "triton", "transformers", "matplotlib", "zstandard")
LIMIT_SECONDS = 120

# One request for two blocks and one for a third, twice. With room for three all that come again are hit; with
# room for two LRU gives the second's place to the third, and the first is all that is hit.
TRACE = [(0, [0, 1]), (1, [2]), (2, [0, 1]), (3, [2])]
LRU_HITS = {2: 1, 3: 3}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("sgl-importance")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def command(*arguments: str) -> str:
    """The output of a command that succeeds."""
    done = run(*arguments)
    assert done.returncode == 0, f"sgl-importance {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}"
    return done.stdout


def nothing_else_is_here() -> str:
    present = [name for name in ABSENT if find_spec(name)]
    assert not present, f"this environment is not empty: it has {', '.join(present)}"
    return f"without {', '.join(ABSENT)}"


def the_version_is(wanted: str) -> str:
    assert version("sgl-importance") == wanted
    assert command("--version").split() == ["sgl-importance", wanted]
    return f"version {wanted}"


def the_core_imports() -> str:
    import sgl_importance

    def unreadable(name: str) -> None:
        raise AssertionError(f"{name} cannot be imported")

    def modules(package: ModuleType) -> list[str]:
        return [
            found.name for found in pkgutil.walk_packages(package.__path__, "sgl_importance.", unreadable)
        ]

    assert Path(sgl_importance.__path__[0]).is_relative_to(sys.prefix), (
        f"{sgl_importance.__path__} is no wheel"
    )
    names = modules(sgl_importance)
    for name in names:
        importlib.import_module(name)
    assert not {"sglang", "torch"} & sys.modules.keys()
    return f"{len(names)} modules of the core import"


def every_command_has_help() -> str:
    from typer.testing import CliRunner

    from sgl_importance.cli import build_app

    commands = sorted(point.name for point in entry_points(group="sgl_importance.commands"))
    overview = command("--help")
    app, runner = build_app(), CliRunner()
    for name in commands:
        assert name in overview
        shown = runner.invoke(app, [name, "--help"])
        assert shown.exit_code == 0, f"{name} --help: {shown.exception!r}"
        assert "Usage:" in shown.output
    return f"help of {len(commands)} commands"


def replay_counts_hits() -> str:
    lines = [
        {"timestamp": second * 1000, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for second, ids in TRACE
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--capacity-blocks", ",".join(str(capacity) for capacity in LRU_HITS), "--jobs", "1")
    command("replay", "trace.jsonl", "--policies", "lru,importance", *options, "--json", "rows.json")
    rows = json.loads(Path("rows.json").read_text())
    hits = {(row["policy"], row["capacity_blocks"]): row["hit_blocks"] for row in rows}
    assert {capacity: hits["lru", capacity] for capacity in LRU_HITS} == LRU_HITS, hits
    assert hits["importance", max(LRU_HITS)] == max(LRU_HITS.values()), hits
    return "replay under lru and importance"


def data_files_are_read() -> str:
    assert "FAIL" not in command("conformance", "consumer", "sgl_importance.conformance.memory:model")
    prompt = json.loads(command("probe", "prompt", "--length", "64"))
    assert prompt["answer"] in prompt["messages"][-1]["content"]
    return "conformance cases, prompts of the embedded model"


def what_needs_more_says_so() -> str:
    refused = run("kernels", "build")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: this command needs torch, which is not installed"), (
        refused.stderr
    )
    return "a command that needs torch says so"


def main(wanted: str) -> None:
    print(f"    {nothing_else_is_here()}")
    print(f"    {the_version_is(wanted)}")
    for check in (
        the_core_imports,
        every_command_has_help,
        replay_counts_hits,
        data_files_are_read,
        what_needs_more_says_so,
    ):
        print(f"    {check()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""The nightly run: each part with its command, its outcome and its seconds, in one dated JSON file.

    bash scripts/nightly.sh                                # everything: over two hours on two cores
    bash scripts/nightly.sh --only endurance --minutes 5   # shortened, and the JSON says so

Parts that fail do not keep the others from running; the exit code is 1 where one did.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]
# ruff: noqa: E402
from other_pythons import VERSIONS, count_tests, run_tests

RESULTS = ROOT / "benchmark" / "results" / "nightly"
ENDURANCE_MINUTES = 40.0
TREE_OPERATIONS = 100_000
LEAST_TREE_OPERATIONS = 5_000  # benchmark/soak.py refuses fewer
PARTS = ("tests", "endurance", "pythons", "mutations")

Row = dict[str, Any]


def run_nightly_tests(minutes: float) -> list[Row]:
    """The tests that are marked ``nightly``, on as many workers as in ``scripts/test.sh``."""
    workers = str(min(4, len(os.sched_getaffinity(0)) + 1))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["python", "-m", "pytest", "-q", "-m", "nightly", "-p", "no:cacheprovider"]
        row = timed([*command, "--numprocesses", workers, "--dist", "loadfile"], f"--junitxml={report}")
        return [{"part": "tests", **row, **count_tests(report)}]


def run_endurance(minutes: float) -> list[Row]:
    """``benchmark/soak.py``: the tree alone, then a server under mixed load for so many minutes.

    One of two ranks, and one under ``observe``, for a quarter of them each.
    """
    operations = max(LEAST_TREE_OPERATIONS, round(TREE_OPERATIONS * min(1.0, minutes / ENDURANCE_MINUTES)))

    def server(share: float, *flags: str) -> list[str]:
        seconds = str(round(60 * minutes * share))
        return ["--operations", "0", "--requests", "100000", "--max-seconds", seconds, *flags]

    others = [server(0.25, "--dp-size", "2"), server(0.25, "--policy", "observe")]
    rows = []
    for arguments in (["--operations", str(operations)], server(1.0), *others):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "soak.json"
            row = timed(["python", "benchmark/soak.py", *arguments], "--out", str(out))
            measured = json.loads(out.read_text())["rows"] if out.exists() else []
        rows.append({"part": "endurance", **row, "rows": measured})
    return rows


def run_other_pythons(minutes: float) -> list[Row]:
    """The core's tests under each other interpreter that is here."""
    rows = []
    for wanted in VERSIONS:
        command = f"python scripts/other_pythons.py {wanted}"
        try:
            rows.append({"part": "pythons", "command": command, **run_tests(wanted)})
        except subprocess.CalledProcessError as error:
            why = f"its environment cannot be made: {error}"
            rows.append({"part": "pythons", "command": command, "outcome": "failed", "why": why})
    return rows


def run_mutations(minutes: float) -> list[Row]:
    """``scripts/mutations.py``: lines that are broken one at a time, and the tests that notice."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "mutations.json"
        row = timed(["python", "scripts/mutations.py", "--jobs", "2"], "--out", str(out))
        measured = json.loads(out.read_text())["rows"] if out.exists() else []
    return [{"part": "mutations", **row, "rows": measured}]


def timed(command: list[str], *hidden: str) -> Row:
    """Runs a command of this environment; ``hidden`` arguments say where its result goes."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, *command[1:], *hidden], cwd=ROOT, check=False)
    return {
        "command": " ".join(command),
        "outcome": "passed" if done.returncode == 0 else "failed",
        "seconds": round(time.monotonic() - began, 1),
    }


RUN: dict[str, Callable[[float], list[Row]]] = {
    "tests": run_nightly_tests,
    "endurance": run_endurance,
    "pythons": run_other_pythons,
    "mutations": run_mutations,
}


def write(path: Path, rows: list[Row], *, minutes: float, only: list[str]) -> None:
    """The document as far as the run has come; whole at any moment."""
    document = {
        "command": " ".join(["bash", "scripts/nightly.sh", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "shortened": minutes < ENDURANCE_MINUTES or set(only) != set(PARTS),
        "endurance_minutes": minutes,
        "commit": commit(),
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {package: version(package) for package in ("sgl-importance", "sglang", "torch")},
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def commit() -> str:
    """What is run, marked where a file has changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    return (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        or "unknown"
    )


def chosen_parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or (unknown := [part for part in parts if part not in PARTS]):
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) if parts else text!r}: choose from {', '.join(PARTS)}"
        )
    return parts


def positive_minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < 24 * 60:
        raise argparse.ArgumentTypeError(f"{text}: give minutes above 0 and below a day")
    return minutes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=positive_minutes, default=ENDURANCE_MINUTES, help="of a server's endurance"
    )
    parser.add_argument("--only", type=chosen_parts, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    arguments = parser.parse_args()
    path = RESULTS / f"{datetime.now(UTC).date().isoformat()}.json"
    rows: list[Row] = []
    try:
        for part in arguments.only:
            print(f"==> {part}", flush=True)
            rows += RUN[part](arguments.minutes)
            write(path, rows, minutes=arguments.minutes, only=arguments.only)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"interrupted after {len(rows)} commands; those that ended are in {path.relative_to(ROOT)}\n"
        )
        sys.exit(130)
    failed = [row["command"] for row in rows if row["outcome"] == "failed"]
    print(f"==> {path.relative_to(ROOT)}: {len(rows) - len(failed)} of {len(rows)} did not fail")
    for command in failed:
        print(f"failed: {command}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

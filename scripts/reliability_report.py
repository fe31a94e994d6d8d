"""Runs the fault tests and writes what they injected to benchmark/results/faults.json.

A failing test writes nothing. python scripts/render_docs.py puts the rows into docs/evidence/store.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark.results import write_results  # noqa: E402

TESTS = tuple(
    f"test/storage/test_{name}.py" for name in ("faults", "weight_updates", "zero_copy_server", "restarts")
)
REPORT_VARIABLE = "SGL_IMPORTANCE_FAULT_REPORT"


def run_tests(*, nightly: bool) -> list[dict[str, str]]:
    """The rows of a run in which every test passed; ends the program where one failed."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        markers = ("-m", "server") if nightly else ()
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, *markers]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, REPORT_VARIABLE: str(rows)})
        if done.returncode:
            raise SystemExit("error: a fault test failed, see above: correct it and run again")
        return [json.loads(line) for line in rows.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nightly", action="store_true", help="also with 50 kills instead of 2")
    rows = run_tests(nightly=parser.parse_args().nightly)
    print(f"{len(rows)} faults: {write_results('faults', rows)}")


if __name__ == "__main__":
    main()

"""Fills the table of docs/reliability.md from a run of the fault tests; a failing test makes no table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- made by scripts/reliability_report.py: begin -->", "<!-- end -->"
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


def table(rows: list[dict[str, str]], *, command: str) -> str:
    lines = [
        f"{len(rows)} faults, 0 wrong tokens, 0 hangs (sglang {version('sglang')}, "
        f"{datetime.now(UTC).date().isoformat()}, `python {command}`).",
        "",
        "| fault | what happened | counter |",
        "|---|---|---|",
        *(f"| {row['fault']} | {row['outcome']} | `{row['counter']}` |" for row in rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nightly", action="store_true", help="also with 50 kills instead of 2")
    nightly = parser.parse_args().nightly
    rows = run_tests(nightly=nightly)
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    command = "scripts/reliability_report.py" + (" --nightly" if nightly else "")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(rows, command=command)}\n{END}{after}")
    print(f"docs/reliability.md: {len(rows)} faults")


if __name__ == "__main__":
    main()

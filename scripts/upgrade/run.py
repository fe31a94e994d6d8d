"""What an upgrade from an earlier release keeps: its store, ledger, pins, recordings, flags and commands.

    python scripts/upgrade/run.py [--commit f3958893] [--out benchmark/results/upgrade.json]

A server of the earlier release, from this repository's history and beside the same sglang, computes prompts,
stores their pages, learns, pins and records. This release's server then starts on the same folders. Takes
some minutes; needs the history and no network.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "test"), str(ROOT / "benchmark"), str(ROOT / "scripts")]
# ruff: noqa: E402
from results import RESULTS, print_rows, write_results
from upgrade.flags import flag_rows
from upgrade.release import Release

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.storage.budget import PAGE_SUFFIX

from support import servers
from support.servers import ServerProcess

FIRST_RELEASE = "f3958893"  # 0.1.0, of which no tag exists
PROMPTS = 6
PROMPT_TOKENS = 330  # upstream looks for no fewer than 256 in storage
PINNED_TOKENS = 160
START_SECONDS = 900.0  # numba compiles what an earlier release's environment has never run

Row = dict[str, Any]


def flags(folder: Path) -> list[str]:
    """What both releases are started with."""
    return [
        *("--kv-policy", "importance", "--page-size", "16", "--max-total-tokens", "4096"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--attention-backend", "torch_native"),
        *("--hicache-storage-prefetch-policy", "wait_complete", "--kv-importance-prewarm", "off"),
        *("--kv-importance-store", str(folder / "store"), "--kv-importance-trace", str(folder / "recording")),
    ]


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [rng.choices(range(10, 200), k=PROMPT_TOKENS) for _ in range(PROMPTS)]


def asked(server: ServerProcess, prompt: list[int]) -> Row:
    return server.generate(prompt, max_new_tokens=4, ignore_eos=True)


def ledger_of(server: ServerProcess) -> Row:
    """Whether it is written, and by which schema; rows of nodes and pins."""
    described: Row = server.get("/kv_importance", limit=1)["ledger"]
    with closing(sqlite3.connect(described.pop("place"))) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: file.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}
        (schema,) = file.execute("PRAGMA user_version").fetchone()
    return {**described, "schema": schema, "rows": rows}


def serve_old(release: Release, folder: Path) -> Row:
    """The earlier release works; what it leaves behind."""
    server = ServerProcess(*flags(folder), model=checkpoint_path(), imports_anew=True)
    server.command = [str(release.python), *server.command[1:]]
    with server:
        pin = server.post("/kv_importance/pin", {"input_ids": prompts()[0][:PINNED_TOKENS]})
        answers = [
            server.generate(prompt, max_new_tokens=4, ignore_eos=True)["output_ids"] for prompt in prompts()
        ]
        for prompt in prompts():
            server.generate(prompt, max_new_tokens=4, ignore_eos=True)
        time.sleep(3)  # the ledger is written every half second, pages behind the answers
        ledger = ledger_of(server)
        server.shut_down()
    return {"pin_id": pin["pin_id"], "answers": answers, "ledger": ledger}


def serve_new(folder: Path, old: Row) -> list[Row]:
    """This release on the same folders."""
    rows: list[Row] = []
    with ServerProcess(*flags(folder), model=checkpoint_path(), imports_anew=True) as server:
        log = server.log()
        pins = server.get("/kv_importance/pins")["pins"]
        ledger = ledger_of(server)
        rows.append({"what": "pin", "kept": [pin["pin_id"] for pin in pins] == [old["pin_id"]]})
        rows.append(
            {"what": "ledger", "before": old["ledger"], "after": ledger, "set_aside": "set aside" in log}
        )
        found, same = 0, 0
        for prompt, answer in zip(prompts(), old["answers"], strict=True):
            reply = asked(server, prompt)
            found += (reply["meta_info"]["cached_tokens_details"] or {}).get("storage", 0)
            same += reply["output_ids"] == answer
        series = server.metrics()
        missed = {
            name.partition('reason="')[2].partition('"')[0]: int(value)
            for name, value in series.items()
            if name.startswith("sglang:kv_importance_store_missed_pages_total") and value
        }
        rows.append(
            {
                "what": "pages",
                "asked_tokens": PROMPTS * PROMPT_TOKENS,
                "from_storage_tokens": found,
                "missed_pages": missed,
                "same_answers": same,
                "answers": PROMPTS,
            }
        )
    return rows


def command(*words: str) -> tuple[int, str]:
    """Exit code and output of this release's ``sgl-importance``."""
    program = Path(sys.executable).with_name("sgl-importance")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def read_recording(folder: Path) -> Row:
    """Both releases have recorded into one folder; this one reads all of it."""
    code, info = command("trace", "info", str(folder / "recording"), "--json")
    replayed, said = command(
        "replay", str(folder / "recording"), "--policies", "lru", "--capacity-blocks", "64"
    )
    return {
        "what": "recording",
        "info": code == 0,
        "replay": replayed == 0,
        "said": info.splitlines()[-1] if code else said.splitlines()[-1] if replayed else "",
    }


def collect_pages(folder: Path) -> Row:
    def pages() -> int:
        return sum(1 for _ in (folder / "store").rglob(f"*{PAGE_SUFFIX}"))

    verified, _ = command("store", "verify", str(folder / "store"))
    before = pages()
    code, _ = command("store", "gc", "--bytes", "0", str(folder / "store"))
    return {
        "what": "collected",
        "verify_is_clean": verified == 0,
        "gc": code == 0,
        "pages_before": before,
        "pages_left": pages(),
    }


def command_rows(release: Release) -> list[Row]:
    """Each command of the earlier release: what this one says to it."""
    rows = []
    for name in release.commands():
        code, said = command(name, "--help")
        rows.append(
            {
                "what": "command",
                "name": name,
                "known": code == 0,
                "said": "" if code == 0 else said.splitlines()[-1],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", default=FIRST_RELEASE, help=f"of the earlier release ({FIRST_RELEASE})")
    parser.add_argument("--out", type=Path, default=RESULTS / "upgrade.json")
    arguments = parser.parse_args()
    servers.START_SECONDS = START_SECONDS
    release = Release.of(ROOT, arguments.commit)
    rows: list[Row] = [*flag_rows(release), *command_rows(release)]
    write_results("upgrade", rows, out=arguments.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old = serve_old(release, folder)
        rows += serve_new(folder, old)
        rows += [read_recording(folder), collect_pages(folder)]
    write_results("upgrade", rows, out=arguments.out)
    print_rows("upgrade", [row for row in rows if row["what"] not in ("flag", "command")])


if __name__ == "__main__":
    main()

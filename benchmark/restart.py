"""The first request after a restart, beside a warm one: with pre-warm at the start, and without.

A server is asked about documents until it is warm, and killed. Every alternation starts two servers on copies
of its store and ledger, one after the other, one that pre-warms and one that does not. Each is asked for one
prompt and then for the same prompt again, which is now warm: the ratio is of one server, one prompt and one
minute. A prompt that no server has seen is the other end of the scale.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode
from sgl_importance_lab.study.statistics import median_of

sys.path.append(str(Path(__file__).parents[1] / "test"))
from support.servers import ServerFailed, ServerProcess

DOCUMENTS = 8
DOCUMENT_TOKENS = 2000
REPEATS = 7
ARMS = {"pre-warmed": "start", "not pre-warmed": "off"}
FLAGS = (
    *("--kv-policy", "importance", "--page-size", "16", "--max-total-tokens", "32768"),
    *("--hicache-ratio", "2", "--hicache-storage-prefetch-policy", "wait_complete"),
)


def prompt(seed: int) -> list[int]:
    document = make_document(DOCUMENT_TOKENS, seed)
    return encode(document.messages(next(iter(document.records))))


def server_on(store: Path, prewarm: str) -> ServerProcess:
    flags = (*FLAGS, "--kv-importance-store", str(store), "--kv-importance-prewarm", prewarm)
    return ServerProcess(*flags, model=checkpoint_path())


def ask(server: ServerProcess, tokens: list[int]) -> tuple[float, int, list[int]]:
    """Milliseconds to the first token, cached tokens, the token."""
    began = time.perf_counter()
    answer = server.generate(tokens, max_new_tokens=1)
    milliseconds = (time.perf_counter() - began) * 1e3
    return milliseconds, answer["meta_info"]["cached_tokens"], answer["output_ids"]


def learn(store: Path) -> list[list[int]]:
    """Makes the store and the ledger; the first token of each prompt's answer."""
    with server_on(store, "off") as server:
        for _ in range(3):
            answers = [ask(server, prompt(seed))[2] for seed in range(DOCUMENTS)]
        time.sleep(2.0)  # the ledger is at most half a second behind
        server.kill_launcher()
    return answers


def wait_for_prewarm(server: ServerProcess) -> dict[str, Any]:
    while True:
        jobs = server.get("/kv_importance/prewarm")["jobs"]
        if jobs and jobs[0]["state"] != "running":
            return dict(jobs[0])
        time.sleep(0.05)


def measure(server: ServerProcess, tokens: list[int], expected: list[int] | None = None) -> dict[str, Any]:
    """The first request for a prompt and its repeats; all must answer ``expected``, or as the first did."""
    first, cached, answer = ask(server, tokens)
    repeats = [ask(server, tokens) for _ in range(REPEATS)]
    assert expected in (None, answer)
    assert all(repeat[2] == answer for repeat in repeats)
    warm = statistics.median(repeat[0] for repeat in repeats)
    return {"first_ms": first, "warm_ms": warm, "ratio": first / warm, "cached_tokens": cached}


def started(store: Path, copy: Path, prewarm: str) -> ServerProcess:
    """A server on a fresh copy of the store, once sglang finds the memory that it wants to leave free."""
    for attempt in range(20):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(store, copy, ignore=shutil.ignore_patterns("*.lock"))
        try:
            return server_on(copy, prewarm).__enter__()
        except ServerFailed as failed:
            if attempt == 19 or "Not enough host memory" not in str(failed):
                raise
            time.sleep(10)
    raise AssertionError


def restart(store: Path, copy: Path, number: int, arm: str, answers: list[list[int]]) -> list[dict[str, Any]]:
    """One restart of one arm; a row for each prompt that was asked."""
    rows = []
    server = started(store, copy, ARMS[arm])
    try:
        facts = {"arm": arm, "alternation": number}
        if ARMS[arm] != "off":
            rows.append({"asked": "pre-warm", **facts, **wait_for_prewarm(server)})
        for question in range(4):
            seed = (number + question) % DOCUMENTS
            asked = "first request" if question == 0 else "first of a prefix"
            rows.append({"asked": asked, **facts, **measure(server, prompt(seed), answers[seed])})
        row = measure(server, prompt(1000 + number))
        assert row["cached_tokens"] < 32
        rows.append({"asked": "unknown prompt", **facts, **row})
    finally:
        server.stop()
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians, that of the ratios with its bootstrap interval."""
    table = []
    for asked in ("first request", "first of a prefix", "unknown prompt"):
        for arm in ARMS:
            chosen = [row for row in rows if row["asked"] == asked and row["arm"] == arm]
            ratio = median_of([row["ratio"] for row in chosen])
            table.append(
                {
                    "asked": asked,
                    "arm": arm,
                    "n": len(chosen),
                    "cached_tokens": statistics.median(row["cached_tokens"] for row in chosen),
                    "first_ms": statistics.median(row["first_ms"] for row in chosen),
                    "warm_ms": statistics.median(row["warm_ms"] for row in chosen),
                    "ratio": ratio.value,
                    "low": ratio.low,
                    "high": ratio.high,
                }
            )
    return table


def main(
    alternations: Annotated[int, typer.Option(min=1, help="Restarts of each arm.")] = 10,
    out: Annotated[Path | None, typer.Option(help="JSON file; default: results/restart.json.")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        store = scratch / "store"
        answers = learn(store)
        rows: list[dict[str, Any]] = []
        for number in track(range(alternations), "Restarts"):
            for arm in list(ARMS) if number % 2 else list(ARMS)[::-1]:
                rows += restart(store, scratch / "copy", number, arm, answers)
            # After each: an interrupted run has its results, too.
            path = write_results("restart", [*summary(rows), *rows], out=out)
    print_rows("Time to first token, first / warm", summary(rows))
    print(path)


if __name__ == "__main__":
    typer.run(main)

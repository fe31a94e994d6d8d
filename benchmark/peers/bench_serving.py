"""The load of sglang's own harness on stock sglang and on ours: tokens, first tokens, throughput.

    python benchmark/peers/bench_serving.py --model .cache/models/smollm2 --seeds 5 --resume

``sglang.bench_serving`` makes the requests (``generated-shared-prefix``: groups that share a system prompt,
asked for by popularity), sends them and times them. For each seed both servers are started anew with the
same flags, and the arm that is sent to first alternates. The model is whole.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.environments import harness_packages
from benchmark.peers.served import Served
from benchmark.peers.side_by_side import started
from benchmark.results import RESULTS, rows_so_far, write_results

from support import warm_start

ARMS = ("stock sglang", "ours")
GROUPS, PROMPTS_A_GROUP = 16, 5
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 1_024, 64, 8
POOL = GROUPS * SYSTEM_TOKENS // 2
AT_A_TIME = 4
LOAD = (
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(GROUPS)),
    *("--gsp-prompts-per-group", str(PROMPTS_A_GROUP), "--gsp-system-prompt-len", str(SYSTEM_TOKENS)),
    *("--gsp-question-len", str(QUESTION_TOKENS), "--gsp-output-len", str(ANSWER_TOKENS)),
    *("--gsp-group-distribution", "zipf", "--gsp-zipf-alpha", "1.0"),
    *("--max-concurrency", str(AT_A_TIME), "--cache-report"),
)
TOLD = ("completed", "duration", "total_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms")
"""What is kept of the harness's report, under its own names, beside what was cached."""


def harness(served: Served, model: Path, seed: int) -> dict[str, Any]:
    """What the harness reports of one load.

    Raises:
        subprocess.CalledProcessError: it ended with an error, which stands above.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.jsonl"
        words = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
        words += ["--base-url", served.url, "--model", str(model), "--tokenizer", str(model)]
        words += [*LOAD, "--seed", str(seed), "--output-file", str(out)]
        env = {**os.environ, "PYTHONPATH": str(harness_packages()), "HF_HUB_OFFLINE": "1"}
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=env)
        report = json.loads(out.read_text())
    cached = ("total_prompt_tokens", "total_cached_tokens")
    return {name: report[name] for name in TOLD} | {name: report["cache_report"][name] for name in cached}


def main(
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    resume: Annotated[bool, typer.Option(help="Measure only what the JSON lacks.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers_bench_serving.json",
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end with us
    warm_start.is_on = True  # starts are not measured
    rows = rows_so_far(out) if resume else []
    known = {row["seed"] for row in rows}
    for seed in track([seed for seed in range(1, seeds + 1) if seed not in known], "sglang.bench_serving"):
        with ExitStack() as stack:
            servers = {arm: stack.enter_context(started(arm, model.absolute(), POOL)) for arm in ARMS}
            order = ARMS if seed % 2 else ARMS[::-1]
            found = {arm: harness(servers[arm], model.absolute(), seed) for arm in order}
            for arm, served in servers.items():
                rows.append({"arm": arm, "seed": seed, **found[arm], "flags": " ".join(served.flags)})
        write_results("peers_bench_serving", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

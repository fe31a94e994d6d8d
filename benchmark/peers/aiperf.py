"""A production trace on stock sglang and on ours, sent by aiperf: prompt tokens that each computes.

    python benchmark/peers/aiperf.py --data DIR --model .cache/models/smollm2 --seeds 5 --resume

``DIR/traces/mooncake_conversation.jsonl`` is Mooncake's public trace of a chat service. aiperf makes a prompt
of each row: rows that share blocks get prompts that begin alike. A block has 32 tokens here in place of 512,
so that the longest prompt fits SmolLM2's context, and answers have two. A seed takes the next
``--requests`` rows. Requests go in the trace's order, some at a time, not by its clock. Counts are taken on
the first layer of the model, as in benchmark/peers/run.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.arms import ARMS
from benchmark.peers.environments import PLACE, aiperf_python
from benchmark.peers.served import CONTEXT, Served
from benchmark.peers.sglang_server import Sglang
from benchmark.peers.slices import first_layers
from benchmark.peers.workloads import PAGE
from benchmark.results import RESULTS, rows_so_far, write_results

from support import warm_start

ANSWER_TOKENS = 2
AT_A_TIME = 4
HUB_NAME = "local/model"
KEPT = ("request_count", "time_to_first_token", "request_latency", "request_throughput", "benchmark_duration")
"""Of aiperf's report, the mean of each under its own name."""
COUNTED = ("sglang:prompt_tokens_total", "sglang:cached_tokens_total")
"""sglang does not export the second before a token was found."""


class Recorded(msgspec.Struct):
    """A row of the trace: which blocks its prompt is made of."""

    timestamp: int
    hash_ids: list[int]


def slice_of(trace: Path, number: int, size: int) -> list[Recorded]:
    """The ``number``-th ``size`` rows whose prompts fit the context."""
    with trace.open(encoding="utf-8") as file:
        rows = (msgspec.json.decode(line, type=Recorded) for line in file)
        fitting = (row for row in rows if len(row.hash_ids) * PAGE + ANSWER_TOKENS <= CONTEXT)
        return list(islice(fitting, number * size, (number + 1) * size))


def unique_tokens(rows: Sequence[Recorded]) -> int:
    """Blocks' ids are of whole beginnings, so each is a page of its own."""
    return PAGE * len({block for row in rows for block in row.hash_ids})


def sent(served: Served, model: Path, rows: Sequence[Recorded], seed: int) -> dict[str, Any]:
    """What aiperf reports of sending ``rows``.

    Raises:
        subprocess.CalledProcessError: it ended with an error, which stands above.
        ValueError: some requests failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        trace.write_text("".join(json.dumps(asked_of(row)) + "\n" for row in rows))
        words = [str(aiperf_python().with_name("aiperf")), "profile", "--model", served.model]
        words += ["--url", served.url, "--endpoint-type", "completions", "--streaming"]
        words += ["--tokenizer", HUB_NAME, "--input-file", str(trace)]
        words += ["--custom-dataset-type", "mooncake-trace", "--no-fixed-schedule"]
        words += ["--prompt-input-tokens-block-size", str(PAGE), "--random-seed", str(seed)]
        words += ["--concurrency", str(AT_A_TIME), "--request-count", str(len(rows))]
        words += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
        words += ["--output-artifact-dir", str(folder / "report"), "--ui", "none", "--no-gpu-telemetry"]
        words += ["--no-server-metrics", "--workers-max", "2"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(as_hub(model, folder / "hub"))}
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=env)
        [file] = (folder / "report").rglob("profile_export_aiperf.json")
        report = json.loads(file.read_text())
    if report["request_count"]["avg"] != len(rows):
        raise ValueError(f"{report['request_count']['avg']:.0f} of {len(rows)} requests were answered")
    return {kept: report[kept]["avg"] for kept in KEPT}


def as_hub(model: Path, hub: Path) -> Path:
    """The model's tokenizer as downloaded files of the hub: aiperf's processes take no folder for one."""
    downloaded = hub / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = downloaded / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    for file in model.glob("*.json"):
        (snapshot / file.name).symlink_to(file.absolute())
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text("0")
    return hub


def asked_of(row: Recorded) -> dict[str, Any]:
    """As the trace has it, with shorter blocks and a short answer."""
    return {
        "timestamp": row.timestamp,
        "input_length": PAGE * len(row.hash_ids),
        "output_length": ANSWER_TOKENS,
        "hash_ids": row.hash_ids,
    }


def main(
    data: Annotated[Path, typer.Option(help="Folder with traces/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    arms: Annotated[str, typer.Option(help="Separated by commas.")] = "stock sglang,ours",
    seeds: Annotated[int, typer.Option(min=1, help="How many slices of the trace.")] = 5,
    size: Annotated[int, typer.Option("--requests", min=1, help="Rows of a slice.")] = 2_000,
    share: Annotated[float, typer.Option(help="Of a slice's different tokens, that the pool holds.")] = 0.1,
    resume: Annotated[bool, typer.Option(help="Measure only what the JSON lacks.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers_aiperf.json",
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end with us
    warm_start.is_on = True  # starts are not measured
    part = first_layers(model, 1, PLACE)
    rows = rows_so_far(out) if resume else []
    known = {(row["arm"], row["seed"], row["share"], row["request_count"]) for row in rows}
    wanted = [(seed, arm) for seed in range(1, seeds + 1) for arm in arms.split(",")]
    for seed, arm in track(
        [each for each in wanted if (each[1], each[0], share, size) not in known], "aiperf"
    ):
        requests = slice_of(data / "traces" / "mooncake_conversation.jsonl", seed - 1, size)
        unique = unique_tokens(requests)
        pool = int(unique * share) // PAGE * PAGE
        with ARMS[arm].started(part, pool) as served:
            before = counted(served)
            report = sent(served, part, requests, seed)
            prompt, cached = (
                after - at_first for after, at_first in zip(counted(served), before, strict=True)
            )
            flags = " ".join(served.flags)
        key = {"arm": arm, "seed": seed, "share": share, "pool": pool, "unique_tokens": unique}
        rows.append(
            key | {"prompt_tokens": prompt, "computed_tokens": prompt - cached, **report, "flags": flags}
        )
        write_results("peers_aiperf", rows, out=out)


def counted(served: Served) -> tuple[float, float]:
    """Tokens of prompts so far, and of these those that were found."""
    assert isinstance(served, Sglang), "only sglang's metrics are read"
    series = served.process.metrics()
    prompt, cached = (
        sum(value for each, value in series.items() if each.partition("{")[0] == name) for name in COUNTED
    )
    return prompt, cached


if __name__ == "__main__":
    typer.run(main)

"""Decode steps of a served model in Llama-3-8B's shape: stock, this policy, page scores, tiered pages.

    python benchmark/kernels/served_steps.py --out FILE --logs FOLDER

Each arm is a server of its own, with dummy weights, no tokenizer and torch's samplers. All are started
together, and each shape is asked of one after the other. A shape is a number of requests, each with a context
of its own of random tokens; where an arm's pool does not hold it, it is left out. A step is the time between
two tokens of one request while all of them decode; ``tokens_per_s`` counts all of them. A line of JSON is
added behind each shape, and one that says why where an arm fails. --dry-run takes the same way on a CPU with
a tiny model: it proves the script, and its times mean nothing; Triton's kernels run in its interpreter there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from launched_server import facts, server, write_model

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
TINY_LLAMA = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "torch_dtype": "float32",
}
SERVED = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--page-size", "16", "--host", "127.0.0.1"),
)
STEPS = 64
"""Tokens of each answer behind the first."""
ATTEMPTS = 5
"""To have requests decode together, each with prompts of its own."""


@dataclass(frozen=True)
class Setting:
    """What is served and asked: on a GPU, or to rehearse it on a CPU.

    Args:
        config: fields of the model's configuration.
        flags: of every server.
        arms: of the servers, the flags that tell them apart.
        interpreted: of the arms, those that run in Triton's interpreter, and only the first shape.
        shapes: tokens of a context and number of requests.
    """

    config: dict[str, Any]
    flags: tuple[str, ...]
    arms: dict[str, tuple[str, ...]]
    shapes: tuple[tuple[int, int], ...]
    interpreted: frozenset[str] = frozenset()


REUSE_ALONE = ("--kv-policy", "importance", "--kv-importance-source", "none")
TIERED = (
    "--kv-policy",
    "importance",
    "--kv-residency",
    "tiered",
    "--kv-sparse-selector",
    "bits",
)
IN_GRAPHS = ("--cuda-graph-backend-prefill", "disabled")
EAGER = ("--disable-cuda-graph",)
MOST_REQUESTS = 16
BUDGET = 2048
LARGE_POOL, SMALL_POOL = 5 * (32_768 + 256), 2 * (32_768 + 256)
"""Tokens: weights of all servers and their pools share one device of 141 GB."""
GPU = Setting(
    LLAMA_8B,
    (
        *("--attention-backend", "triton", "--max-running-requests", str(MOST_REQUESTS)),
        *("--mem-fraction-static", "0.9"),
    ),
    {
        "default": ("--kv-policy", "default", "--max-total-tokens", str(LARGE_POOL)),
        "tiered": (
            *(*TIERED, *IN_GRAPHS, "--kv-sparse-budget", str(BUDGET)),
            *("--kv-device-tokens", str(2 * MOST_REQUESTS * BUDGET), "--max-total-tokens", str(LARGE_POOL)),
        ),
        "importance": (*REUSE_ALONE, "--max-total-tokens", str(SMALL_POOL)),
        "tiered, eager": (
            *(*TIERED, *EAGER, "--kv-sparse-budget", str(BUDGET)),
            *("--kv-device-tokens", str(16 * BUDGET), "--max-total-tokens", str(SMALL_POOL)),
        ),
    },
    ((8192, 1), (8192, 7), (32_768, 1), (8192, 16), (32_768, 5)),
)
CPU = Setting(
    TINY_LLAMA,
    ("--device", "cpu", "--dtype", "float32", "--max-running-requests", "4", "--sleep-on-idle"),
    {
        "default": ("--kv-policy", "default", "--max-total-tokens", "4096"),
        "tiered": (
            *(*TIERED, *EAGER, "--kv-sparse-budget", "64", "--kv-sparse-min-context", "64"),
            *("--kv-device-tokens", "1200", "--max-total-tokens", "4096"),
        ),
        "importance": (*REUSE_ALONE, "--max-total-tokens", "4096"),
        "triton": (
            *("--kv-policy", "importance", "--kv-importance-source", "triton"),
            *("--attention-backend", "triton", "--max-total-tokens", "4096"),
        ),
    },
    ((256, 1), (1024, 3)),
    frozenset(["triton"]),
)


class NeverTogether(RuntimeError):
    """One of the requests had its answer before another had its first token."""


def arrivals(url: str, prompt: list[int], deadline: float) -> list[tuple[float, int]]:
    """When each piece of an answer came, and how many tokens had come with it.

    Raises:
        RuntimeError: the answer is not whole before the deadline.
    """
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": STEPS + 1, "ignore_eos": True},
        "stream": True,
    }
    came: list[tuple[float, int]] = []
    with httpx.stream(
        "POST", f"{url}/generate", json=body, timeout=max(1.0, deadline - time.monotonic())
    ) as reply:
        for line in reply.iter_lines():
            if time.monotonic() > deadline:
                break
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "meta_info" not in chunk:
                    raise RuntimeError(f"answered {chunk}")
                came.append((time.monotonic(), chunk["meta_info"]["completion_tokens"]))
    if not came or came[-1][1] < STEPS + 1:
        raise RuntimeError(f"{came[-1][1] if came else 0} of {STEPS + 1} tokens in time")
    return came


def measured(url: str, prompts: list[list[int]], deadline: float) -> dict[str, Any]:
    """Steps of requests that are sent together.

    Raises:
        RuntimeError: they do not decode together, or an answer is not whole in time.
    """
    began = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        came = list(pool.map(lambda prompt: arrivals(url, prompt, deadline), prompts))
    return {"all_first_tokens_s": max(each[0][0] for each in came) - began, **steps_of(came)}


def steps_of(answers_of_all: list[list[tuple[float, int]]]) -> dict[str, Any]:
    """Steps while all requests decode, from when pieces came and how many tokens with them.

    Raises:
        NeverTogether: there are no such steps.
    """
    start = max(came[0][0] for came in answers_of_all)
    end = min(came[-1][0] for came in answers_of_all)
    gaps, tokens = [], 0
    for came in answers_of_all:
        within = [(at, count) for at, count in came if start <= at <= end]
        tokens += within[-1][1] - within[0][1] if within else 0
        gaps += [
            (after - before) / (more - fewer)
            for (before, fewer), (after, more) in itertools.pairwise(within)
            if more > fewer
        ]
    if len(gaps) < 2:
        raise NeverTogether("the requests did not decode together")
    low, median, high = (1e3 * cut for cut in (statistics.quantiles(gaps, n=20)[i] for i in (0, 9, 18)))
    return {
        "step_ms": median,
        "step_ms_5": low,
        "step_ms_95": high,
        "steps": len(gaps) // len(answers_of_all),
        "tokens_per_s": tokens / (end - start),
    }


def prompts_of(context: int, requests: int, vocabulary: int, seed: int) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(10, vocabulary) for _ in range(context)] for _ in range(requests)]


@dataclass(frozen=True)
class Arm:
    """A server that answers.

    Attributes:
        name: of the arm.
        url: its address.
        pool_tokens: what its KV pool holds.
        shapes: what it is asked.
    """

    name: str
    url: str
    pool_tokens: int
    shapes: frozenset[tuple[int, int]]

    def row(self, context: int, requests: int, vocabulary: int, ends: float) -> dict[str, Any] | None:
        """Measured steps of a shape, or why there are none; None where it is not asked."""
        if (context, requests) not in self.shapes:
            return None
        shape = {
            "arm": self.name,
            "context": context,
            "requests": requests,
            "pool_tokens": self.pool_tokens,
        }
        if requests > self.pool_tokens // (context + STEPS + 16):
            return shape | {"left_out": "does not fit"}
        if time.monotonic() > ends:
            return shape | {"left_out": "no time left"}
        for attempt in range(ATTEMPTS):  # answers of a tiny model may be over before the last request is sent
            prompts = prompts_of(context, requests, vocabulary, seed=context + requests + attempt)
            try:
                return shape | measured(self.url, prompts, ends)
            except NeverTogether as error:
                failed = {"failed": str(error)}
            except (RuntimeError, httpx.HTTPError) as error:
                return shape | {"failed": str(error) or type(error).__name__}
        return shape | failed


def started(
    name: str, setting: Setting, model: Path, log: Path, ends: float, running: contextlib.ExitStack
) -> tuple[Arm | None, dict[str, Any]]:
    """An arm whose first requests are behind it, and the line that says so; None where it failed."""
    flags = ["--model-path", str(model), *SERVED, *setting.flags, *setting.arms[name]]
    starts = time.monotonic()
    is_interpreted = name in setting.interpreted
    try:
        url = running.enter_context(server(flags, log, ends, interpreted=is_interpreted))
        pool_tokens = httpx.get(f"{url}/server_info", timeout=60).json()["max_total_num_tokens"]
        # What first requests build, of one and of several.
        for context, requests in ((64, 1), (setting.shapes[0][0] // 2, 1 if is_interpreted else 2)):
            measured_once(url, prompts_of(context, requests, setting.config["vocab_size"], seed=0), ends)
    except (RuntimeError, httpx.HTTPError) as error:
        return None, {"arm": name, "failed": str(error) or type(error).__name__}
    asked = frozenset(setting.shapes[:1] if is_interpreted else setting.shapes)
    return Arm(name, url, pool_tokens, asked), {"arm": name, "started_s": time.monotonic() - starts}


def measured_once(url: str, prompts: list[list[int]], ends: float) -> None:
    with contextlib.suppress(NeverTogether):
        measured(url, prompts, ends)


def main(
    out: Annotated[Path, typer.Option(help="Lines of JSON are added there.")],
    logs: Annotated[Path, typer.Option(help="Folder for what the servers say.")],
    dry_run: Annotated[bool, typer.Option(help="Tiny shapes on a CPU.")] = False,
    minutes: Annotated[float, typer.Option(help="For all arms together.")] = 6,
    only: Annotated[list[str] | None, typer.Option(help="Of the arms; several.")] = None,
) -> None:
    setting = CPU if dry_run else GPU
    if unknown := sorted(set(only or []) - set(setting.arms)):
        raise typer.BadParameter(f"{', '.join(unknown)} is not known: use one of {', '.join(setting.arms)}")
    names = only or list(setting.arms)
    ends = time.monotonic() + 60 * minutes
    failed = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running, out.open("a") as lines:
        write_model(Path(folder), setting.config)

        def write(row: dict[str, Any]) -> None:
            line = json.dumps(({"dry_run": True} if dry_run else {}) | row)
            print(line, file=lines, flush=True)
            print(line, flush=True)
            if "failed" in row:
                failed.append(row["arm"])

        def start(name: str) -> Arm | None:
            time.sleep(2 * names.index(name))  # each finds free what the one before has not taken yet
            log = logs / f"served-{name.replace(', ', '-')}.log"
            arm, row = started(name, setting, Path(folder), log, ends, running)
            write(row)
            return arm

        write(facts() | {"flags": {name: " ".join((*setting.flags, *setting.arms[name])) for name in names}})
        with ThreadPoolExecutor(1 if dry_run else len(names)) as pool:
            arms = [arm for arm in pool.map(start, names) if arm is not None]
        for context, requests in setting.shapes:
            for arm in arms:
                if row := arm.row(context, requests, setting.config["vocab_size"], ends):
                    write(row)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)

"""sglang's torch-native attention on a CPU beside the one that the CPU runtime puts in its place.

    python benchmark/cpu_attention.py
    python benchmark/cpu_attention.py --model .cache/models/smollm2 --threads 2

One layer of several shapes: a decode step, an extend behind a cached prefix, a whole prompt. Both sides run
in one process on the same float32 pool and take turns; times are medians, ``times`` is upstream's by ours.
``--clock cpu`` counts what the calling thread computes, for a machine that others use; with one thread only.
With ``--model``, two servers under ``--kv-policy default`` besides, which take turns, too: one of them with
``SGL_IMPORTANCE_CPU_ATTENTION=upstream``.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from benchmark.results import print_rows, write_results
from sglang_importance.cpu.attention import SWITCH, UPSTREAM, DecodeCopiesContext, ExtendComputesCachedRows

from support.servers import ServerProcess

PAGE = 16
PREFIX_ROWS = 16  # new tokens behind a cached prompt
ANSWER_TOKENS = 17  # of which the first is the prefill's


class Clock(Enum):
    WALL = "wall"
    CPU = "cpu"

    @property
    def now(self) -> Callable[[], float]:
        return time.perf_counter if self is Clock.WALL else time.thread_time


@dataclass(frozen=True)
class Shape:
    """Attention of a layer: query heads, KV heads, dimension of keys, of values."""

    model: str
    heads: int
    kv_heads: int
    dim: int
    value_dim: int


SHAPES = (
    Shape("SmolLM2-135M", 9, 3, 64, 64),
    Shape("Llama-3-8B", 32, 8, 128, 128),
    Shape("embedded", 8, 2, 32, 32),
    Shape("Gemma-3-270M", 4, 1, 256, 256),
    Shape("latents, 16 heads", 16, 1, 576, 512),
)


class Layer:
    """A pool that holds the contexts of a batch, all of one length, page by page in any order."""

    def __init__(self, shape: Shape, batch: int, context: int) -> None:
        draws = torch.Generator().manual_seed(0)
        self.shape, self.batch, self.context = shape, batch, context
        pages = torch.randperm(batch * context // PAGE, generator=draws) + 1
        slots = pages[:, None] * PAGE + torch.arange(PAGE)
        self.table = slots.view(batch, context).int()
        self.keys = torch.randn(len(pages) * PAGE + PAGE, shape.kv_heads, shape.dim, generator=draws)
        # Latents hold a token's value in its key.
        is_latent = shape.value_dim < shape.dim
        self.values = self.keys[..., : shape.value_dim] if is_latent else torch.randn_like(self.keys)
        self.requests = torch.arange(batch)
        self.lengths = torch.full((batch,), context)

    def step(self, decode: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A decode step of the whole batch."""
        query, output = self._rows(self.batch)
        arguments = (query, output, self.keys, self.values, self.table, self.requests, self.lengths)
        return lambda: decode(SimpleNamespace(), *arguments, **self._options)

    def extend(self, extend: Callable[..., torch.Tensor], new: int) -> Callable[[], torch.Tensor]:
        """The last ``new`` tokens of each context, the others cached."""
        query, output = self._rows(self.batch * new)
        added = torch.full_like(self.lengths, new)
        arguments = (query, output, self.keys, self.values, self.table, self.requests)
        lengths = (self.lengths, self.lengths - added, added)
        return lambda: extend(SimpleNamespace(), *arguments, *lengths, causal=True, **self._options)

    def _rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(1)
        query = torch.randn(tokens, self.shape.heads, self.shape.dim, generator=draws)
        return query, query.new_empty(tokens, self.shape.heads, self.shape.value_dim)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "scaling": self.shape.dim**-0.5,
            "enable_gqa": self.shape.heads != self.shape.kv_heads,
        }


def attentions() -> dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]]:
    """Extend and decode of each side."""
    backend: Any = TorchNativeAttnBackend
    shims = (ExtendComputesCachedRows(), DecodeCopiesContext())
    assert all(shim.needed() for shim in shims), "upstream has no such defect, or it is covered already"
    upstream = backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode
    for shim in shims:
        shim.apply()
    return {
        "upstream": upstream,
        "ours": (backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode),
    }


def layer_rows(contexts: list[int], batches: list[int], rounds: int, clock: Clock) -> list[dict[str, Any]]:
    sides = attentions()
    rows = []
    with torch.inference_mode():
        for shape, context in track(list(product(SHAPES, contexts)), "Layers"):
            passes: list[tuple[str, int, int | None]] = [("decode", batch, None) for batch in batches]
            passes += [("extend behind a cached prefix", 1, PREFIX_ROWS), ("whole prompt", 1, context)]
            for name, batch, new in passes:
                layer = Layer(shape, batch, context)
                runs = {
                    side: layer.step(decode) if new is None else layer.extend(extend, new)
                    for side, (extend, decode) in sides.items()
                }
                # Upstream computes the whole of a prompt for any extend: that takes the time of many steps.
                seconds = timed(runs, rounds if new is None else max(3, rounds // 10), clock)
                rows.append(
                    {
                        "shape": shape.model,
                        "pass": name,
                        "batch": batch,
                        "context": context,
                        "new": new or 1,
                        **{f"{side}_ms": round(seconds[side] * 1e3, 3) for side in runs},
                        "times": round(seconds["upstream"] / seconds["ours"], 2),
                    }
                )
    return rows


def timed(runs: dict[str, Callable[[], torch.Tensor]], rounds: int, clock: Clock) -> dict[str, float]:
    """Median seconds of each, in turns; their outputs agree."""
    outputs = [run().clone() for run in runs.values()]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = clock.now()
            run()
            taken[name].append(clock.now() - start)
    return {name: statistics.median(each) for name, each in taken.items()}


def served_rows(model: Path, contexts: list[int], rounds: int, threads: int) -> list[dict[str, Any]]:
    """First tokens of new and of cached prompts, and time per token, of two servers in turns."""
    pool = 2 * max(contexts) + 1024
    flags = ("--kv-policy", "default", "--max-total-tokens", str(pool), "--page-size", str(PAGE))
    flags += ("--skip-tokenizer-init", "--attention-backend", "torch_native")
    env = {"OMP_NUM_THREADS": str(threads)}
    rows = []
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(
                ServerProcess(*flags, model=model, env={**env, **choice}, imports_anew=True)
            )
            for side, choice in (("upstream", {SWITCH: UPSTREAM}), ("ours", {}))
        }
        for context in contexts:
            taken: dict[tuple[str, str], list[float]] = {}
            differing = 0
            for number in track(range(rounds), f"Prompts of {context}"):
                prompt = random.Random(number).choices(range(100, 1000), k=context)
                answers = []
                for side, server in servers.items():
                    server.flush_cache()
                    cold, _ = ask(server, prompt, 1)
                    hit, _ = ask(server, prompt, 1)
                    whole, answer = ask(server, prompt, ANSWER_TOKENS)
                    answers.append(answer)
                    step = (whole - hit) / (ANSWER_TOKENS - 1)
                    for what, seconds in (("cold", cold), ("cached", hit), ("step", step)):
                        taken.setdefault((side, what), []).append(seconds)
                differing += answers[0] != answers[1]
            medians = {key: statistics.median(each) for key, each in taken.items()}
            rows += [
                {
                    "served": side,
                    "context": context,
                    "rounds": rounds,
                    "first_token_ms": round(medians[side, "cold"] * 1e3, 1),
                    "first_token_cached_ms": round(medians[side, "cached"] * 1e3, 1),
                    "step_ms": round(medians[side, "step"] * 1e3, 2),
                    "cached_in_steps": round(medians[side, "cached"] / medians[side, "step"], 2),
                    "answers_that_differ": differing,
                }
                for side in servers
            ]
    return rows


def ask(server: ServerProcess, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
    """Seconds of an answer, and its tokens."""
    start = time.perf_counter()
    answer = server.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
    output: list[int] = answer["output_ids"]
    return time.perf_counter() - start, output


def main(
    model: Annotated[Path | None, typer.Option(help="Folder of a checkpoint to serve besides.")] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of a context, separated by commas.")] = "4096,8192",
    batches: Annotated[str, typer.Option(help="Requests of a decode step.")] = "1,4,16",
    rounds: Annotated[int, typer.Option(help="Turns of each pass of a layer.", min=1)] = 30,
    served_rounds: Annotated[int, typer.Option(help="Prompts of each server.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
    clock: Annotated[Clock, typer.Option(help="What is measured of a layer.")] = Clock.WALL,
    out: Annotated[Path | None, typer.Option(help="Where to write; default benchmark/results.")] = None,
) -> None:
    """Times attention passes of both sides, and with --model two servers."""
    if clock is Clock.CPU and threads > 1:
        raise typer.BadParameter("--clock cpu knows one thread: leave out --threads")
    torch.set_num_threads(threads)
    lengths = [math.ceil(int(each) / PAGE) * PAGE for each in contexts.split(",")]
    rows = layer_rows(lengths, [int(each) for each in batches.split(",")], rounds, clock)
    for row in rows:
        row.update(threads=threads, clock=clock.value)
    print_rows("Attention on a CPU: one layer, float32", rows)
    if model is not None:
        os.environ.pop(SWITCH, None)
        served = served_rows(model.resolve(), lengths, served_rounds, threads)
        print_rows("The whole model, served under --kv-policy default", served)
        rows += served
    write_results("cpu_attention", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

"""What ours costs the scheduler's thread, in front of an answer and behind it.

    python benchmark/scheduler_cost.py

Processor time of the calling thread, with 1, 32 and 256 running requests of a shared cached prefix and 32 new
tokens each: per forward pass of our attention backend (upstream's attention is left out), and per request of
the radix tree and its component (upstream's part of the tree included). A first token waits for
``before_answer``; ``behind_answer`` and ``scores_of_a_request`` are done when it is on its way.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated
from unittest.mock import patch

import numpy as np
import torch
import typer
from rich.progress import track

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from benchmark.results import print_rows, write_results
from sglang_importance.attention import torch_native
from sglang_importance.attention.rows import Phase

from support.drivers.attention_driver import HEAD_DIM, HEADS, KV_HEADS, Layers, options
from support.drivers.tree_driver import TreeDriver

RUNNING = (1, 32, 256)
PAGE = 16
PREFIX_PAGES = 24
NEW_TOKENS = 32
DECODE_STEPS = 32
NUM_LAYERS = 4


class Attention:
    """Our attention backend over pools of its own; upstream's attention does nothing."""

    def __init__(self, running: int) -> None:
        context = (PREFIX_PAGES + 8) * PAGE
        self.running = running
        runner = SimpleNamespace(
            device="cpu",
            page_size=PAGE,
            model=Layers(NUM_LAYERS),
            model_config=SimpleNamespace(is_encoder_decoder=False),
            use_mla_backend=False,
            is_draft_worker=False,
            req_to_token_pool=ReqToTokenPool(running + 1, context, "cpu", enable_memory_saver=False),
            token_to_kv_pool=MHATokenToKVPool(
                size=context,
                page_size=PAGE,
                dtype=torch.float32,
                head_num=KV_HEADS,
                head_dim=HEAD_DIM,
                layer_num=NUM_LAYERS,
                device="cpu",
                enable_memory_saver=False,
                enable_alt_stream=False,
            ),
        )
        runner.req_to_token_pool.req_to_token[:] = torch.arange(context)
        self.backend = torch_native.EmittingTorchNativeBackend(runner, options(interval=16, window=16))
        self.layers = list(runner.model.layers)
        self._rid = 0

    def _pass(self, mode: ForwardMode, slots: list[int], seq_len: int, new: int) -> float:
        extends = mode == ForwardMode.EXTEND
        count = len(slots)
        seq_lens = torch.full((count,), seq_len)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=count,
            input_ids=torch.zeros(count * new, dtype=torch.int64),
            rids=[f"{self._rid}-{slot}" for slot in slots],
            req_pool_indices=torch.tensor(slots),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=count * seq_len,
            out_cache_loc=torch.zeros(count * new, dtype=torch.int64),
            extend_seq_lens=torch.full((count,), new) if extends else None,
            extend_seq_lens_cpu=[new] * count if extends else None,
        )
        q = torch.zeros(count * new, HEADS * HEAD_DIM)
        forward = self.backend.forward_extend if extends else self.backend.forward_decode
        start = time.thread_time()
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            forward(q, None, None, layer, batch)
        return time.thread_time() - start

    def lives(self) -> dict[str, float]:
        """One life of all requests, prefilled one by one; microseconds."""
        self._rid += 1
        length = PREFIX_PAGES * PAGE + NEW_TOKENS
        slots = list(range(1, self.running + 1))
        prefill = sum(self._pass(ForwardMode.EXTEND, [slot], length, NEW_TOKENS) for slot in slots)
        decode = sum(self._pass(ForwardMode.DECODE, slots, length + i, 1) for i in range(1, DECODE_STEPS + 1))
        start = time.thread_time()
        for slot in slots:
            for phase in Phase:
                self.backend.rows.consume(slot, phase)
        consumed = time.thread_time() - start
        return {
            "prefill_pass": prefill / self.running * 1e6,
            "decode_step": decode / DECODE_STEPS * 1e6,
            "scores_of_a_request": consumed / self.running * 1e6,
        }


class Tree:
    """The radix tree and its component, driven as a scheduler does."""

    def __init__(self, running: int) -> None:
        pages = PREFIX_PAGES + running * 4
        self.running = running
        self.driver = TreeDriver(tokens=3 * pages * PAGE, page_size=PAGE, requests=running + 1)
        self._number = 0
        self._serve(self._prompts(1))

    def _prompts(self, count: int) -> list[list[int]]:
        prefix = list(range(PREFIX_PAGES * PAGE))
        self._number += count
        starts = range(10_000 + 100 * (self._number - count), 10_000 + 100 * self._number, 100)
        return [[*prefix, *range(start, start + NEW_TOKENS - 4)] for start in starts]

    def _serve(self, prompts: list[list[int]]) -> tuple[float, float]:
        driver = self.driver
        scores = np.full(PREFIX_PAGES + NEW_TOKENS // PAGE, 1 / PREFIX_PAGES)
        requests, before, after = [], 0.0, 0.0
        for prompt in prompts:
            request = driver.admit(prompt)
            start = time.thread_time()
            driver.prefill(request)
            before += time.thread_time() - start
            requests.append(request)
        for request in requests:
            driver.decode(request, [7] * 8, body=scores)
        for request in requests:
            start = time.thread_time()
            driver.finish(request)
            after += time.thread_time() - start
        return before, after

    def lives(self) -> dict[str, float]:
        """One life of all requests; microseconds per request."""
        before, after = self._serve(self._prompts(self.running))
        return {
            "before_answer": before / self.running * 1e6,
            "behind_answer": after / self.running * 1e6,
        }


def main(
    lives: Annotated[int, typer.Option(min=3, help="Of all requests.")] = 40,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the JSON."""
    rows = []
    with ExitStack() as stack:
        for name in ("forward_extend", "forward_decode", "init_forward_metadata"):
            stack.enter_context(patch.object(TorchNativeAttnBackend, name, lambda *_, **__: None))
        for running in RUNNING:
            attention, tree = Attention(running), Tree(running)
            measured = [
                {**attention.lives(), **tree.lives()}
                for _ in track(range(lives), description=f"{running} running")
            ]
            medians = {
                key: round(float(np.median([each[key] for each in measured[2:]])), 1) for key in measured[0]
            }
            rows.append({"running": running, **medians})
    print_rows("scheduler's thread, microseconds (median)", rows)
    print(f"written: {write_results('scheduler_cost', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

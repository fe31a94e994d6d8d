"""What page scores add to the attention of the torch-native backend, beside upstream's, in one run.

Attention only, all layers of a pass: linear layers, sampling and scheduling are left out, so these ratios
are far above those of a whole step. Stock, idle (no emitting step) and emitting passes take turns on the
same pools, so that a noisy machine is noisy for all of them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from results import print_rows, write_results
from rich.progress import track
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions
from sglang_importance.attention.rows import Phase
from sglang_importance.attention.torch_native import EmittingTorchNativeBackend
from sglang_importance.cpu.attention import DecodeCopiesContext, ExtendComputesCachedRows
from sglang_importance.cpu.shim import apply_needed

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32
PAGE_SIZE = 16
NEVER = 1 << 30


@dataclass(frozen=True)
class Workload:
    """One kind of pass: for each request ``extend`` new tokens, or a decode step where that is None."""

    name: str
    batch: int
    context: int
    extend: int | None = None


WORKLOADS = (
    Workload("decode", 1, 512),
    Workload("decode", 1, 4096),
    Workload("decode", 8, 2048),
    Workload("prefill", 1, 2048, extend=2048),
    Workload("prefill, cached prefix", 1, 2048, extend=64),
)


class Subject:
    """A filled pool with upstream's backend and two of ours on it: one that emits always, one never."""

    def __init__(self, workload: Workload, layers: int) -> None:
        torch.manual_seed(0)
        tokens = workload.batch * workload.context
        model = torch.nn.ModuleList(
            RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=i) for i in range(layers)
        )
        runner = SimpleNamespace(
            device="cpu",
            page_size=PAGE_SIZE,
            model=model,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            use_mla_backend=False,
            req_to_token_pool=ReqToTokenPool(workload.batch, workload.context, "cpu", False),
            token_to_kv_pool=MHATokenToKVPool(
                size=tokens,
                page_size=PAGE_SIZE,
                dtype=torch.float32,
                head_num=KV_HEADS,
                head_dim=HEAD_DIM,
                layer_num=layers,
                device="cpu",
                enable_memory_saver=False,
                enable_alt_stream=False,
            ),
        )
        for keys in runner.token_to_kv_pool.k_buffer:
            keys.normal_()
        table = runner.req_to_token_pool.req_to_token
        for slot in range(1, workload.batch + 1):
            table[slot] = torch.arange(workload.context) + PAGE_SIZE + (slot - 1) * workload.context
        self.layers = model
        self.batch = self._batch(workload, table)
        self.stock = TorchNativeAttnBackend(runner)
        self.emitting = EmittingTorchNativeBackend(
            runner, ImportanceOptions(policy="importance", signal=SignalOptions(interval=1))
        )
        self.idle = EmittingTorchNativeBackend(
            runner, ImportanceOptions(policy="importance", signal=SignalOptions(interval=NEVER))
        )
        self.qkv = [
            torch.randn(workload.batch * (workload.extend or 1), heads * HEAD_DIM)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.qkv[1:] = [heads.view(-1, KV_HEADS, HEAD_DIM) for heads in self.qkv[1:]]

    @staticmethod
    def _batch(workload: Workload, table: torch.Tensor) -> SimpleNamespace:
        new = workload.extend or 1
        slots = torch.arange(1, workload.batch + 1)
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE if workload.extend is None else ForwardMode.EXTEND,
            rids=[f"request-{slot}" for slot in slots.tolist()],
            req_pool_indices=slots,
            input_ids=torch.zeros(workload.batch * new, dtype=torch.int64),
            seq_lens=torch.full_like(slots, workload.context),
            seq_lens_cpu=torch.full_like(slots, workload.context),
            extend_prefix_lens=torch.full_like(slots, workload.context - new),
            extend_seq_lens=torch.full_like(slots, new),
            out_cache_loc=table[1:, -new:].reshape(-1).long(),
            encoder_lens=None,
            encoder_out_cache_loc=None,
        )

    def run(self, backend: TorchNativeAttnBackend) -> float:
        """Microseconds of one pass through all layers, and of reading its scores."""
        start = time.perf_counter()
        backend.init_forward_metadata(self.batch)
        for layer in self.layers:
            backend.forward(*self.qkv, layer, self.batch)
        if isinstance(backend, EmittingTorchNativeBackend):
            for slot, phase in product(self.batch.req_pool_indices.tolist(), Phase):
                backend.rows.consume(slot, phase)  # a CPU computes scores when they are read
        return (time.perf_counter() - start) * 1e6


def measure(workload: Workload, layers: int, rounds: int) -> dict[str, Any]:
    subject = Subject(workload, layers)
    backends = {"stock": subject.stock, "idle": subject.idle, "emitting": subject.emitting}
    for backend in backends.values():
        subject.run(backend)  # The idle backend's first decode step emits: leave it behind.
    times: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(rounds):
        for name, backend in backends.items():
            times[name].append(subject.run(backend))
    stock = statistics.median(times["stock"])
    added = statistics.median(a - b for a, b in zip(times["emitting"], times["stock"], strict=True))
    row = {
        "pass": workload.name,
        "batch": workload.batch,
        "context": workload.context,
        "layers": layers,
        "stock_us": round(stock, 1),
        "added_us": round(added, 1),
        "emitting": round(1 + added / stock, 3),
        "idle": None,
        "at_default_interval": None,
    }
    if workload.extend is None:
        idle = statistics.median(a - b for a, b in zip(times["idle"], times["stock"], strict=True))
        interval = ImportanceOptions().signal.interval
        row["idle"] = round(1 + idle / stock, 3)
        row["at_default_interval"] = round(1 + (added + (interval - 1) * idle) / interval / stock, 3)
    return row


def main(
    layers: Annotated[int, typer.Option(help="Attention layers of the model.")] = 4,
    rounds: Annotated[int, typer.Option(help="Passes of each kind.")] = 100,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where to write; default benchmark/results.")] = None,
) -> None:
    """Times attention passes with and without page scores."""
    torch.set_num_threads(threads)
    apply_needed((ExtendComputesCachedRows(), DecodeCopiesContext()))
    with torch.inference_mode():
        rows = [measure(workload, layers, rounds) for workload in track(WORKLOADS, "Attention passes")]
    print_rows("Page scores on CPU, attention only, microseconds per pass", rows)
    write_results("emission", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

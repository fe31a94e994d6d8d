"""Decode steps as replays of a captured graph: a real one on a device, without one a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from support.drivers.attention_driver import HEAD_DIM, HEADS, KV_HEADS, AttentionDriver


class CapturedDecode(AttentionDriver):
    """Decode over buffers of fixed addresses, as upstream's decode graph runner does it.

    The stand-in calls a backend's kernels at capture time only, and a replay calls them again with the very
    arguments of the capture: what our Python does in ``forward_decode`` is not done again.
    """

    CAPTURED_BATCH = 3
    LAUNCHERS: tuple[tuple[Any, str], ...] = ()  # Functions that launch kernels of ours.

    def capture(self) -> None:
        """Before any request: padded, with request slot 0."""
        batch, real = self.CAPTURED_BATCH, {"dtype": self.dtype, "device": self.device}
        int64 = {"dtype": torch.int64, "device": self.device}
        self._q = torch.zeros(len(self.layers), batch, HEADS * HEAD_DIM, **real)
        self._kv = torch.zeros(2, len(self.layers), batch, KV_HEADS, HEAD_DIM, **real)
        self._static = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=batch,
            input_ids=torch.zeros(batch, **int64),
            positions=torch.zeros(batch, **int64),
            req_pool_indices=torch.zeros(batch, **int64),
            seq_lens=torch.ones(batch, **int64),
            seq_lens_cpu=torch.ones(batch, dtype=torch.int64),
            seq_lens_sum=batch,
            out_cache_loc=torch.zeros(batch, **int64),
        )
        record = self._graph_of if self.device == "cuda" else self._launches_of
        self._graphs = {}
        for backend in (self.backend, self.stock):
            backend.init_cuda_graph_state(batch, batch)
            backend.init_forward_metadata_out_graph(self._static, in_capture=True)
            self._graphs[backend] = record(backend)
        self._eager = self.run_model
        self.run_model = self._replayed

    def _forward_layers(self, backend: Any) -> list[torch.Tensor]:
        inputs = zip(self.layers, self._q, *self._kv, strict=True)
        return [backend.forward_decode(q, k, v, layer, self._static) for layer, q, k, v in inputs]

    def _graph_of(self, backend: Any) -> tuple[Callable[[], None], list[torch.Tensor]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward_layers(backend)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._forward_layers(backend)
        return graph.replay, outputs

    def _launches_of(self, backend: Any) -> tuple[Callable[[], None], list[torch.Tensor]]:
        launches: list[Callable[[], None]] = []

        def replay() -> None:
            for launch in launches:
                launch()

        with recorded(launches, (backend, "decode_attention_fwd"), *self.LAUNCHERS):
            outputs = self._forward_layers(backend)
        return replay, outputs

    def _replayed(self, batch: ForwardBatch) -> SimpleNamespace:
        if batch.forward_mode != ForwardMode.DECODE:
            return self._eager(batch)
        count, static, pool = batch.batch_size, self._static, self.runner.token_to_kv_pool
        static.req_pool_indices.zero_()[:count] = batch.req_pool_indices
        static.seq_lens.fill_(1)[:count] = batch.seq_lens
        static.seq_lens_cpu.fill_(1)[:count] = batch.seq_lens_cpu
        static.seq_lens_sum = int(static.seq_lens_cpu.sum())
        static.out_cache_loc.zero_()[:count] = batch.out_cache_loc
        self._q.copy_(3 * torch.randn(self._q.shape, generator=self.random))
        self._kv.copy_(torch.randn(self._kv.shape, generator=self.random))
        for layer, k, v in zip(self.layers, *self._kv, strict=True):
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k[:count], v[:count])
        results = []
        for backend, (replay, outputs) in self._graphs.items():
            backend.init_forward_metadata_out_graph(static)
            for output in outputs:
                output.fill_(float("nan"))
            replay()
            results.append([output[:count].clone() for output in outputs])
        assert all(map(torch.equal, *results)), "the emitting backend changed an output"
        for layer in range(len(self.layers)):
            q = self._q[layer, :count].view(-1, HEADS, HEAD_DIM)
            self._remember(self._chunks, layer, q, self._kv[0, layer, :count])
        return SimpleNamespace(can_run_graph=True)


@contextmanager
def recorded(launches: list[Callable[[], None]], *launchers: tuple[Any, str]) -> Iterator[None]:
    """Notes every call of the named functions, in their order, and lets it through."""

    def noting(launch: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any, **kwargs: Any) -> None:
            launches.append(lambda: launch(*args, **kwargs))
            launch(*args, **kwargs)

        return noted

    originals = [(owner, name, getattr(owner, name)) for owner, name in launchers]
    try:
        for owner, name, launch in originals:
            setattr(owner, name, noting(launch))
        yield
    finally:
        for owner, name, launch in originals:
            setattr(owner, name, launch)

"""A model runner's attention without the model: real pools and backend, random queries, keys and values.

It keeps every key and query that it made, so that a test computes what a row must hold from the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_importance.options.importance_options import SETTINGS, ImportanceOptions
from sgl_importance.sparse.device_plan import KvShape
from sgl_importance_lab.conformance.page_scores import combine_layers, layer_page_scores
from sglang_importance.attention.rows import Phase, RowScores
from sglang_importance.attention.torch_native import EmittingTorchNativeBackend
from sglang_importance.sparse.pool import TieredKVPool

# Tensor cores multiply no narrower heads than 16, FlashInfer has none narrower than 64.
HEADS, KV_HEADS, HEAD_DIM, NUM_LAYERS = 4, 2, 64 if torch.cuda.is_available() else 8, 3
SCALE = HEAD_DIM**-0.5
SLOTS, MAX_CONTEXT, POOL_TOKENS = 4, 96, 512
KV_SHAPE = KvShape(layers=NUM_LAYERS, kv_heads=KV_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM, item_bytes=4)


class Layers(torch.nn.Module):
    """Stands in for a model: its attention layers are all that the backend looks at."""

    def __init__(self, num_layers: int = NUM_LAYERS, temperature_len: int = -1, **attention: object) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            RadixAttention(HEADS, HEAD_DIM, SCALE, KV_HEADS, layer_id=i, **attention)
            for i in range(num_layers)
        )
        for layer in self.layers:
            layer.xai_temperature_len = temperature_len  # as Grok's model does


def model_runner(
    *,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    model: torch.nn.Module | None = None,
    is_encoder_decoder: bool = False,
    device: str = "cpu",
) -> SimpleNamespace:
    return SimpleNamespace(
        device=device,
        page_size=page_size,
        model=model or Layers(),
        model_config=SimpleNamespace(is_encoder_decoder=is_encoder_decoder),
        is_draft_worker=False,
        req_to_token_pool=ReqToTokenPool(SLOTS, MAX_CONTEXT, device, enable_memory_saver=False),
        token_to_kv_pool=MHATokenToKVPool(
            size=POOL_TOKENS,
            page_size=page_size,
            dtype=dtype,
            head_num=KV_HEADS,
            head_dim=HEAD_DIM,
            layer_num=NUM_LAYERS,
            device=device,
            enable_memory_saver=False,
            enable_alt_stream=False,
        ),
    )


def tiered_pool(page_size: int) -> TieredKVPool:
    """A pool of ``KV_SHAPE`` to put in the place of a runner's own; it has no slots yet."""
    return TieredKVPool(
        POOL_TOKENS,
        page_size=page_size,
        dtype=torch.float32,
        head_num=KV_HEADS,
        head_dim=HEAD_DIM,
        layer_num=NUM_LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def options(**changes: object) -> ImportanceOptions:
    """What the drivers' tests observe where they do not say otherwise.

    Args:
        changes: settings by name: of the signal, or by their whole place (``sparse.budget``).
    """
    defaults = {"interval": 1, "window": 4, "sink_tokens": 2, "local_tokens": 3}
    places = {
        name if "." in name or name in SETTINGS else f"signal.{name}": value
        for name, value in {**defaults, **changes}.items()
    }
    return ImportanceOptions.of({"policy": "importance", **places})


@dataclass
class Sequence:
    """One request: where its tokens lie and every query and key that it had, by layer."""

    rid: str
    slot: int
    locations: list[int] = field(default_factory=list)
    q: dict[int, torch.Tensor] = field(default_factory=dict)
    k: dict[int, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.locations)


def _overwrite(batch: ForwardBatch) -> None:
    """As the next pass does upstream: its eager runner copies every batch into the same buffers."""
    tensors = (value for value in vars(batch).values() if isinstance(value, torch.Tensor))
    for tensor in tensors:
        tensor.fill_(-1)


class AttentionDriver:
    """Runs forward passes through the emitting backend and, beside it, through upstream's."""

    atol = 1e-5

    def __init__(
        self,
        options: ImportanceOptions,
        *,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **attention: object,
    ) -> None:
        self.options = options
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        model = Layers(**attention)
        self.runner = model_runner(page_size=page_size, dtype=dtype, device=device, model=model)
        self.run_model = self._run_model
        self.runner.forward = lambda batch: self.run_model(batch)
        self.backend = EmittingTorchNativeBackend(self.runner, options)
        self.stock = TorchNativeAttnBackend(self.runner)
        self.rows = self.backend.rows
        self.layers = list(self.runner.model.layers)
        self.random = torch.Generator().manual_seed(0)
        # Pages of one sequence lie scattered over the pool; page 0 is upstream's padding.
        pages = 1 + torch.randperm(POOL_TOKENS // page_size - 1, generator=self.random)
        self._free_pages = pages.tolist()

    def _grow(self, sequence: Sequence, tokens: int) -> list[int]:
        new = []
        for _ in range(tokens):
            offset = len(sequence) % self.page_size
            page = sequence.locations[-1] // self.page_size if offset else self._free_pages.pop()
            sequence.locations.append(page * self.page_size + offset)
            new.append(sequence.locations[-1])
        table = self.runner.req_to_token_pool.req_to_token
        table[sequence.slot, : len(sequence)] = torch.tensor(sequence.locations, dtype=table.dtype)
        return new

    def adopt_prefix(self, sequence: Sequence, other: Sequence, tokens: int) -> None:
        """A cached prefix: the first ``tokens`` of ``other`` become those of an empty ``sequence``."""
        assert not sequence.locations
        assert tokens % self.page_size == 0
        sequence.locations = other.locations[:tokens]
        sequence.k = {layer: keys[:tokens] for layer, keys in other.k.items()}
        table = self.runner.req_to_token_pool.req_to_token
        table[sequence.slot, :tokens] = torch.tensor(sequence.locations, dtype=table.dtype)

    def extend(self, *chunks: tuple[Sequence, int], dummy: bool = False) -> None:
        prefixes = [len(sequence) for sequence, _ in chunks]
        self._forward(ForwardMode.EXTEND, list(chunks), prefixes, dummy=dummy)

    def decode(self, *sequences: Sequence, dummy: bool = False) -> None:
        prefixes = [len(sequence) for sequence in sequences]
        self._forward(ForwardMode.DECODE, [(s, 1) for s in sequences], prefixes, dummy=dummy)

    def mixed(self, extending: list[tuple[Sequence, int]], *decoding: Sequence) -> None:
        """A prefill with the decode step of others behind it, as upstream mixes them."""
        chunks = [*extending, *((sequence, 1) for sequence in decoding)]
        prefixes = [len(sequence) for sequence, _ in chunks]
        self._forward(ForwardMode.MIXED, chunks, prefixes, dummy=False)

    def _forward(
        self, mode: ForwardMode, chunks: list[tuple[Sequence, int]], prefixes: list[int], *, dummy: bool
    ) -> None:
        locations = [location for sequence, tokens in chunks for location in self._grow(sequence, tokens)]
        lengths = [tokens for _, tokens in chunks]
        extends = mode != ForwardMode.DECODE
        seq_lens = torch.tensor([len(sequence) for sequence, _ in chunks])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(chunks),
            input_ids=torch.zeros(len(locations), dtype=torch.int64, device=self.device),
            rids=None if dummy else [sequence.rid for sequence, _ in chunks],
            req_pool_indices=torch.tensor([sequence.slot for sequence, _ in chunks], device=self.device),
            seq_lens=seq_lens.to(self.device),
            seq_lens_cpu=seq_lens.clone(),
            seq_lens_sum=int(seq_lens.sum()),
            out_cache_loc=torch.tensor(locations, device=self.device),
            extend_prefix_lens=torch.tensor(prefixes, device=self.device) if extends else None,
            extend_seq_lens=torch.tensor(lengths, device=self.device) if extends else None,
            extend_prefix_lens_cpu=prefixes if extends else None,
            extend_seq_lens_cpu=lengths if extends else None,
        )
        self._chunks = chunks
        self.runner.forward(batch)
        _overwrite(batch)

    def _run_model(self, batch: ForwardBatch) -> SimpleNamespace:
        self.backend.init_forward_metadata(batch)
        self.stock.init_forward_metadata(batch)
        tokens = len(batch.out_cache_loc)
        for layer in self.layers:
            q, k, v = (
                torch.randn(tokens, heads * HEAD_DIM, generator=self.random).to(self.dtype).to(self.device)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            q *= 3
            heads = k.view(-1, KV_HEADS, HEAD_DIM), v.view(-1, KV_HEADS, HEAD_DIM)
            output = self.backend.forward(q, *heads, layer, batch)
            stock_output = self.stock.forward(q, *heads, layer, batch)
            assert torch.equal(output, stock_output), "the emitting backend changed an output"
            self._remember(self._chunks, layer.layer_id, q.view(-1, HEADS, HEAD_DIM), heads[0])
        return SimpleNamespace(can_run_graph=False)

    @staticmethod
    def _remember(
        chunks: list[tuple[Sequence, int]], layer_id: int, q: torch.Tensor, k: torch.Tensor
    ) -> None:
        q, k = q.cpu(), k.cpu()
        start = 0
        for sequence, tokens in chunks:
            rows = slice(start, start + tokens)
            known = sequence.k.get(layer_id, k[:0])
            sequence.k[layer_id] = torch.cat([known, k[rows]])
            padding = q.new_zeros(len(known) - len(sequence.q.get(layer_id, q[:0])), HEADS, HEAD_DIM)
            sequence.q[layer_id] = torch.cat([sequence.q.get(layer_id, q[:0]), padding, q[rows]])
            start += tokens

    def expected(self, sequence: Sequence, positions: list[int], layers: tuple[int, ...]) -> np.ndarray:
        """Body mass and peak of a row after the query tokens at ``positions``, by the reference."""
        sums = np.zeros((2, -(-(max(positions) + 1) // self.page_size)), dtype=np.float32)
        for position in positions:
            scores = combine_layers(
                [
                    layer_page_scores(
                        sequence.q[layer][position][None],
                        sequence.k[layer][: position + 1],
                        torch.tensor([position]),
                        scale=SCALE,
                        logit_cap=self.layers[layer].logit_cap,
                        page_size=self.page_size,
                        sink_tokens=self.options.signal.sink_tokens,
                        local_tokens=self.options.signal.local_tokens,
                    )
                    for layer in layers
                ]
            )
            num_pages = scores.mass.shape[1]
            sums[0, :num_pages] += scores.body[0].numpy()
            sums[1, :num_pages] = np.maximum(sums[1, :num_pages], scores.peak[0].numpy())
        return sums

    def check_row(
        self,
        sequence: Sequence,
        phase: Phase,
        positions: list[int],
        layers: tuple[int, ...] = tuple(range(NUM_LAYERS)),
    ) -> RowScores:
        """Consumes a row and compares it with the reference."""
        self.rows.check_integrity()
        row = self.rows.consume(sequence.slot, phase)
        assert row is not None, f"no scores of {phase} in slot {sequence.slot}"
        assert row.query_tokens == len(positions)
        got = np.stack([row.body, row.peak])
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, self.expected(sequence, positions, layers), atol=self.atol)
        self.rows.check_integrity()
        return row

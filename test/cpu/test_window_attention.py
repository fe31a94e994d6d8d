"""Attention over the pool of sliding windows, and beside learnt sinks: against its definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_importance.cpu.request_attention import attend
from sglang_importance.cpu.window_attention import WindowPoolAndSinks

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, SLOTS, MAX_CONTEXT = 4, 2, 16, 8, 96, 40
SINKS = torch.tensor([3.0, -1.0, 0.0, 5.0])


def by_definition(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[num_q, heads, value_dim] in double precision, by loops over queries and heads."""
    rows = []
    for i, position in enumerate(range(len(keys) - len(query), len(keys))):
        seen = slice(max(0, position - window) if window >= 0 else 0, position + 1)
        for head in range(HEADS):
            kv_head = head * KV_HEADS // HEADS
            logits = 0.3 * keys[seen, kv_head].double() @ query[i, head].double()
            if sinks is not None:
                logits = torch.cat((logits, sinks[head, None].double()))
            weights = logits.softmax(0)[: seen.stop - seen.start]
            rows.append(weights @ values[seen, kv_head].double())
    return torch.stack(rows).view(len(query), HEADS, -1)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(
    ("num_q", "kv_len", "window"),
    [(7, 7, -1), (3, 20, -1), (1, 20, 4), (9, 20, 4), (70, 70, -1), (135, 150, -1), (135, 150, 4)],
)
def test_attention_by_definition(num_q: int, kv_len: int, window: int, sinks: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(num_q, HEADS, HEAD_DIM, generator=generator)
    keys = torch.randn(kv_len, KV_HEADS, HEAD_DIM, generator=generator)
    values = torch.randn(kv_len, KV_HEADS, VALUE_DIM, generator=generator)
    output = attend(query, keys, values, window=window, scaling=0.3, sinks=sinks)
    expected = by_definition(query, keys, values, window, sinks)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operator hands out."""

    numbers = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [-1, 128])
def test_memory_does_not_grow_with_heads_times_queries_times_keys(window: int, dtype: torch.dtype) -> None:
    heads, tokens = 64, 1024
    query = torch.zeros(tokens, heads, HEAD_DIM, dtype=dtype)
    kept = torch.zeros(tokens, 8, HEAD_DIM, dtype=dtype)
    with Largest() as largest:
        attend(query, kept, kept, window=window, scaling=0.3, sinks=torch.zeros(heads))
    assert 0 < largest.numbers <= tokens * tokens


class WindowPool:
    """Two pools as sglang's: the windows' holds a token elsewhere, and nothing that lies further back."""

    swa_layer_nums = 1

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, elsewhere: torch.Tensor) -> None:
        self.keys, self.values, self.elsewhere = keys, values, elsewhere

    def translate_loc_from_full_to_swa(self, locations: torch.Tensor) -> torch.Tensor:
        return self.elsewhere[locations]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values


def test_drafts_over_windows_are_refused_in_one_line() -> None:
    nothing = torch.zeros(1, KV_HEADS, HEAD_DIM)
    backend = SimpleNamespace(
        use_sliding_window_kv_pool=True,
        token_to_kv_pool=WindowPool(nothing, nothing, torch.zeros(1)),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
    )
    layer = RadixAttention(HEADS, HEAD_DIM, 0.3, KV_HEADS, layer_id=0, sliding_window_size=4)
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    forward: Any = TorchNativeAttnBackend.forward_extend
    with pytest.raises(NotImplementedError, match="speculative decoding over sliding windows"):
        forward(backend, torch.zeros(1, HEADS * HEAD_DIM), None, None, layer, batch, sinks=SINKS)


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_the_pool_of_windows_is_read_where_it_holds_a_token(mode: str) -> None:
    window, seq_lens = 4, (20, 9)
    num_q = {"extend": (6, 9), "decode": (1, 1)}[mode]
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(SLOTS, KV_HEADS, HEAD_DIM, generator=generator)
    values = torch.randn(SLOTS, KV_HEADS, HEAD_DIM, generator=generator)
    elsewhere = torch.randperm(SLOTS, generator=generator)
    table = torch.zeros(2, MAX_CONTEXT, dtype=torch.int64)
    locations = torch.randperm(SLOTS, generator=generator)
    table[0, :20], table[1, :9] = locations[:20], locations[20:29]
    # Freed behind the window of the first query: whoever reads there, reads nonsense.
    gone = elsewhere[table[0, : 20 - num_q[0] - window]]
    keys[gone] = values[gone] = torch.nan
    backend = SimpleNamespace(
        use_sliding_window_kv_pool=True,
        token_to_kv_pool=WindowPool(keys, values, elsewhere),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND if mode == "extend" else ForwardMode.DECODE,
        req_pool_indices=torch.tensor([0, 1]),
        seq_lens=torch.tensor(seq_lens),
        extend_seq_lens=torch.tensor(num_q),
    )
    query = torch.randn(sum(num_q), HEADS * HEAD_DIM, generator=generator)
    layer = RadixAttention(HEADS, HEAD_DIM, 0.3, KV_HEADS, layer_id=0, sliding_window_size=window)
    forward: Any = getattr(TorchNativeAttnBackend, f"forward_{mode}")
    output = forward(backend, query, None, None, layer, batch, sinks=SINKS).view(-1, HEADS, HEAD_DIM)
    first = 0
    for row, (seq_len, new) in enumerate(zip(seq_lens, num_q, strict=True)):
        held = elsewhere[table[row, :seq_len]]
        queries = slice(first, first + new)
        expected = by_definition(
            query.view(-1, HEADS, HEAD_DIM)[queries],
            keys[held].nan_to_num(),
            values[held].nan_to_num(),
            window,
            SINKS,
        )
        torch.testing.assert_close(output[queries].double(), expected, rtol=1e-5, atol=1e-5)
        first += new


def test_the_shim_looks_for_the_defect_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not WindowPoolAndSinks().needed()  # ours is in place

    def without_sinks(self: object, q: object) -> None: ...

    monkeypatch.setattr(TorchNativeAttnBackend, "forward_extend", without_sinks)
    assert WindowPoolAndSinks().needed()

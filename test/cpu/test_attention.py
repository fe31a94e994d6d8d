"""Torch-native attention: against its definition, only for new rows, and without copies of contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_importance_kernels import pool_attention
from sglang_importance.cpu import attention
from sglang_importance.cpu.attention import DecodeCopiesContext, ExtendComputesCachedRows, keeps_upstream

SHIMS = {"extend": ExtendComputesCachedRows, "decode": DecodeCopiesContext}
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """A batch. Values are a part of the keys where there is one KV head and they are no wider."""

    prefixes: tuple[int, ...]
    extends: tuple[int, ...]
    window: int | None = None
    causal: bool = True
    cache_dtype: torch.dtype = torch.float32
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    shares: bool = False


@dataclass(frozen=True)
class Batch:
    """What the backend is given for a case."""

    case: Case
    requests: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def batch_of(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(case.prefixes) + torch.tensor(case.extends)
    requests = torch.randperm(len(lengths), generator=generator)
    table = torch.zeros(len(lengths), int(lengths.max()) + 3, dtype=torch.int32)
    slots = int(lengths.sum()) + 20
    free = torch.randperm(slots, generator=generator).int()
    keys = torch.full((slots, case.kv_heads, case.dim), torch.nan)
    values = torch.full((slots, case.kv_heads, case.value_dim), torch.nan)
    for request, length, new in zip(requests, lengths.tolist(), case.extends, strict=True):
        table[request, :length], free = free[:length], free[length:]
        # What no query sees may be somebody else's.
        first = 0 if case.window is None else max(0, length - new - case.window)
        seen = table[request, first:length].long()
        keys[seen] = torch.randn(len(seen), *keys.shape[1:], generator=generator)
        values[seen] = torch.randn(len(seen), *values.shape[1:], generator=generator)
    keys, values = keys.to(case.cache_dtype), values.to(case.cache_dtype)
    if case.shares:
        values = keys[..., : case.value_dim]
    query = torch.randn(sum(case.extends), case.heads, case.dim, generator=generator)
    return Batch(case, requests, lengths, table, query, keys, values)


def attended(batch: Batch) -> torch.Tensor:
    """Output of the backend's extend, [tokens, heads, value_dim]."""
    case = batch.case
    result: torch.Tensor = TorchNativeAttnBackend._run_sdpa_forward_extend(
        SimpleNamespace(),
        *(batch.query, batch.query.new_full((len(batch.query), case.heads, case.value_dim), torch.nan)),
        *(batch.keys, batch.values, batch.table, batch.requests),
        *(batch.lengths, torch.tensor(case.prefixes), torch.tensor(case.extends)),
        scaling=SCALE,
        enable_gqa=case.heads != case.kv_heads,
        causal=case.causal,
        sliding_window_size=case.window,
    )
    return result


def decoded(batch: Batch) -> torch.Tensor:
    """Output of the backend's decode step, likewise; every request has one query."""
    case = batch.case
    result: torch.Tensor = TorchNativeAttnBackend._run_sdpa_forward_decode(
        SimpleNamespace(),
        *(batch.query, batch.query.new_full((len(batch.query), case.heads, case.value_dim), torch.nan)),
        *(batch.keys, batch.values, batch.table, batch.requests, batch.lengths),
        scaling=SCALE,
        enable_gqa=case.heads != case.kv_heads,
        sliding_window_size=case.window,
    )
    return result


def by_definition(batch: Batch) -> torch.Tensor:
    """[tokens, heads, value_dim] in double precision, by loops over queries and heads."""
    case = batch.case
    rows = []
    start = 0
    for request, prefix, new in zip(batch.requests.tolist(), case.prefixes, case.extends, strict=True):
        context = batch.table[request, : prefix + new].long()
        for i in range(new):
            position = prefix + i
            first = 0 if case.window is None else max(0, position - case.window)
            seen = context[first : position + 1] if case.causal else context
            for head in range(case.heads):
                kv_head = head * case.kv_heads // case.heads
                logits = batch.keys[seen, kv_head].double() @ batch.query[start + i, head].double() * SCALE
                rows.append(logits.softmax(0) @ batch.values[seen, kv_head].double())
        start += new
    return torch.stack(rows).view(-1, case.heads, case.value_dim)


def assert_right(output: torch.Tensor, batch: Batch, error: float = 1e-5) -> None:
    torch.testing.assert_close(output.double(), by_definition(batch), rtol=error, atol=error)


@st.composite
def cases(draw: st.DrawFn, *, steps: bool = False) -> Case:
    requests = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 40), min_size=requests, max_size=requests)
    new = [1] * requests if steps else draw(st.lists(st.integers(1, 9), min_size=requests, max_size=requests))
    kv_heads = draw(st.sampled_from([1, 1, 2, 3]))
    dim = draw(st.sampled_from([8, 12, 16]))
    shares = kv_heads == 1 and draw(st.booleans())
    causal = steps or draw(st.sampled_from([True, True, True, False]))
    return Case(
        tuple(draw(sizes)),
        tuple(new),
        window=draw(st.none() | st.integers(0, 12)) if causal else None,
        causal=causal,
        cache_dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        dim=dim,
        value_dim=draw(st.integers(1, dim)) if shares else draw(st.sampled_from([8, 16])),
        shares=shares,
    )


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Any:
    """Contexts of a few tokens are merged from several parts, by two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_attention, "CHUNK_TOKENS", 7)
        yield
    torch.set_num_threads(before)


@given(cases())
@example(Case((0,), (7,)))
@example(Case((20,), (5,)))
@example(Case((33,), (1,)))
@example(Case((0, 12, 3, 20), (9, 4, 1, 8)))
@example(Case((6, 0), (5, 8), causal=False))
@example(Case((9, 0), (6, 11), window=4))
@example(Case((9, 200), (150, 70), window=80))
@example(Case((16,), (8,), cache_dtype=torch.bfloat16))
@example(Case((16, 30), (8, 1), heads=4, kv_heads=1, dim=16, value_dim=12, shares=True))
@settings(deadline=None)
def test_an_extend_is_attention_by_definition(case: Case) -> None:
    batch = batch_of(case)
    assert_right(attended(batch), batch)


@given(cases(steps=True))
@example(Case((0,), (1,)))
@example(Case((33, 7, 0, 13), (1, 1, 1, 1)))
@example(Case((33, 3), (1, 1), window=4))
@example(Case((16,), (1,), cache_dtype=torch.bfloat16))
@example(Case((16, 30), (1, 1), heads=4, kv_heads=1, dim=16, value_dim=12, shares=True))
@settings(deadline=None)
def test_a_decode_step_is_attention_by_definition(case: Case) -> None:
    batch = batch_of(case)
    assert_right(decoded(batch), batch)


def test_large_logits_do_not_overflow() -> None:
    batch = batch_of(Case((40,), (1,)))
    batch.query.mul_(200)
    assert_right(decoded(batch), batch, error=1e-3)


def test_what_a_request_gets_does_not_depend_on_the_batch_or_the_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = batch_of(Case((60, 9, 31), (1, 1, 1)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    by_three = decoded(together)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(decoded(together), by_three)
    for number in range(3):
        own = slice(number, number + 1)
        alone = replace(
            together,
            requests=together.requests[own],
            lengths=together.lengths[own],
            query=together.query[own],
        )
        assert torch.equal(decoded(alone), by_three[own])


class Sizes(TorchDispatchMode):
    """Numbers in the largest tensor that operators make, views aside, and the queries of each attention."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.queries: list[int] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if "flash_attention" in str(operator):
            self.queries.append(args[0].shape[0] * args[0].shape[1] * args[0].shape[2])
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, each.numel())
        return result


def test_only_new_rows_are_computed() -> None:
    batch = batch_of(Case((0, 12, 3, 20), (9, 4, 1, 8)))
    with Sizes() as sizes:
        attended(batch)
    # The first has no prefix; the third one's single query reads the pool where it lies.
    assert sizes.queries == [rows * batch.case.heads for rows in (9, 4, 4, 8, 8)]


@pytest.mark.parametrize("window", [None, 300])
def test_a_decode_step_copies_no_context(window: int | None) -> None:
    batch = batch_of(Case((400, 200), (1, 1), window=window))
    with Sizes() as sizes:
        decoded(batch)
    assert 0 < sizes.largest <= 602, "their places in the pool are the most that is copied"


@pytest.mark.parametrize(("step", "shim"), SHIMS.items())
def test_each_shim_looks_for_the_defect_itself(
    step: str, shim: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not shim().needed()  # ours is in place

    def defective(k_cache: Any, per_req_tokens: Any) -> Any:
        per_req_query_redudant = k_cache[per_req_tokens]
        return per_req_query_redudant

    monkeypatch.setattr(TorchNativeAttnBackend, f"_run_sdpa_forward_{step}", defective)
    assert shim().needed()


@pytest.mark.parametrize("options", [{"is_cross_attn": True}, {"encoder_lens": torch.tensor([3])}])
@pytest.mark.parametrize(("step", "shim"), SHIMS.items())
def test_attention_to_an_encoder_is_upstreams(
    step: str, shim: type[Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    name = f"_run_sdpa_forward_{step}"
    monkeypatch.setattr(TorchNativeAttnBackend, name, lambda *args, **given: calls.append((args, given)))
    shim().apply()
    parts = tuple(range(9 if step == "extend" else 7))
    getattr(TorchNativeAttnBackend, name)("backend", *parts, scaling=SCALE, **options)
    ((args, given),) = calls
    assert args[:-1] == ("backend", *parts)
    assert args[-1] is options.get("encoder_lens")
    assert given["is_cross_attn"] is options.get("is_cross_attn", False)
    assert given["scaling"] == SCALE


def test_the_switch_has_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(attention.SWITCH, raising=False)
    assert not keeps_upstream()
    monkeypatch.setenv(attention.SWITCH, "upstream")
    assert keeps_upstream()
    for other in ("", "ours", "UPSTREAM"):
        monkeypatch.setenv(attention.SWITCH, other)
        with pytest.raises(ValueError, match=rf"^{attention.SWITCH}=.* set it to upstream, .* or unset it$"):
            keeps_upstream()

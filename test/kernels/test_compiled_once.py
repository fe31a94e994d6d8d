"""No request waits for Triton's compiler: every batch and context launches the same compiled kernels.

Triton compiles a kernel anew for other constants, for integers that are 1 or multiples of 16, and for
pointers that are aligned to 16 bytes. What it would look up is computed here without a device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from sgl_importance_kernels.page_rows import PageRows  # noqa: E402
from sgl_importance_kernels.triton import (  # noqa: E402
    logit_reduction,
    page_reduction,
    qk_probe,
)
from sgl_importance_kernels.triton.log_sums import DecodeLogSums, LogSums  # noqa: E402
from sgl_importance_kernels.triton.logit_reduction import DecodeLogits, ObservedLogits  # noqa: E402
from sgl_importance_kernels.triton.paged_queries import PagedQueries  # noqa: E402
from sgl_importance_lab.kernels import warm_up  # noqa: E402
from sgl_importance_lab.kernels.warm_up import WarmUp  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")

BODY = {"sink_tokens": 4, "local_tokens": 16}
MODEL = WarmUp(head_dim=128, heads=32, kv_heads=8, page_size=16, layers=4, dtype=torch.bfloat16, device="cpu")
KERNELS = {
    qk_probe: ("_qk_probe_kernel",),
    page_reduction: ("_totals_kernel", "_rows_kernel", "_partials_kernel"),
    logit_reduction: ("_logit_rows_kernel", "_body_rows_kernel"),
}


class Compiled(set[tuple[Any, ...]]):
    """The kernels that launches needed, by what Triton looks them up under."""

    def take(self) -> set[tuple[Any, ...]]:
        taken = set(self)
        self.clear()
        return taken


class Launched:
    """Stands in for a kernel and notes what it would be compiled for on an H100."""

    def __init__(self, kernel: Any, compiled: Compiled) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self._name = kernel.__name__
        self._compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            parameters, key, options = self._bind(*args, **kwargs)
            named = zip(parameters, key, strict=True)
            self._compiled.add((self._name, *((name, str(value)) for name, value in named), str(options)))

        return launch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    notes = Compiled()
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Launched(getattr(module, name), notes))
    monkeypatch.setattr(warm_up, "_check_mass", lambda *_: None)
    return notes


def probe(requests: int, window: int, context: int, max_context: int, body: dict[str, int] = BODY) -> None:
    """A prefill's window of ``requests`` sequences, launched as the server does it."""
    int32 = {"dtype": torch.int32}
    zeros = torch.zeros(requests, **int32)
    queries = PagedQueries(
        locations=torch.empty(1, **int32).expand(1),
        location_starts=zeros.long(),
        seq_lens=zeros,
        first_query_rows=zeros.clone(),
        num_queries=zeros.clone(),
        slots=zeros.clone(),
        max_queries=window,
        max_seq_len=context,
    )
    log_sums = LogSums(
        num_layers=MODEL.layers,
        max_requests=requests,
        max_queries=window,
        num_heads=MODEL.heads,
        max_pages=-(-context // MODEL.page_size),
        device="cpu",
    )
    fused = torch.empty(requests * window, MODEL.heads + 2 * MODEL.kv_heads, 128, dtype=torch.bfloat16)
    settings = {"gate": torch.ones(1, **int32), "page_size": MODEL.page_size, **body}
    keys = torch.empty(1, MODEL.kv_heads, 128, dtype=torch.bfloat16)
    for layer in range(MODEL.layers):
        qk_probe.probe_layer(
            fused[:, : MODEL.heads], keys, queries, log_sums, layer, scale=0.0883, **settings
        )
    page_reduction.reduce_log_sums(log_sums, queries, rows(max_context), **settings)


def rows(max_context: int) -> PageRows:
    return PageRows.zeros(3, -(-max_context // MODEL.page_size), "cpu")


def decode_log_sums(max_batch: int, context: int, max_context: int, body: dict[str, int] = BODY) -> None:
    """The reduction behind upstream's Triton decode."""
    log_sums = DecodeLogSums(
        num_layers=MODEL.layers,
        max_observed=3,
        max_batch=max_batch,
        num_heads=MODEL.heads,
        max_pages=-(-max_context // MODEL.page_size),
        device="cpu",
        **body,
    )
    ones = torch.ones(1, dtype=torch.int32)
    queries = PagedQueries(
        locations=ones,
        location_starts=ones.long(),
        seq_lens=ones,
        first_query_rows=ones,
        num_queries=ones,
        slots=ones,
        max_queries=1,
        max_seq_len=context,
    )
    page_reduction.reduce_log_sums(
        log_sums, queries, rows(max_context), gate=ones, page_size=MODEL.page_size, **body
    )


def decode_logits(max_batch: int, context: int, max_context: int, body: dict[str, int] = BODY) -> None:
    """The reduction behind FlashInfer's decode."""
    step = DecodeLogits(
        num_layers=MODEL.layers,
        num_kv_heads=MODEL.kv_heads,
        group=MODEL.heads // MODEL.kv_heads,
        max_tokens=max_context + 3,
        max_requests=max_batch,
        max_pages=-(-max_context // MODEL.page_size),
        device="cpu",
    )
    ones = torch.ones(1, dtype=torch.int32)
    logit_reduction.reduce_logits(
        step,
        ObservedLogits(ones, ones, ones, ones),
        rows(max_context),
        gate=ones,
        max_seq_len=context,
        page_size=MODEL.page_size,
        log_sums_in_base_2=True,
        **body,
    )


CONTEXTS = (1, 40, 256, 1000, 4096, 50_001)


@pytest.mark.parametrize("window", [1, 5, 32])
def test_what_is_built_ahead_serves_every_prefill(window: int, compiled: Compiled) -> None:
    for num_q in MODEL.windows(32):
        MODEL.run(num_q)
    built = compiled.take()
    for context in CONTEXTS:
        for requests in (1, 2, 16):
            probe(requests, window, context, max_context=50_001, body={"sink_tokens": 16, "local_tokens": 1})
            assert compiled.take() <= built, (context, requests)


@pytest.mark.parametrize("decode", [decode_log_sums, decode_logits])
def test_what_is_built_ahead_serves_every_decode_step(decode: Any, compiled: Compiled) -> None:
    MODEL.run(1)
    MODEL.run_logits()
    built = compiled.take()
    for max_batch in (1, 16, 57):
        for context in CONTEXTS:
            decode(max_batch, context, 50_001, {"sink_tokens": 0, "local_tokens": 48})
            assert compiled.take() <= built, (max_batch, context)


@pytest.mark.parametrize(
    "changes", [{"key_dtype": torch.float8_e4m3fn}, {"logit_cap": 30.0}, {"dtype": torch.float16}], ids=str
)
def test_another_cache_needs_another_probe(changes: dict[str, Any], compiled: Compiled) -> None:
    MODEL.run(1)
    built = {key for key in compiled.take() if key[0] == "_qk_probe_kernel"}
    replace(MODEL, **changes).run(1)
    assert not compiled & built


def test_another_model_needs_other_kernels(compiled: Compiled) -> None:
    MODEL.run(1)
    built = compiled.take()
    replace(MODEL, heads=16).run(1)
    assert not compiled & built

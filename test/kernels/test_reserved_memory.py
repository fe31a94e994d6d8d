"""What is set aside for page scores before the KV pool is sized, and what the producers then allocate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang_importance.attention.reserved_memory as reserved_memory
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions
from sgl_importance_kernels.page_rows import PageRows
from sgl_importance_kernels.triton.log_sums import DecodeLogSums, LogSums
from sgl_importance_kernels.triton.logit_reduction import DecodeLogits
from sgl_importance_kernels.triton.paged_queries import observed_at_once
from sglang_importance.attention.decode_emission import MAX_EMITTED_BYTES
from sglang_importance.attention.layers import sampled_layers
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import attach_options

from support.drivers.attention_driver import HEADS, MAX_CONTEXT, Layers

MEBIBYTE = 1 << 20


def allocated(options: ImportanceOptions, layers: int, heads: int, slots: int, pages: int) -> int:
    """Bytes of the tensors that stay, made where tensors have sizes and no memory."""
    rows = PageRows.zeros(slots, pages, "meta")
    sizes = {"num_layers": layers, "max_pages": pages, "device": "meta"}
    observed = observed_at_once(slots, options.signal.interval)
    fitting = max(1, min(observed, MAX_EMITTED_BYTES // (4 * layers * heads * (pages + 4) + 8 * pages)))
    emitted: Any
    if options.source == "qk_probe":
        emitted = LogSums(max_requests=fitting, max_queries=1, num_heads=heads, **sizes)
    elif options.source == "triton":
        emitted = DecodeLogSums(
            max_observed=fitting, max_batch=slots, num_heads=heads, sink_tokens=4, local_tokens=16, **sizes
        )
    else:
        tokens = min(MAX_EMITTED_BYTES // (2 * layers * heads), slots * 16 * pages)
        emitted = DecodeLogits(
            num_kv_heads=heads,
            group=1,
            max_tokens=tokens,
            max_requests=slots,
            max_observed=observed,
            **sizes,
        )
    return 2 * sum(tensor.numel() * 4 for tensor in rows) + emitted.num_bytes


@pytest.mark.parametrize("source", ["qk_probe", "triton", "flashinfer"])
@pytest.mark.parametrize(("slots", "pages"), [(9, 8), (257, 512), (2049, 8192)])
def test_as_much_is_set_aside_as_is_allocated(source: str, slots: int, pages: int) -> None:
    options = ImportanceOptions(policy="importance", source=source)
    needed = reserved_memory.score_bytes(
        options, layers=4, heads=32, slots=slots, max_context_tokens=16 * pages, page_size=16
    )
    prefill = min(1 << 29, slots * options.signal.window * (4 * 4 * 32 * (pages + 4) + 8 * pages))
    kept = allocated(options, 4, 32, slots, pages)
    assert kept <= needed - prefill <= 1.05 * kept + MEBIBYTE


def configurator(source: str, **changes: Any) -> SimpleNamespace:
    options = ImportanceOptions(policy="importance", source=source, signal=SignalOptions(layers=(0,)))
    server_args = SimpleNamespace()
    attach_options(server_args, options)
    facts = {"device": "cuda", "is_draft_worker": False, "page_size": 4, **changes}
    return SimpleNamespace(
        server_args=server_args,
        model=Layers(),
        model_config=SimpleNamespace(context_len=MAX_CONTEXT),
        config_from_budget=lambda free: SimpleNamespace(max_total_num_tokens=free // 1024),
        resolve_max_num_reqs=lambda tokens: min(8, tokens // 2),
        **facts,
    )


def test_the_pool_gets_what_is_left() -> None:
    left = reserved_memory._without_scores(lambda *_: 64 * MEBIBYTE, configurator("qk_probe"), 1)
    needed = reserved_memory.score_bytes(
        ImportanceOptions(policy="importance", source="qk_probe"),
        layers=len(sampled_layers(range(3), (0,))),
        heads=HEADS,
        slots=9,
        max_context_tokens=MAX_CONTEXT + reserved_memory.EXTRA_CONTEXT_TOKENS,
        page_size=4,
    )
    assert left == 64 * MEBIBYTE - needed
    assert reserved_memory._without_scores(lambda *_: 99, configurator("qk_probe", device="cpu"), 1) == 99
    drafts = configurator("qk_probe", is_draft_worker=True)
    assert reserved_memory._without_scores(lambda *_: 99, drafts, 1) == 99
    with pytest.raises(LaunchRefused, match=r"page scores need \d+ MiB, and 0 MiB are left for the KV cache"):
        reserved_memory._without_scores(lambda *_: 4096, configurator("qk_probe"), 1)

"""Makes a scheduler build tiered pages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.runtime_context import get_parallel, get_schedule

from sgl_importance.laboratory import load_control
from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sgl_importance.sparse.device_plan import DevicePlan, DeviceTooSmall, KvShape, plan_device
from sgl_importance.sparse.selection_rule import SINK_TOKENS, WINDOW_TOKENS
from sgl_importance_kernels.sparse.page_choice import ChoiceRule
from sgl_importance_kernels.sparse.page_chooser import PageChooser
from sgl_importance_kernels.sparse.selectors.mean_and_bits import MeanAndBits
from sgl_importance_kernels.sparse.selectors.registry import SELECTORS
from sgl_importance_kernels.sparse.selectors.selector import Selector
from sglang_importance.attention.layers import full_attention_layers
from sglang_importance.attention.score_sources import NONE
from sglang_importance.sparse.captured_backend import (
    CAN_RUN_GRAPH,
    CapturedTieredBackend,
    can_run_graph,
)
from sglang_importance.sparse.emitting_backend import EmittingTieredBackend
from sglang_importance.sparse.pool import TieredKVPool, continue_by_whole_pages, forget_freed_pages
from sglang_importance.sparse.selections import Selections
from sglang_importance.sparse.selector_calibration import key_statistics
from sglang_importance.sparse.tiered_backend import TieredAttentionBackend
from sglang_importance.upstream.hooks import Hook, HookType, install_hooks
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import attention_backends, importance_options

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

HOST_SHARE = 0.9
"""Part of the free host memory that the pool may take on a machine with a GPU."""

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


def install_before_scheduler(options: ImportanceOptions) -> None:
    """Hooks the making of pool, allocator and attention. For a process whose scheduler is not built yet."""
    install_hooks(HOOKS)

    def create_backend(model_runner: ModelRunner, *, emits: bool) -> AttentionBackend:
        chooser, selecting = _choosing(model_runner, options) if options.is_sparse else (None, [])
        if emits:
            return EmittingTieredBackend(model_runner, options, chooser, selecting)
        if chooser is not None and chooser.can_capture and len(selecting) == _pool_of(model_runner).layer_num:
            return CapturedTieredBackend(model_runner, chooser, selecting, options.sparse)
        return TieredAttentionBackend(model_runner, chooser, selecting)

    register_attention_backend("torch_native")(partial(create_backend, emits=options.source != NONE))
    register_attention_backend("triton")(partial(create_backend, emits=False))


def _writes_no_kv_with_rope(_enable: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Models that can write KV in the kernel of RoPE leave it to attention, which knows the device's pages.

    Theirs would go to the pool's buffers: host memory, at places where only complete pages lie.
    """
    return False


def _host_bytes(profile: Callable[..., int], configurator: KVCacheConfigurator, *args: Any) -> int:
    """What the pool may take: host memory, where sglang would look at the device's alone.

    Raises:
        LaunchRefused: the device has no room for its part.
    """
    device_bytes = profile(configurator, *args)
    if torch.device(configurator.device).type == "cpu":
        return device_bytes
    logger.warning(
        "KV importance: --kv-residency tiered HAS HARDLY RUN ON A GPU: one H200, for minutes, with a tiny "
        "model and with random weights. Compare its answers with those of --kv-residency full before you "
        "rely on it."
    )
    tokens = get_schedule().max_total_tokens
    assert tokens is not None, "tiered pages on a GPU without --max-total-tokens"
    plan = _plan(configurator, tokens // configurator.page_size * configurator.page_size)
    if plan.device_bytes > device_bytes:
        raise LaunchRefused(
            [
                f"{name_of('tiered.device_tokens')} asks for {plan.device_bytes / 2**30:.1f} GiB of a device "
                f"that has {device_bytes / 2**30:.1f} left: use a smaller one"
            ]
        )
    return int(psutil.virtual_memory().available * HOST_SHARE)


def _max_requests(resolve: Callable[..., int], configurator: KVCacheConfigurator, token_capacity: int) -> int:
    """As many as upstream allows, and as have a slot for the page that they fill."""
    allowed = resolve(configurator, token_capacity)
    return min(allowed, _plan(configurator, token_capacity).num_frames)


def _tiered_pool(
    build: Callable[..., Any], configurator: KVCacheConfigurator, *, max_total_num_tokens: int, **kwargs: Any
) -> TieredKVPool:
    """Builds the pool of tiered pages in the place of upstream's.

    Raises:
        LaunchRefused: no attention to tiered pages reads what it would hold.
    """
    # Refused here, not with the other models (launch/modes): those are refused when the pool is there.
    model = configurator.model_config
    unread = {
        # The checkpoint asks for it, where --kv-cache-dtype says auto.
        "a checkpoint's quantized KV cache": configurator.kv_cache_dtype.itemsize == 1,
        "heads whose keys and values differ in size": model.head_dim != model.v_head_dim,
    }
    residency = name_of("tiered.residency")
    if lines := [
        f"{residency} tiered does not support {what}: use {residency} full"
        for what, is_so in unread.items()
        if is_so
    ]:
        raise LaunchRefused(lines)
    plan = _plan(configurator, max_total_num_tokens)
    options = _options(configurator)
    pool = build(
        configurator,
        max_total_num_tokens=max_total_num_tokens,
        **{**kwargs, "mha_pool_class": TieredKVPool},
    )
    assert isinstance(pool, TieredKVPool), "sglang built another pool"
    pool.attach_slots(
        plan,
        configurator.device,
        _selector(options, plan.page_size),
        Selections(options, plan.page_size) if options.is_sparse else None,
        uses_triton=plan.uses_triton,
    )
    logger.info("KV importance: Tiered pages: %s", plan)
    return pool


def _selector(options: ImportanceOptions, page_size: int) -> Selector | None:
    """The selector that was chosen; it may have to be calibrated.

    Raises:
        LaunchRefused: it takes no pages of this size.
    """
    if not options.is_sparse:
        return None
    name = options.sparse.selector
    make: Callable[[int], Selector] = SELECTORS.get(name) or load_control(name)
    try:
        return make(page_size)
    except ValueError as error:
        raise LaunchRefused([f"{name_of('sparse.selector')} {name}: {error}"]) from error


def _choosing(model_runner: ModelRunner, options: ImportanceOptions) -> tuple[PageChooser, list[int]]:
    """What makes steps read chosen pages, and the layers whose steps do."""
    pool = _pool_of(model_runner)
    rule = ChoiceRule(SINK_TOKENS, WINDOW_TOKENS)
    slots, representations = pool.slots, pool.slots.representations
    assert representations is not None, "a selector without representations"
    if isinstance(representations.selector, MeanAndBits):
        _calibrate(representations.selector, model_runner)
    chooser = PageChooser(representations, pool.page_size, rule, slots.traffic)
    return chooser, full_attention_layers(model_runner.model)


def _pool_of(model_runner: ModelRunner) -> TieredKVPool:
    pool = model_runner.token_to_kv_pool
    assert isinstance(pool, TieredKVPool), "sglang built another pool"
    return pool


def _calibrate(selector: MeanAndBits, model_runner: ModelRunner) -> None:
    device = model_runner.device
    statistics = key_statistics(
        model_runner.model,
        vocabulary=model_runner.model_config.vocab_size,
        page_size=model_runner.page_size,
        device=device,
    )
    selector.calibrate(statistics, device)
    layers, _, dim = statistics.variances.shape
    sizes = [selector.layer_bytes(layer, dim) for layer in range(layers)]
    logger.info(
        "KV importance: bits keeps %.0f bytes of a page and KV head as a mean, from %d to %d by layer",
        sum(sizes) / layers,
        min(sizes),
        max(sizes),
    )


def _tiered_allocator(
    build: Callable[..., PagedTokenToKVPoolAllocator],
    configurator: KVCacheConfigurator,
    *,
    token_to_kv_pool: TieredKVPool,
    **kwargs: Any,
) -> PagedTokenToKVPoolAllocator:
    allocator = build(configurator, token_to_kv_pool=token_to_kv_pool, **kwargs)
    forget_freed_pages(allocator, token_to_kv_pool.slots)
    continue_by_whole_pages(allocator)
    return allocator


HOOKS: dict[str, Hook] = {
    f"{_CONFIGURATOR}._profile_available_bytes": (_host_bytes, HookType.AROUND),
    f"{_CONFIGURATOR}.resolve_max_num_reqs": (_max_requests, HookType.AROUND),
    f"{_CONFIGURATOR}._build_mha_kv_pool": (_tiered_pool, HookType.AROUND),
    f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator": (_tiered_allocator, HookType.AROUND),
    "sglang.srt.models.utils.enable_fused_set_kv_buffer": (_writes_no_kv_with_rope, HookType.AROUND),
    CAN_RUN_GRAPH: (can_run_graph, HookType.AROUND),
}
"""Of a scheduler whose pages are tiered."""


def _options(configurator: KVCacheConfigurator) -> ImportanceOptions:
    options = importance_options(configurator.server_args)
    assert options is not None, "tiered pages without our options"
    return options


def _plan(configurator: KVCacheConfigurator, pool_tokens: int) -> DevicePlan:
    """The same for the same launch, whoever asks.

    Raises:
        LaunchRefused: the device memory that was given cannot hold what must be there.
    """
    options = _options(configurator)
    selector = _selector(options, configurator.page_size)
    model, parallel = configurator.model_config, get_parallel()
    assert model.head_dim is not None
    assert model.v_head_dim is not None
    shape = KvShape(
        layers=configurator.layer_info.num_effective_layers,
        kv_heads=model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size),
        key_dim=model.head_dim,
        value_dim=model.v_head_dim,
        item_bytes=configurator.kv_cache_dtype.itemsize,
    )
    try:
        return plan_device(
            shape,
            page_size=configurator.page_size,
            pool_tokens=pool_tokens,
            device_tokens=options.device_tokens_of(pool_tokens),
            max_requests=get_schedule().max_running_requests,
            kept_bytes=0 if selector is None else selector.kept_bytes(shape.key_dim),
            table_bytes=0
            if selector is None
            else selector.table_bytes(shape.layers, shape.kv_heads, shape.key_dim),
            uses_triton="triton" in attention_backends(configurator.server_args),
        )
    except DeviceTooSmall as error:
        raise LaunchRefused([str(error)]) from error

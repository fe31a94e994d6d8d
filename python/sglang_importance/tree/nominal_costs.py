"""Constants of the cost model for the model and the machine at hand.

Nominal figures by device type, not measurements: eviction depends on ratios of costs, and a constant that
differs between two starts or two ranks would make the same requests evict different nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_importance.policy.cost_model import CostModel
from sglang_importance.tree.occupancy import full_attention_allocator

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache


@dataclass(frozen=True, slots=True)
class NominalHardware:
    """Sustained rates: prefill FLOP/s, host to device bytes/s, storage to host bytes/s."""

    flops_per_second: float
    host_bytes_per_second: float
    storage_bytes_per_second: float


CPU = NominalHardware(flops_per_second=5e10, host_bytes_per_second=5e9, storage_bytes_per_second=5e8)
# A data-centre GPU at half of its dense bf16 peak, PCIe 5 x16, one NVMe drive.
ACCELERATOR = NominalHardware(flops_per_second=4e14, host_bytes_per_second=4e10, storage_bytes_per_second=3e9)


def active_parameters(text_config: Any, *, num_layers: int, head_dim: int) -> int:
    """Parameters that one token passes, without the embedding; experts count as often as they are active."""
    hidden: int = text_config.hidden_size
    heads: int = text_config.num_attention_heads
    kv_heads: int = getattr(text_config, "num_key_value_heads", None) or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts: int = getattr(text_config, "num_experts_per_tok", None) or 1
    dense: int = getattr(text_config, "intermediate_size", 4 * hidden)
    intermediate: int = getattr(text_config, "moe_intermediate_size", None) or dense
    return num_layers * (attention + 3 * hidden * intermediate * experts)


def attending_layers(pool: KVCache, num_layers: int) -> int:
    """Layers whose work on a token grows with what is before it; linear attention's does not.

    Args:
        pool: of the keys and values.
        num_layers: of the model.
    """
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return len(pool.full_attention_layer_id_mapping) if isinstance(pool, HybridLinearKVPool) else num_layers


def token_bytes(pool: KVCache, num_tokens: int) -> int:
    """Bytes of one token in all layers.

    Of a row, where the pool has one row a token: its size may change behind the tree's making
    (``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING``). Of all bytes, where it is put together from several pools.

    Args:
        pool: of the keys and values.
        num_tokens: that it holds.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if isinstance(pool, MHATokenToKVPool) and pool.k_buffer and pool.v_buffer:
        return sum(buffer[0].nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
    whole: Any = pool  # each pool has this, but their base does not declare it
    sizes = whole.get_kv_size_bytes()
    pool_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes
    return max(1, round(pool_bytes / num_tokens))


def cost_model(model_config: ModelConfig, allocator: BaseTokenToKVPoolAllocator) -> CostModel:
    """The cost model of this server, frozen at start."""
    hardware = CPU if str(allocator.device).startswith("cpu") else ACCELERATOR
    num_layers, head_dim = model_config.num_hidden_layers, model_config.head_dim
    num_heads = model_config.num_attention_heads
    assert num_heads is not None, "launch/modes refuses models without attention"
    assert head_dim is not None
    pool = allocator.get_kvcache()
    return CostModel.from_model(
        parameters=active_parameters(model_config.hf_text_config, num_layers=num_layers, head_dim=head_dim),
        num_layers=attending_layers(pool, num_layers),
        num_heads=num_heads,
        head_dim=head_dim,
        bytes_per_token=token_bytes(pool, full_attention_allocator(allocator).size),
        flops_per_second=hardware.flops_per_second,
        host_bytes_per_second=hardware.host_bytes_per_second,
        storage_bytes_per_second=hardware.storage_bytes_per_second,
    )

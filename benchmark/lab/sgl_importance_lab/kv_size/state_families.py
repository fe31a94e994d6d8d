"""Layers of models with recurrent states: Mamba, gated delta nets, Kimi delta attention, convolutions."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_importance_lab.kv_size.attention_families import (
    FULL,
    derived_heads,
    latent_queries,
    query_heads,
    stated_heads,
)
from sgl_importance_lab.kv_size.fields import Fields, SizeError
from sgl_importance_lab.kv_size.geometry import Geometry, HeadGeometry, LatentGeometry, StateGeometry
from sgl_importance_lab.kv_size.model_shape import LayerCache, QueryHeads

_Layers = tuple[int, list[LayerCache], QueryHeads | None]

LINEAR, MAMBA, ATTENTION = "linear_attention", "mamba", "attention"
_CONV_BYTES = 2
"""Windows of convolutions are bfloat16 in sglang, whatever the model is."""
_FLOAT32 = 4
_SSM_BYTES = {"float32": _FLOAT32, "bfloat16": 2, "float16": 2}


def qwen_gated_delta(config: Fields) -> _Layers:
    """Gated delta nets, and full attention in every fourth layer or so."""
    layers = config.layers()
    every = config.integer("full_attention_interval")
    full = [(i + 1) % every == 0 for i in range(layers)]
    if "layer_types" in config:
        types = config.words("layer_types", {LINEAR, FULL}, layers)
        if [each == FULL for each in types] != full:
            raise SizeError(
                f"layer_types has no full attention in every {every}th layer, where sglang has it: correct "
                "layer_types or full_attention_interval"
            )
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    value_dim = config.integer("linear_value_head_dim")
    state = StateGeometry(
        heads=value_heads,
        head_dim=value_dim,
        state_size=config.integer("linear_key_head_dim"),
        conv_channels=value_heads * value_dim,
        groups=key_heads,
        conv_window=config.integer("linear_conv_kernel_dim") - 1,
        conv_itemsize=_CONV_BYTES,
        ssm_itemsize=_ssm_bytes(config),
        groups_are_heads=True,
    )
    geometry = stated_heads(config)
    caches = [LayerCache(i, geometry if attends else state) for i, attends in enumerate(full)]
    return layers, caches, query_heads(config, geometry)


def kimi_linear(config: Fields) -> _Layers:
    """Kimi delta attention, and latents between."""
    layers = config.layers()
    linear = config.inner("linear_attn_config")
    deltas = {i - 1 for i in linear.integers("kda_layers", low=1, high=layers)}
    heads, head_dim = linear.integer("num_heads"), linear.integer("head_dim")
    state = StateGeometry(
        heads=heads,
        head_dim=head_dim,
        state_size=head_dim,
        conv_channels=3 * heads * head_dim,  # of queries, keys and values
        groups=0,
        conv_window=linear.integer("short_conv_kernel_size") - 1,
        conv_itemsize=_CONV_BYTES,
        ssm_itemsize=_FLOAT32,
    )
    latent = LatentGeometry(config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim"))
    caches = [LayerCache(i, state if i in deltas else latent) for i in range(layers)]
    return layers, caches, latent_queries(config)


def falcon_h1(config: Fields) -> _Layers:
    """Attention and Mamba 2 side by side in every layer."""
    layers = config.layers()
    hidden = config.integer("hidden_size")
    inner = (
        config.integer("mamba_d_ssm") if "mamba_d_ssm" in config else config.integer("mamba_expand") * hidden
    )
    geometry, state = derived_heads(config), _mamba_2_state(config, inner, _ssm_bytes(config))
    caches = [LayerCache(i, each) for i in range(layers) for each in (geometry, state)]
    return layers, caches, query_heads(config, geometry)


def granite_hybrid(config: Fields) -> _Layers:
    """Mamba 2, and full attention between."""
    layers = config.layers()
    types = config.words("layer_types", {MAMBA, ATTENTION}, layers)
    inner = config.integer("mamba_expand") * config.integer("hidden_size")
    geometry = derived_heads(config)
    state = _mamba_2_state(config, inner, _FLOAT32)
    return layers, _by_type(types, {MAMBA: state, ATTENTION: geometry}), query_heads(config, geometry)


def nemotron_h(config: Fields) -> _Layers:
    """Mamba 2, attention and layers that keep nothing, in an order of the model's own."""
    kinds = {"M": MAMBA, "*": ATTENTION, "-": "mlp", "E": "moe"}
    if "hybrid_override_pattern" in config:
        pattern = config.word("hybrid_override_pattern")
        if set(pattern) - set(kinds):
            raise SizeError("hybrid_override_pattern has other letters than M, *, - and E: correct it")
        types = [kinds[each] for each in pattern]
    else:
        types = config.words("layers_block_type", set(kinds.values()))
    heads, head_dim = config.integer("mamba_num_heads"), config.integer("mamba_head_dim")
    # sglang's class for this model takes 128 where head_dim is left out, whatever attention_head_dim says.
    width = config.integer_or("head_dim", 128)
    geometry = HeadGeometry(config.integer("num_key_value_heads"), width, width)
    state = StateGeometry(
        heads=heads,
        head_dim=head_dim,
        state_size=config.integer("ssm_state_size"),
        conv_channels=heads * head_dim,
        groups=config.integer("n_groups"),
        conv_window=config.integer("conv_kernel") - 1,
        conv_itemsize=_CONV_BYTES,
        ssm_itemsize=_ssm_bytes(config),
    )
    caches = _by_type(types, {MAMBA: state, ATTENTION: geometry})
    if not caches:
        raise SizeError("no layer of the config keeps anything: correct hybrid_override_pattern")
    return len(types), caches, query_heads(config, geometry)


def short_convolutions(config: Fields) -> _Layers:
    """Full attention, and convolutions that keep their last inputs only."""
    layers = config.layers()
    types = config.words("layer_types", {"conv", FULL}, layers)
    hidden = config.integer("hidden_size")
    state = StateGeometry(
        heads=0,
        head_dim=0,
        state_size=0,
        conv_channels=hidden,
        groups=0,
        conv_window=config.integer("conv_L_cache", low=2) - 1,  # of 1 nothing would be kept
        conv_itemsize=_CONV_BYTES,
        ssm_itemsize=_FLOAT32,
    )
    geometry = derived_heads(config)
    return layers, _by_type(types, {"conv": state, FULL: geometry}), query_heads(config, geometry)


def mamba_2(config: Fields) -> _Layers:
    """States only."""
    layers = config.layers()
    state = StateGeometry(
        heads=config.integer("num_heads"),
        head_dim=config.integer("head_dim"),
        state_size=config.integer("state_size"),
        conv_channels=config.integer("intermediate_size"),
        groups=config.integer("n_groups"),
        conv_window=config.integer("conv_kernel") - 1,
        conv_itemsize=_CONV_BYTES,
        ssm_itemsize=_FLOAT32,
    )
    return layers, [LayerCache(i, state) for i in range(layers)], None


def mamba_1(config: Fields) -> _Layers:
    """States only, every channel with a row of its own."""
    layers = config.layers()
    inner = config.integer("expand") * config.integer("hidden_size")
    if config.integer_or("intermediate_size", inner) != inner:
        raise SizeError(f"intermediate_size is not expand times hidden_size, {inner}: correct one")
    state = StateGeometry(
        heads=inner,
        head_dim=1,
        state_size=config.integer("state_size"),
        conv_channels=inner,
        groups=0,
        conv_window=config.integer("conv_kernel") - 1,
        conv_itemsize=_CONV_BYTES,
        ssm_itemsize=_FLOAT32,
    )
    return layers, [LayerCache(i, state) for i in range(layers)], None


def _mamba_2_state(config: Fields, inner: int, ssm_itemsize: int) -> StateGeometry:
    """Mamba 2 within a hybrid; ``inner`` channels carry its heads."""
    heads = config.integer("mamba_n_heads")
    if inner % heads:
        raise SizeError(f"mamba_n_heads {heads} does not divide the {inner} channels of Mamba: correct one")
    head_dim = config.integer("mamba_d_head")
    if head_dim * heads != inner:
        raise SizeError(
            f"mamba_d_head times mamba_n_heads is not {inner}, the channels of Mamba: correct one"
        )
    return StateGeometry(
        heads=heads,
        head_dim=head_dim,
        state_size=config.integer("mamba_d_state"),
        conv_channels=inner,
        groups=config.integer("mamba_n_groups"),
        conv_window=config.integer("mamba_d_conv") - 1,
        conv_itemsize=_CONV_BYTES,
        ssm_itemsize=ssm_itemsize,
    )


def _ssm_bytes(config: Fields) -> int:
    """Of a state's matrices, which are float32 unless the config says otherwise."""
    if "mamba_ssm_dtype" not in config:
        return _FLOAT32
    name = config.word("mamba_ssm_dtype")
    if name not in _SSM_BYTES:
        raise SizeError(f"mamba_ssm_dtype {name!a} is not known: take {', '.join(_SSM_BYTES)}")
    return _SSM_BYTES[name]


def _by_type(types: Iterable[str], kept: dict[str, Geometry]) -> list[LayerCache]:
    return [LayerCache(i, kept[each]) for i, each in enumerate(types) if each in kept]

"""Layers of configs that name their values otherwise than Llama's: GPT-2, ChatGLM, DBRX."""

from __future__ import annotations

from sgl_importance_lab.kv_size.fields import Fields, SizeError
from sgl_importance_lab.kv_size.geometry import HeadGeometry
from sgl_importance_lab.kv_size.model_shape import LayerCache, QueryHeads

_Layers = tuple[int, list[LayerCache], QueryHeads]


def gpt_2(config: Fields) -> _Layers:
    """Every head has K and V of its own."""
    return _equal(config.layers("n_layer"), config.integer("n_head"), config.integer("n_embd"), "n_embd")


def gpt_bigcode(config: Fields) -> _Layers:
    """GPT-2's names, and one KV head for all (MQA)."""
    kv_heads = 1 if config.flag("multi_query", True) else None
    layers, heads = config.layers("n_layer"), config.integer("n_head")
    return _equal(layers, heads, config.integer("n_embd"), "n_embd", kv_heads)


def chatglm(config: Fields) -> _Layers:
    """Groups of heads with K and V; sglang counts them whatever ``multi_query_attention`` says."""
    layers, heads = config.layers("num_layers"), config.integer("num_attention_heads")
    groups = config.integer("multi_query_group_num")
    if "num_key_value_heads" in config:
        raise SizeError("num_key_value_heads is no value of chatglm, but sglang would read it: remove it")
    return _equal(layers, heads, config.integer("hidden_size"), "hidden_size", groups)


def dbrx(config: Fields) -> _Layers:
    """Groups of heads, in a part of the config of its own."""
    layers, heads = config.layers("n_layers"), config.integer("n_heads")
    groups = config.inner("attn_config").integer("kv_n_heads")
    return _equal(layers, heads, config.integer("d_model"), "d_model", groups)


def _equal(layers: int, heads: int, hidden: int, hidden_name: str, kv_heads: int | None = None) -> _Layers:
    if hidden % heads:
        raise SizeError(f"{hidden_name} {hidden} is no multiple of the {heads} heads: correct one")
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise SizeError(f"{heads} heads are no multiple of {kv_heads} KV heads: correct one")
    geometry = HeadGeometry(kv_heads, hidden // heads, hidden // heads)
    caches = [LayerCache(i, geometry) for i in range(layers)]
    return layers, caches, QueryHeads(heads, geometry.head_dim, geometry.v_head_dim)

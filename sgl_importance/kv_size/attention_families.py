"""Layers of models that keep K and V, or a latent, of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from sgl_importance.kv_size.fields import Fields, SizeError
from sgl_importance.kv_size.geometry import INDEX_HEAD_DIM, HeadGeometry, LatentGeometry
from sgl_importance.kv_size.model_shape import LayerCache, QueryHeads

_Layers = tuple[int, list[LayerCache], QueryHeads]
_Reader = Callable[[Fields], _Layers]
_Heads = Callable[[Fields], HeadGeometry]

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"


def stated_heads(config: Fields) -> HeadGeometry:
    """K and V per head, whose width the config must say: classes of these models have their own default."""
    head_dim = config.integer("head_dim")
    return HeadGeometry(config.integer("num_key_value_heads"), head_dim, head_dim)


def derived_heads(config: Fields) -> HeadGeometry:
    """K and V per head; a width that is left out is the part of the hidden size that falls to a head."""
    if "head_dim" in config:
        return stated_heads(config)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if hidden % heads:
        raise SizeError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}: add head_dim")
    return HeadGeometry(config.integer("num_key_value_heads"), hidden // heads, hidden // heads)


def query_heads(config: Fields, geometry: HeadGeometry) -> QueryHeads:
    """
    Raises:
        SizeError: the KV heads do not divide them.
    """
    heads = config.integer("num_attention_heads")
    if heads % geometry.kv_heads:
        raise SizeError(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {geometry.kv_heads}: "
            "correct one"
        )
    return QueryHeads(heads, geometry.head_dim, geometry.v_head_dim)


def equal_layers(heads: _Heads) -> _Reader:
    """Every layer keeps K and V of every token."""

    def read(config: Fields) -> _Layers:
        geometry, layers = heads(config), config.layers()
        return layers, [LayerCache(i, geometry) for i in range(layers)], query_heads(config, geometry)

    return read


def gpt_bigcode(config: Fields) -> _Layers:
    """GPT-2's names, and one KV head for all (MQA)."""
    heads, hidden = config.integer("n_head"), config.integer("n_embd")
    if hidden % heads:
        raise SizeError(f"n_embd {hidden} is no multiple of n_head {heads}: correct one")
    kv_heads = 1 if config.flag("multi_query", True) else heads
    geometry = HeadGeometry(kv_heads, hidden // heads, hidden // heads)
    layers = config.layers("n_layer")
    queries = QueryHeads(heads, geometry.head_dim, geometry.v_head_dim)
    return layers, [LayerCache(i, geometry) for i in range(layers)], queries


# ---- windows ----


def masked_windows(
    heads: _Heads, *, every: int | None = None, pattern: str | None = None, present: int = 1
) -> _Reader:
    """sglang 0.5.21 has no pool for these windows: what they leave behind stays until the request ends.

    Args:
        every: of so many layers the last attends to all tokens, where the config has no ``layer_types``: the
            published ones of some models are older than that name. None where it must be there.
        pattern: name of the value that says this number, if it may be another.
        present: tokens of ``sliding_window`` that do not lie behind the one that looks: itself; 0 where
            sglang takes the number for tokens behind.
    """

    def read(config: Fields) -> _Layers:
        geometry, layers = heads(config), config.layers()
        window = config.integer("sliding_window", low=2) - present
        if every is not None and "layer_types" not in config:
            step = every if pattern is None else config.integer_or(pattern, every)
            sliding = [(i + 1) % step != 0 for i in range(layers)]
        else:
            sliding = _sliding_layers(config, layers)
        caches = [
            LayerCache(i, geometry, reads=window if masked else None) for i, masked in enumerate(sliding)
        ]
        return layers, caches, query_heads(config, geometry)

    return read


def shared_layers(config: Fields) -> _Layers:
    """The last layers read what the last earlier one of their type has written."""
    layers, caches, queries = masked_windows(stated_heads)(config)
    first = layers - config.integer("num_kv_shared_layers", low=0)
    return layers, list(_share_from(caches, first)), queries


def gpt_oss(config: Fields) -> _Layers:
    """Every second layer has a window, with a pool of its own."""
    layers, geometry = config.layers(), stated_heads(config)
    caches = _pooled_windows(_sliding_layers(config, layers), geometry, geometry, _window_of(config))
    return layers, caches, query_heads(config, geometry)


def llama_4(config: Fields) -> _Layers:
    """Attention within chunks in three layers of four; their pool frees slots as a window's would."""
    layers, geometry = config.layers(), stated_heads(config)
    chunked = [(i + 1) % 4 != 0 for i in range(layers)]
    if "layer_types" in config:
        types = config.words("layer_types", {CHUNKED, FULL}, layers)
        if [each == CHUNKED for each in types] != chunked:
            raise SizeError(
                "layer_types is not three chunked layers of four, which sglang assumes: correct it"
            )
    caches = _pooled_windows(chunked, geometry, geometry, config.integer("attention_chunk_size"))
    return layers, caches, query_heads(config, geometry)


def gemma_4(config: Fields) -> _Layers:
    """Full layers have other heads than those with a window; the last ones may read what others wrote."""
    layers, narrow = config.layers(), stated_heads(config)
    wide_dim = config.integer_or("global_head_dim", narrow.head_dim)
    if not config.says("global_head_dim"):
        raise SizeError("the config has no global_head_dim: add it, or null where all heads have head_dim")
    wide = HeadGeometry(config.integer_or("num_global_key_value_heads", narrow.kv_heads), wide_dim, wide_dim)
    caches = _pooled_windows(_sliding_layers(config, layers), wide, narrow, _window_of(config))
    first = layers - config.integer("num_kv_shared_layers", low=0)
    return layers, list(_share_from(caches, first)), query_heads(config, wide)


def mimo_v2(config: Fields) -> _Layers:
    """Both kinds of layers have heads of their own, and values narrower than keys."""
    layers = config.layers()
    wide = HeadGeometry(
        config.integer("num_key_value_heads"), config.integer("head_dim"), config.integer("v_head_dim")
    )
    narrow = HeadGeometry(
        config.integer("swa_num_key_value_heads"),
        config.integer("swa_head_dim"),
        config.integer("swa_v_head_dim"),
    )
    pattern = config.integers("hybrid_layer_pattern", low=0, high=1)
    if len(pattern) != layers:
        raise SizeError(f"hybrid_layer_pattern has {len(pattern)} numbers for {layers} layers: correct one")
    window = config.integer("sliding_window_size")
    caches = _pooled_windows([each == 1 for each in pattern], wide, narrow, window)
    return layers, caches, query_heads(config, wide)


def _window_of(config: Fields) -> int:
    """Tokens ahead of the present one that a window reaches: sglang counts without it, configs with it."""
    return config.integer("sliding_window", low=2) - 1


def _sliding_layers(config: Fields, layers: int) -> list[bool]:
    return [each == SLIDING for each in config.words("layer_types", {SLIDING, FULL}, layers)]


def _pooled_windows(
    windowed: Iterable[bool], full: HeadGeometry, narrow: HeadGeometry, window: int
) -> list[LayerCache]:
    return [
        LayerCache(i, narrow, window=window, reads=window) if sliding else LayerCache(i, full)
        for i, sliding in enumerate(windowed)
    ]


def _share_from(caches: list[LayerCache], first: int) -> Iterator[LayerCache]:
    """
    Raises:
        SizeError: a layer has nothing to share.
    """
    if first < 0:
        raise SizeError(f"num_kv_shared_layers is larger than the {len(caches)} layers: correct one")
    owners = {cache.reads for cache in caches[:first]}
    for cache in caches:
        if cache.layer >= first and cache.reads not in owners:
            raise SizeError(f"layer {cache.layer} finds no K and V of its type to share: correct layer_types")
        shared = cache.layer >= first
        yield LayerCache(cache.layer, cache.geometry, cache.window, cache.reads, shared)


# ---- latents ----


def latent_layers(config: Fields) -> _Layers:
    """A latent in every layer; sparse attention over it where the config has an indexer."""
    if "index_topk" in config:
        return sparse_latent_layers(config)
    layers = config.layers()
    geometry = LatentGeometry(config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim"))
    return layers, [LayerCache(i, geometry) for i in range(layers)], latent_queries(config)


def sparse_latent_layers(config: Fields) -> _Layers:
    """DSA: a latent in every layer, and keys of an indexer in those that choose what to read."""
    config.integer("index_topk")
    if config.integer("index_head_dim") != INDEX_HEAD_DIM:
        raise SizeError(f"index_head_dim must be {INDEX_HEAD_DIM}, the only one that sglang has a pool for")
    layers = config.layers()
    rank, rope_dim = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    caches = [
        LayerCache(i, LatentGeometry(rank, rope_dim, indexer=True, index_keys=chooses))
        for i, chooses in enumerate(_choosing_layers(config, layers))
    ]
    return layers, caches, latent_queries(config)


def latent_queries(config: Fields) -> QueryHeads:
    key = config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
    return QueryHeads(config.integer("num_attention_heads"), key, config.integer("v_head_dim"))


def _choosing_layers(config: Fields, layers: int) -> list[bool]:
    """Layers with an indexer of their own; the others read what the one before them chose.

    The names of the fields, and which goes first, are those of sglang's ``dsa_layer_skips_topk``.
    """
    if "indexer_types" in config:
        return [
            each == FULL_INDEXER for each in config.words("indexer_types", {FULL_INDEXER, "shared"}, layers)
        ]
    if "index_topk_pattern" in config:
        pattern = config.word("index_topk_pattern")
        return [i >= len(pattern) or pattern[i] != "S" for i in range(layers)]
    every = config.integer_or("index_topk_freq", 1)
    first = config.integer_or("index_skip_topk_offset", 2)
    return [max(i - first + 1, 0) % every == 0 for i in range(layers)]


FULL_INDEXER = "full"

"""Layers of models that keep K and V, or a latent, of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from sgl_importance_lab.kv_size.fields import LARGEST, Fields, SizeError
from sgl_importance_lab.kv_size.geometry import INDEX_HEAD_DIM, HeadGeometry, LatentGeometry
from sgl_importance_lab.kv_size.model_shape import LayerCache, QueryHeads

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
    return _derived(config, config.integer("num_key_value_heads"))


def llama_heads(config: Fields) -> HeadGeometry:
    """As ``derived_heads``, of classes that take all heads for KV heads (MHA) where the config says none."""
    heads = config.integer("num_attention_heads")
    return _derived(config, config.integer_or("num_key_value_heads", heads))


def _derived(config: Fields, kv_heads: int) -> HeadGeometry:
    width = config.integer("head_dim") if "head_dim" in config else _part_of_hidden(config)
    return HeadGeometry(kv_heads, width, width)


def _part_of_hidden(config: Fields) -> int:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if hidden % heads:
        raise SizeError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}: add head_dim")
    return hidden // heads


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


def internvl(config: Fields) -> _Layers:
    """The text model's architecture says whose config it is, to sglang."""
    model_type = config.word("model_type")
    architecture, heads = _INTERNVL[model_type]
    if config.words("architectures", [architecture]) != [architecture]:
        raise SizeError(f"architectures of llm_config must name {architecture}, and nothing else")
    return equal_layers(heads)(config)


_INTERNVL: dict[str, tuple[str, _Heads]] = {
    "internlm2": ("InternLM2ForCausalLM", llama_heads),
    "llama": ("LlamaForCausalLM", llama_heads),
    "qwen2": ("Qwen2ForCausalLM", derived_heads),
    "qwen3": ("Qwen3ForCausalLM", stated_heads),
    "qwen3_moe": ("Qwen3MoeForCausalLM", derived_heads),
}


# ---- sparse attention ----


def minimax_m3(config: Fields) -> _Layers:
    """Some layers read chosen blocks only, and keep one further head to choose them by."""
    layers, heads = config.layers(), stated_heads(config)
    sparse = config.inner("sparse_attention_config")
    chooses = _of_layers(sparse, "sparse_attention_freq", layers)
    without_value = [False] * layers
    if "sparse_disable_index_value" in sparse:
        without_value = _of_layers(sparse, "sparse_disable_index_value", layers)
    width = sparse.integer("sparse_index_dim")
    caches = [
        LayerCache(i, replace(heads, index_dim=width, index_values=not bare) if choosing else heads)
        for i, (choosing, bare) in enumerate(zip(chooses, without_value, strict=True))
    ]
    return layers, caches, query_heads(config, heads)


def _of_layers(fields: Fields, name: str, layers: int) -> list[bool]:
    numbers = fields.integers(name, low=0, high=LARGEST)
    if len(numbers) != layers:
        raise SizeError(f"{name} has {len(numbers)} numbers for {layers} layers: correct one")
    return [number != 0 for number in numbers]


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


def hunyuan(config: Fields) -> _Layers:
    """Where ``use_cla`` says so, layers take K and V from the one that starts their group (CLA)."""
    layers, caches, queries = equal_layers(llama_heads)(config)
    if config.flag("use_cla"):
        group = config.integer_or("cla_share_factor", 1)
        caches = [replace(cache, shared=cache.layer % group != 0) for cache in caches]
    return layers, caches, queries


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


def step_3(config: Fields) -> _Layers:
    """Windows have other query heads; behind ``layer_types`` of the model are those of its drafts."""
    layers = config.layers()
    types = config.words("layer_types", {SLIDING, FULL})
    if len(types) < layers:
        raise SizeError(f"layer_types has {len(types)} words for {layers} layers: correct one")
    groups, width = config.integer("num_attention_groups"), config.integer("head_dim")
    if config.inner("attention_other_setting").integer("num_attention_groups") != groups:
        raise SizeError(
            "num_attention_groups differs in attention_other_setting, and sglang has one: correct it"
        )
    geometry = HeadGeometry(groups, width, width)
    # Its model says no window, so that sglang takes the config's as tokens behind the present one.
    window = config.integer("sliding_window")
    sliding = [each == SLIDING for each in types[:layers]]
    return layers, _pooled_windows(sliding, geometry, geometry, window), query_heads(config, geometry)


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


def double_latent_layers(config: Fields) -> _Layers:
    """Two attentions, and so two latents, in every layer (LongCat)."""
    if "index_topk" in config:
        raise SizeError("sparse attention of this type is not sized, and not guessed: name another config")
    layers, latents, queries = latent_layers(config)
    return layers, [cache for cache in latents for _ in range(2)], queries


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

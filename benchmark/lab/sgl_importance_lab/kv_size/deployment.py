"""How a model is served, and what that makes each GPU keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sgl_importance_lab.kv_size.cache_dtype import CacheDtype, Scales
from sgl_importance_lab.kv_size.fields import SizeError
from sgl_importance_lab.kv_size.geometry import HeadGeometry, LatentGeometry, Parts, StateGeometry
from sgl_importance_lab.kv_size.model_shape import LayerCache, LayerKind, ModelShape

SPARSE_PAGE = 64
"""Tokens of a page in pools of sparse attention (DSA): sglang has no other."""
BLOCK_PAGE = 128
"""Tokens of a page where sparse attention chooses blocks: what sglang takes on Hopper and later."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """
    Attributes:
        dtype: of the cache.
        page_size: tokens of a page.
        tp: GPUs that share a layer (``--tp``).
        pp: stages that share the layers (``--pp``).
        dp_attention: groups into which attention splits the ``tp`` GPUs, each with requests of its own
            (``--enable-dp-attention --dp``); 1 for none.
        draft_layers: of a draft model with the target's own geometry (EAGLE, MTP).
        index_everywhere: every layer of sparse attention keeps keys of an indexer, as sglang has it under
            HiCache and PD disaggregation.
        raw_latents: sparse attention in fp8 as sglang's trtllm backends read it: latents without scales, or
            an index beside K and V that is in fp8 too.
    """

    dtype: CacheDtype
    page_size: int = 1
    tp: int = 1
    pp: int = 1
    dp_attention: int = 1
    draft_layers: int = 0
    index_everywhere: bool = False
    raw_latents: bool = False

    @property
    def attention_tp(self) -> int:
        """GPUs that share the heads of one request."""
        return self.tp // self.dp_attention

    def check(self, shape: ModelShape) -> None:
        """
        Raises:
            SizeError: sglang 0.5.21 does not serve the model like this.
        """
        if self.tp % self.dp_attention:
            raise SizeError(
                f"--dp-attention {self.dp_attention} does not divide --tp {self.tp}: choose one that does"
            )
        if self.pp > shape.num_layers:
            raise SizeError(
                f"--pp {self.pp} is more than the {shape.num_layers} layers: choose a smaller one"
            )
        if self.pp > 1 and len(shape.attention) > shape.num_layers:
            raise SizeError("models with two attentions in a layer have no stages in sglang: leave out --pp")
        if shape.is_sparse and self.page_size != SPARSE_PAGE:
            raise SizeError(
                f"sparse attention (DSA) has pages of {SPARSE_PAGE} tokens: give --page-size {SPARSE_PAGE}"
            )
        if self.dtype.name == "nvfp4" and self.page_size % 4:
            raise SizeError("--dtype nvfp4 needs a multiple of 4 as --page-size: give --page-size 16")
        latent = any(isinstance(cache.geometry, LatentGeometry) for cache in shape.caches)
        if self.dtype.scales is Scales.FP4 and (shape.has_windows or (latent and shape.states)):
            raise SizeError(
                f"sglang has no pool in {self.dtype.name} for this mixture of layers: take fp8_e4m3"
            )
        is_sparse = shape.is_sparse or shape.chooses_blocks
        if self.raw_latents and not (is_sparse and self.dtype.name == "fp8_e4m3"):
            raise SizeError("--raw-latents is for sparse attention with --dtype fp8_e4m3: leave it out")
        if self.draft_layers:
            if shape.chooses_blocks:
                raise SizeError(
                    "sglang takes the mean of dense and sparse layers for a draft, which has no "
                    "whole number of bytes: leave out --draft-layers"
                )
            if shape.states:
                raise SizeError("drafts of models with states are not sized: leave out --draft-layers")
            if self.pp > 1:
                raise SizeError("sizes of drafts are for one stage: leave out --pp or --draft-layers")
            if not any(cache.window is None for cache in shape.attention):
                raise SizeError("no layer keeps all tokens, as a draft layer would: leave out --draft-layers")


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What a layer keeps on one GPU: per token, or per request where it is a state.

    Attributes:
        cache: of which layer.
        parts: bytes by kind of tensor.
        copies: GPUs of an attention group that keep the same.
    """

    cache: LayerCache
    parts: Parts
    copies: int

    @property
    def total(self) -> int:
        return self.parts.total()

    @property
    def has_index(self) -> bool:
        """Whether it keeps keys of an indexer."""
        return self.parts["index"] > 0

    @property
    def is_latent(self) -> bool:
        return isinstance(self.cache.geometry, LatentGeometry)


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one pipeline stage on one of its GPUs.

    Attributes:
        layers: that keep something.
        drafts: of the draft model; they grow with tokens.
    """

    layers: tuple[LayerBytes, ...]
    drafts: tuple[LayerBytes, ...] = ()

    @property
    def full(self) -> Parts:
        """Bytes per token of what keeps every token, without drafts."""
        return _sum(each for each in self.layers if _grows(each.cache))

    @property
    def draft(self) -> Parts:
        return _sum(self.drafts)

    @property
    def window(self) -> Parts:
        """Bytes per token of what keeps the last tokens only."""
        return _sum(each for each in self.layers if each.cache.window is not None)

    @property
    def state(self) -> Parts:
        """Bytes per request of states."""
        return _sum(each for each in self.layers if each.cache.kind is LayerKind.STATE)

    def pool_bytes(self, deployment: Deployment, full: int, window: int = 0, states: int = 0) -> Parts:
        """All that sglang allocates on a GPU of this stage for so many tokens and states.

        Every pool has a page, or a state, more than it can give away: padded tokens of a batch write there.
        """
        page = deployment.page_size
        return (
            _times(self.full, full + page)
            + _times(self.draft, full + page)
            + _times(self.window, window + page)
            + _times(self.state, states + 1)
        )

    def fixed_bytes(self, deployment: Deployment) -> int:
        """What is there before the first token: the padding of each pool."""
        return self.pool_bytes(deployment, 0).total()


def usual_page(shape: ModelShape) -> int:
    """Tokens of a page where nobody says them."""
    if shape.is_sparse:
        return SPARSE_PAGE
    return BLOCK_PAGE if shape.chooses_blocks else 1


def stages(shape: ModelShape, deployment: Deployment) -> list[Stage]:
    """
    Raises:
        SizeError: the deployment does not fit the model.
    """
    deployment.check(shape)
    shares = []
    for first, last in _stage_layers(shape.num_layers, deployment.pp):
        mine = [cache for cache in shape.caches if first <= cache.layer < last]
        shares.append(tuple(layer_bytes(cache, deployment) for cache in mine))
    return [Stage(layers, _draft_layers(shape, deployment)) for layers in shares]


def layer_bytes(cache: LayerCache, deployment: Deployment) -> LayerBytes:
    """
    Raises:
        SizeError: this layer cannot be shared, or stored, like that.
    """
    tp = deployment.attention_tp
    match cache.geometry:
        case StateGeometry() as state:
            return LayerBytes(cache, state.slot_bytes(tp), state.copies(tp))
        case LatentGeometry(indexer=True) as latent:
            indexed = latent.index_keys or deployment.index_everywhere
            latent = replace(latent, index_keys=indexed, raw_fp8=deployment.raw_latents)
            return LayerBytes(cache, latent.token_bytes(deployment.dtype, tp), latent.copies(tp))
        case HeadGeometry(index_dim=width) as heads if width:
            heads = replace(heads, index_fp8=deployment.raw_latents)
            return LayerBytes(cache, heads.token_bytes(deployment.dtype, tp), heads.copies(tp))
        case HeadGeometry() | LatentGeometry() as rows:
            return LayerBytes(cache, rows.token_bytes(deployment.dtype, tp), rows.copies(tp))


def _draft_layers(shape: ModelShape, deployment: Deployment) -> tuple[LayerBytes, ...]:
    """Layers like the first that keeps every token, all of them with an indexer of their own."""
    if not deployment.draft_layers:
        return ()
    like = next(cache for cache in shape.attention if cache.window is None)
    draft = layer_bytes(replace(like, reads=None, shared=False), replace(deployment, index_everywhere=True))
    return (draft,) * deployment.draft_layers


def _stage_layers(layers: int, pp: int) -> list[tuple[int, int]]:
    """First and last layer of each stage; the last stages take what is left over, as in sglang."""
    each, left = divmod(layers, pp)
    sizes = [each + (stage >= pp - left) for stage in range(pp)]
    ends = [sum(sizes[: stage + 1]) for stage in range(pp)]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _grows(cache: LayerCache) -> bool:
    return cache.window is None and cache.kind is not LayerKind.STATE


def _sum(layers: Iterable[LayerBytes]) -> Parts:
    return sum((each.parts for each in layers), Parts())


def _times(parts: Parts, count: int) -> Parts:
    return Parts({part: size * count for part, size in parts.items()})

"""A model as its cache sees it: what each layer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sgl_importance_lab.kv_size.geometry import Geometry, HeadGeometry, LatentGeometry, StateGeometry


class LayerKind(StrEnum):
    """Kinds of caches, as they are reported."""

    FULL = "full attention"
    WINDOW = "window attention"
    LATENT = "latent (MLA)"
    SPARSE = "sparse attention (MSA)"
    SPARSE_LATENT = "sparse latent (DSA)"
    STATE = "recurrent state"


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps. A layer with attention and a state has two of them.

    Attributes:
        layer: its place in the model, from 0.
        geometry: of what it keeps.
        window: tokens that its pool keeps of a request, behind which sglang frees slots; None keeps all.
        reads: tokens back that attention looks; None for all. Smaller than what is kept where sglang has a
            mask and no pool for the window.
        shared: the layer reads another layer's K and V. sglang 0.5.21 allocates its own all the same.
    """

    layer: int
    geometry: Geometry
    window: int | None = None
    reads: int | None = None
    shared: bool = False

    @property
    def kind(self) -> LayerKind:
        match self.geometry:
            case HeadGeometry(index_dim=width) if width:
                return LayerKind.SPARSE
            case HeadGeometry():
                return LayerKind.FULL if self.window is None else LayerKind.WINDOW
            case LatentGeometry(indexer=indexer):
                return LayerKind.SPARSE_LATENT if indexer else LayerKind.LATENT
            case StateGeometry():
                return LayerKind.STATE


@dataclass(frozen=True, slots=True)
class QueryHeads:
    """What attention would keep if every query head had K and V of its own (MHA).

    Attributes:
        heads: query heads over all GPUs.
        qk_dim: elements of a key.
        v_dim: elements of a value.
    """

    heads: int
    qk_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """
    Attributes:
        model_type: as config.json has it.
        num_layers: of the model, also such as keep nothing.
        caches: of its layers, in their order.
        queries: of its attention; None where it has none.
        context: tokens of its longest context, if the config says.
        dtype: of its weights in config.json, which the cache takes over where nothing else is said.
    """

    model_type: str
    num_layers: int
    caches: tuple[LayerCache, ...]
    queries: QueryHeads | None
    context: int | None
    dtype: str | None

    def __post_init__(self) -> None:
        assert self.caches
        assert all(0 <= cache.layer < self.num_layers for cache in self.caches)

    @property
    def attention(self) -> list[LayerCache]:
        """Caches that grow with tokens."""
        return [cache for cache in self.caches if cache.kind is not LayerKind.STATE]

    @property
    def states(self) -> list[LayerCache]:
        return [cache for cache in self.caches if cache.kind is LayerKind.STATE]

    @property
    def has_windows(self) -> bool:
        return any(cache.window is not None for cache in self.caches)

    @property
    def chooses_blocks(self) -> bool:
        """Whether layers with K and V per head keep an index."""
        return any(cache.kind is LayerKind.SPARSE for cache in self.caches)

    @property
    def is_sparse(self) -> bool:
        """Whether latents are read sparsely."""
        return any(cache.kind is LayerKind.SPARSE_LATENT for cache in self.caches)

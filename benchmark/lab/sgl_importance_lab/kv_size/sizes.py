"""All that is said of one model and one deployment: numbers for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sgl_importance_lab.kv_size.capacity import Capacity, Division, fit, mha_requests, mha_token_bytes
from sgl_importance_lab.kv_size.deployment import Deployment, LayerBytes, Stage, stages
from sgl_importance_lab.kv_size.geometry import LatentGeometry
from sgl_importance_lab.kv_size.model_shape import LayerKind, ModelShape
from sgl_importance_lab.kv_size.request import (
    layer_request_bytes,
    stage_request_bytes,
    unread_request_bytes,
)
from sgl_importance_lab.kv_size.tier_costs import DEVICE, GB, TierFit, TierSize, tier_fit


@dataclass(frozen=True, slots=True)
class KindSize:
    """Layers that keep the same.

    Attributes:
        kind: of their cache, or that they are drafts.
        layers: how many there are.
        bytes_per_token: of all of them, one copy; 0 for states.
        bytes_per_token_per_gpu: of those of the largest stage, on one GPU.
        bytes_per_request: at the context, one copy.
        bytes_per_request_per_gpu: of those of the largest stage, on one GPU.
        unread_bytes_per_request: of these, what attention never reads again.
        window: tokens that their pool keeps; None for all.
        copies: GPUs of an attention group that keep the same.
    """

    kind: str
    layers: int
    bytes_per_token: int
    bytes_per_token_per_gpu: int
    bytes_per_request: int
    bytes_per_request_per_gpu: int
    unread_bytes_per_request: int
    window: int | None
    copies: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """
    Attributes:
        shape: of the model.
        deployment: of it.
        context: tokens of a request.
        kinds: of its layers.
        bytes_per_token: of layers that keep every token, with drafts; one copy.
        bytes_per_token_per_gpu: on a GPU of the stage that keeps most.
        bytes_per_request: at the context, with windows, states and what is left of the last page; one copy.
        bytes_per_request_per_gpu: on a GPU of the stage that keeps most.
        fixed_bytes: padding of all pools; one copy.
        fixed_bytes_per_gpu: on a GPU of the stage that has most.
        mha_bytes_per_token_per_gpu: if all attention were sized as MHA; None without attention.
        capacity: of the GPUs, if their memory was given.
        mha_requests: that would fit if all attention were sized as MHA.
        tiers: with what fits into each.
    """

    shape: ModelShape
    deployment: Deployment
    context: int
    kinds: list[KindSize]
    bytes_per_token: int
    bytes_per_token_per_gpu: int
    bytes_per_request: int
    bytes_per_request_per_gpu: int
    fixed_bytes: int
    fixed_bytes_per_gpu: int
    mha_bytes_per_token_per_gpu: int | None
    capacity: Capacity | None
    mha_requests: int | None
    tiers: list[TierFit]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        numbers = asdict(replace(self, kinds=[], tiers=[], capacity=None))
        for name in ("shape", "kinds", "tiers"):
            del numbers[name]
        deployment = numbers.pop("deployment")
        deployment["dtype"] = deployment["dtype"]["name"]
        return {
            "model_type": self.shape.model_type,
            "deployment": deployment,
            **numbers,
            "layers": [asdict(kind) for kind in self.kinds],
            "capacity": None if self.capacity is None else asdict(self.capacity),
            "tiers": [asdict(tier) for tier in self.tiers],
        }


def size(
    shape: ModelShape,
    deployment: Deployment,
    context: int,
    *,
    budget: int | None = None,
    device_price: float | None = None,
    division: Division | None = None,
    tiers: Sequence[TierSize] = (),
    million_computed: float | None = None,
) -> Sizes:
    """
    Args:
        budget: bytes for the cache on each GPU; None if nobody asks what fits.
        device_price: of a GB of device memory for a month.
        division: of the budget between pools; None for sglang's.
        tiers: below the device.
        million_computed: price of computing a million prompt tokens.

    Raises:
        SizeError: sglang does not serve the model like this, or nothing fits.
    """
    parts = stages(shape, deployment)
    whole = _one_copy(deployment)
    (once,) = stages(shape, whole)
    as_mha = None if shape.queries is None else mha_token_bytes(shape, deployment)
    capacity, mha = None, None
    fits = [tier_fit(tier, parts, deployment, context, million_computed) for tier in tiers]
    if budget is not None:
        capacity = fit(shape, parts, deployment, budget, context, division or Division())
        mha = None if as_mha is None else mha_requests(shape, deployment, budget, context)
        memory = TierSize(DEVICE, budget * deployment.tp * deployment.pp / GB, device_price)
        device = tier_fit(memory, parts, deployment, context, million_computed)
        # Pools divide it, so that fewer requests may fit than its bytes would hold.
        held = capacity.requests
        fits.insert(0, replace(device, requests=held, tokens=held * context))
    return Sizes(
        shape=shape,
        deployment=deployment,
        context=context,
        kinds=_kinds(once, parts, deployment, context),
        bytes_per_token=(once.full + once.draft).total(),
        bytes_per_token_per_gpu=max((stage.full + stage.draft).total() for stage in parts),
        bytes_per_request=stage_request_bytes(once, whole, context),
        bytes_per_request_per_gpu=max(stage_request_bytes(stage, deployment, context) for stage in parts),
        fixed_bytes=once.fixed_bytes(whole),
        fixed_bytes_per_gpu=max(stage.fixed_bytes(deployment) for stage in parts),
        mha_bytes_per_token_per_gpu=as_mha,
        capacity=capacity,
        mha_requests=mha,
        tiers=fits,
    )


def _one_copy(deployment: Deployment) -> Deployment:
    return replace(deployment, tp=1, pp=1, dp_attention=1)


def _kinds(once: Stage, parts: Sequence[Stage], deployment: Deployment, context: int) -> list[KindSize]:
    """Layers of one kind and one size together, in the order of their first."""
    groups: dict[tuple[object, ...], list[LayerBytes]] = {}
    for layer, group in _grouped(once):
        groups.setdefault(group, []).append(layer)
    found = []
    for group, layers in groups.items():
        local = [[layer for layer, mine in _grouped(stage) if mine == group] for stage in parts]
        most = max(local, key=len)
        page = deployment.page_size
        found.append(
            KindSize(
                kind=_kind_name(group),
                layers=len(layers),
                bytes_per_token=_per_token(layers),
                bytes_per_token_per_gpu=_per_token(most),
                bytes_per_request=sum(layer_request_bytes(layer, context, page) for layer in layers),
                bytes_per_request_per_gpu=sum(layer_request_bytes(layer, context, page) for layer in most),
                unread_bytes_per_request=sum(unread_request_bytes(layer, context, page) for layer in layers),
                window=layers[0].cache.window,
                copies=most[0].copies,
            )
        )
    return found


def _grouped(stage: Stage) -> list[tuple[LayerBytes, tuple[object, ...]]]:
    """Each layer with what it has in common with others; the geometry is that of all GPUs together."""
    own = [(layer, _group(layer, "")) for layer in stage.layers]
    return own + [(layer, _group(layer, "draft: ")) for layer in stage.drafts]


def _group(layer: LayerBytes, prefix: str) -> tuple[object, ...]:
    cache = layer.cache
    return prefix, cache.kind, cache.geometry, cache.window, cache.reads, cache.shared, layer.has_index


def _kind_name(group: tuple[object, ...]) -> str:
    prefix, kind, geometry, _, reads, shared, has_index = group
    masked = kind is LayerKind.FULL and reads is not None
    words = f"masked {LayerKind.WINDOW}" if masked else str(kind)
    if shared:
        words = f"shared {words}"
    if isinstance(geometry, LatentGeometry) and geometry.indexer and not has_index:
        words += " without index"
    return f"{prefix}{words}"


def _per_token(layers: Sequence[LayerBytes]) -> int:
    return sum(layer.total for layer in layers if layer.cache.kind is not LayerKind.STATE)

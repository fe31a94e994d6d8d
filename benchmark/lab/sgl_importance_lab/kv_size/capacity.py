"""What fits on each GPU, divided as sglang 0.5.21 divides it.

The arithmetic is that of ``srt/model_executor/pool_configurator.py`` and ``_handle_max_mamba_cache`` in
``srt/mem_cache/kv_cache_configurator.py``, which the tests compare it with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_importance_lab.kv_size.deployment import Deployment, Stage
from sgl_importance_lab.kv_size.fields import SizeError
from sgl_importance_lab.kv_size.model_shape import LayerKind, ModelShape
from sgl_importance_lab.kv_size.request import page_aligned, window_slots


@dataclass(frozen=True, slots=True)
class Division:
    """How the memory for the cache is divided between pools.

    Attributes:
        window_ratio: tokens of windows' pools per token of full attention's (``--swa-full-tokens-ratio``).
        state_ratio: memory of states per memory of tokens (``--mamba-full-memory-ratio``).
        state_slots: states that a running request needs, with those of its prefix in the radix cache; 1
            without a radix cache.
    """

    window_ratio: float = 0.8
    state_ratio: float = 0.9
    state_slots: int = 3


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one attention group holds; with DP attention there are several, each with requests of its own.

    Attributes:
        full_tokens: tokens of layers that keep all; None where there are none.
        window_tokens: slots of windows' pools; None where there are none.
        states: slots of states; None where there are none.
        requests: of one context length that are held at once, over all groups.
        limited_by: which of the three runs out first.
    """

    full_tokens: int | None
    window_tokens: int | None
    states: int | None
    requests: int
    limited_by: LayerKind


def fit(
    shape: ModelShape,
    parts: Sequence[Stage],
    deployment: Deployment,
    budget: int,
    context: int,
    division: Division,
) -> Capacity:
    """
    Args:
        parts: the stages of the deployment.
        budget: bytes for the cache on each GPU.
        context: tokens of each request.

    Raises:
        SizeError: not even a page fits.
    """
    states = None
    if shape.states:
        slot = max(stage.state.total() for stage in parts)
        for_states = budget * division.state_ratio / (1 + division.state_ratio)
        states = int((for_states - slot) // slot)
        if states < division.state_slots:
            raise SizeError(
                f"{budget / 1e9:.3g} GB do not hold the states of one request ({slot / 1e6:.3g} MB each, "
                f"{division.state_slots} of them): more memory, or a larger --tp"
            )
        budget -= (states + 1) * slot
    full, window = _tokens(shape, parts, deployment, budget, division)
    if not (full or window or states):
        raise SizeError(f"{budget / 1e9:.3g} GB do not hold one page: more memory, or a larger --tp")
    return _with_requests(shape, deployment, division, context, full, window, states)


def _tokens(
    shape: ModelShape, parts: Sequence[Stage], deployment: Deployment, budget: int, division: Division
) -> tuple[int | None, int | None]:
    """Tokens of full attention and slots of windows; the stage that holds least decides."""
    page = deployment.page_size
    found = []
    for stage in parts:
        full, window = stage.full.total(), stage.window.total()
        if full == 0 == window:
            continue
        # Without full layers there is nothing that the windows' tokens could be a part of.
        cell = window if full == 0 else full + stage.draft.total() + division.window_ratio * window
        found.append(int(budget // cell) if window else budget // int(cell))
    if not found:
        return None, None
    tokens = max(0, min(found)) // page * page
    if not shape.has_windows:
        return tokens, None
    if all(cache.window is not None for cache in shape.attention):
        return None, tokens
    return tokens, int(tokens * division.window_ratio) // page * page


def _with_requests(
    shape: ModelShape,
    deployment: Deployment,
    division: Division,
    context: int,
    full: int | None,
    window: int | None,
    states: int | None,
) -> Capacity:
    page = deployment.page_size
    held: dict[LayerKind, int] = {}
    if full is not None:
        kind = next(cache.kind for cache in shape.attention if cache.window is None)
        held[kind] = full // page_aligned(context, page)
    if window is not None:
        widest = max(cache.window for cache in shape.attention if cache.window is not None)
        held[LayerKind.WINDOW] = window // window_slots(widest, context, page)
    if states is not None:
        held[LayerKind.STATE] = states // division.state_slots
    limited_by = min(held, key=lambda kind: held[kind])
    requests = held[limited_by] * deployment.dp_attention
    return Capacity(full, window, states, requests, limited_by)


# ---- beside a sizing that knows no kinds of attention ----


def mha_token_bytes(shape: ModelShape, deployment: Deployment) -> int:
    """Bytes of a token on a GPU if every attention layer kept K and V for every query head (MHA).

    The stage that has most of these layers counts. Scales are left out: no MHA pool would be asked for.

    Raises:
        SizeError: the model has no attention, or its heads cannot be shared.
    """
    if shape.queries is None:
        raise SizeError("the model has no attention that could be sized as MHA")
    queries, tp = shape.queries, deployment.attention_tp
    if queries.heads % tp:
        raise SizeError(f"{queries.heads} query heads cannot be shared by {tp} GPUs: choose another --tp")
    each = queries.heads // tp * (queries.qk_dim + queries.v_dim)
    row = deployment.dtype.row_bytes(each)
    largest, left = divmod(len(shape.attention), deployment.pp)
    return row * (largest + bool(left))


def mha_requests(shape: ModelShape, deployment: Deployment, budget: int, context: int) -> int:
    """Requests of a context that the same bytes would hold if the cache were sized as MHA."""
    tokens = budget // mha_token_bytes(shape, deployment) // deployment.page_size * deployment.page_size
    return tokens // page_aligned(context, deployment.page_size) * deployment.dp_attention

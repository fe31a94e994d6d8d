"""`sgl-importance kv-size`: bytes of a model's KV cache, and what fits, from its config.json."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sgl_importance.terminal import add_texts, fail, plain, show
from sgl_importance_lab.kv_size.cache_dtype import AUTO, BFLOAT16, CacheDtype, cache_dtype
from sgl_importance_lab.kv_size.capacity import Division
from sgl_importance_lab.kv_size.config_file import bundled_shapes, load_shape
from sgl_importance_lab.kv_size.deployment import Deployment, usual_page
from sgl_importance_lab.kv_size.fields import SizeError
from sgl_importance_lab.kv_size.geometry import HeadGeometry
from sgl_importance_lab.kv_size.kept_bytes import kept_bytes
from sgl_importance_lab.kv_size.model_shape import LayerKind, ModelShape
from sgl_importance_lab.kv_size.sizes import Sizes, size
from sgl_importance_lab.kv_size.tier_costs import GB, parse_tier

app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")

_FIT, _PRICES = "What fits", "Prices"
_MOST_GPUS = 4096
_CONTEXT = 8192
TIERED_PAGE = 16
"""Tokens of a tiered page, where nobody names another size."""


@app.callback(invoke_without_command=True, context_settings={"allow_interspersed_args": True})
def kv_size_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL_OR_CONFIG", help="A name of --list, a config.json, or its folder."),
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="Show models known by name, and stop.")] = False,
    tp: Annotated[int, typer.Option(min=1, max=_MOST_GPUS, help="GPUs that share a layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, max=_MOST_GPUS, help="Stages that share the layers.")] = 1,
    dp_attention: Annotated[
        int, typer.Option(min=1, max=_MOST_GPUS, help="Groups of the --tp GPUs with requests of their own.")
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help="Of the cache, as --kv-cache-dtype; auto takes the config's.")
    ] = AUTO,
    page_size: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 16, help="Tokens of a page; if absent 1, or 64 or 128 for sparse attention."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 24, help=f"Tokens of a request; {_CONTEXT} if absent, or the model's most."
        ),
    ] = None,
    draft_layers: Annotated[
        int, typer.Option(min=0, max=4096, help="Layers of a draft (EAGLE, MTP) like the model's own.")
    ] = 0,
    hierarchical_cache: Annotated[
        bool, typer.Option(help="HiCache is on: all layers of sparse attention keep an index.")
    ] = False,
    raw_latents: Annotated[
        bool, typer.Option(help="Sparse attention in fp8 as trtllm backends keep it, without scales.")
    ] = False,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="GB of each GPU.", rich_help_panel=_FIT)
    ] = None,
    weights: Annotated[
        float, typer.Option(min=0, max=1e6, help="GB of it that weights take.", rich_help_panel=_FIT)
    ] = 0.0,
    mem_fraction: Annotated[
        float,
        typer.Option(min=0.01, max=1, help="Part of it for weights and cache.", rich_help_panel=_FIT),
    ] = 0.9,
    window_ratio: Annotated[
        float,
        typer.Option(min=0.0001, max=1, help="As --swa-full-tokens-ratio.", rich_help_panel=_FIT),
    ] = 0.8,
    state_ratio: Annotated[
        float,
        typer.Option(min=0.0001, max=1000, help="As --mamba-full-memory-ratio.", rich_help_panel=_FIT),
    ] = 0.9,
    state_slots: Annotated[
        int,
        typer.Option(min=1, max=64, help="States of a request; 1 without radix cache.", rich_help_panel=_FIT),
    ] = 3,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=GB[@PRICE]",
            help="A tier below, in GB over all machines, with its price per GB and month; repeatable. In one "
            "named host each rank has a part of its own.",
            rich_help_panel=_FIT,
        ),
    ] = None,
    price_device: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Device memory, per GB and month.", rich_help_panel=_PRICES),
    ] = None,
    price_computed: Annotated[
        float | None,
        typer.Option(min=0, max=1e9, help="Computing a million prompt tokens.", rich_help_panel=_PRICES),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say how many bytes a model's KV cache takes in sglang 0.5.21, from its config.json, and what fits."""
    if list_models:
        show(_models_table())
        return
    if model is None:
        fail("name a model of --list, a config.json or its folder")
    try:
        shape = load_shape(model)
        deployment = Deployment(
            dtype=_dtype(dtype, shape),
            page_size=page_size or usual_page(shape),
            tp=tp,
            pp=pp,
            dp_attention=dp_attention,
            draft_layers=draft_layers,
            index_everywhere=hierarchical_cache,
            raw_latents=raw_latents,
        )
        sizes = size(
            shape,
            deployment,
            _context(context, shape),
            budget=_budget(gpu_memory, weights, mem_fraction),
            device_price=price_device,
            division=Division(window_ratio, state_ratio, state_slots),
            tiers=[parse_tier(text) for text in tier or ()],
            million_computed=price_computed,
        )
    except SizeError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(sizes.document(), indent=1))
        return
    show(_layers_table(sizes))
    if sizes.tiers:
        show(_tiers_table(sizes))
    for line in _remarks(sizes):
        typer.echo(line)


def _dtype(name: str, shape: ModelShape) -> CacheDtype:
    """
    Raises:
        SizeError: nobody knows the name, or ``auto`` would be a guess.
    """
    if name != AUTO:
        return cache_dtype(name)
    if not shape.attention:
        return BFLOAT16  # No tensor has it.
    if shape.is_sparse:
        raise SizeError("sglang takes another dtype for sparse attention on each GPU: give --dtype")
    if shape.dtype is None:
        raise SizeError(
            "the config's dtype is auto, or none of a cache, or a quantization may bring the cache its own: "
            "give --dtype"
        )
    return cache_dtype(shape.dtype)


def _context(asked: int | None, shape: ModelShape) -> int:
    """
    Raises:
        SizeError: the model has no such context.
    """
    if asked is None:
        return min(_CONTEXT, shape.context or _CONTEXT)
    if shape.context is not None and asked > shape.context:
        raise SizeError(
            f"--context {asked} is more than the {shape.context} of the config: choose a smaller one"
        )
    return asked


def _budget(gpu_memory: float | None, weights: float, mem_fraction: float) -> int | None:
    """Bytes for the cache: what sglang leaves to it under ``--mem-fraction-static``.

    Raises:
        SizeError: weights leave nothing.
    """
    if gpu_memory is None:
        return None
    budget = int((gpu_memory * mem_fraction - weights) * GB)
    if budget <= 0:
        raise SizeError("weights leave no memory for the cache: give more --gpu-memory, or less --weights")
    return budget


# ---- tables ----


def _models_table() -> Table:
    table = _table("models known by name", left=("name", "type"))
    table.add_column("source", overflow="fold")  # to be copied
    for each in bundled_shapes():
        add_texts(table, each.name, each.config["model_type"], each.source)
    return table


def _layers_table(sizes: Sizes) -> Table:
    """Bytes by kind of layer, and their sum."""
    deployment = sizes.deployment
    table = _table(
        f"{sizes.shape.model_type}, {deployment.dtype.name}, pages of {deployment.page_size}: bytes of one "
        "copy, and on the GPU that keeps most",
        left=("layers",),
        right=(
            "",
            "per token",
            "on a GPU",
            f"per request of {sizes.context:,}",
            "on a GPU",
            "never read",
            "copies",
        ),
    )
    for kind in sizes.kinds:
        add_texts(
            table,
            kind.kind + (f" of {kind.window:,}" if kind.window is not None else ""),
            f"{kind.layers}",
            f"{kind.bytes_per_token:,}",
            f"{kind.bytes_per_token_per_gpu:,}",
            f"{kind.bytes_per_request:,}",
            f"{kind.bytes_per_request_per_gpu:,}",
            f"{kind.unread_bytes_per_request:,}" if kind.unread_bytes_per_request else "",
            f"{kind.copies}",
        )
    table.add_section()
    add_texts(
        table,
        "all that grows",
        "",
        f"{sizes.bytes_per_token:,}",
        f"{sizes.bytes_per_token_per_gpu:,}",
        f"{sizes.bytes_per_request:,}",
        f"{sizes.bytes_per_request_per_gpu:,}",
    )
    add_texts(table, "padding", "", "", "", f"{sizes.fixed_bytes:,}", f"{sizes.fixed_bytes_per_gpu:,}")
    return table


def _tiers_table(sizes: Sizes) -> Table:
    table = _table(
        f"requests of {sizes.context:,} tokens",
        left=("tier",),
        right=(
            "GB each",
            "tokens",
            "requests",
            "a million tokens, per month",
            "cheaper than computing for hours",
        ),
    )
    for tier in sizes.tiers:
        add_texts(
            table,
            tier.name,
            f"{tier.request_bytes / GB:,.3g}",
            f"{tier.tokens:,}",
            f"{tier.requests:,}",
            "" if tier.million_tokens_month is None else f"{tier.million_tokens_month:,.3g}",
            "" if tier.break_even_hours is None else f"{tier.break_even_hours:,.3g}",
        )
    return table


def _remarks(sizes: Sizes) -> list[str]:
    """What the tables leave open."""
    lines = []
    capacity = sizes.capacity
    if capacity is not None:
        pools = (
            ("tokens", capacity.full_tokens),
            ("slots of windows", capacity.window_tokens),
            ("states", capacity.states),
        )
        held = ", ".join(f"{count:,} {words}" for words, count in pools if count is not None)
        lines.append(f"An attention group holds {held}; {capacity.limited_by} runs out first.")
    if sizes.mha_bytes_per_token_per_gpu and sizes.bytes_per_token_per_gpu:
        ratio = sizes.mha_bytes_per_token_per_gpu / sizes.bytes_per_token_per_gpu
        beside = ""
        if sizes.mha_requests is not None and capacity is not None:
            beside = f", and {sizes.mha_requests:,} requests would fit instead of {capacity.requests:,}"
        lines.append(f"Sized as MHA, a token would take {ratio:.1f} times as much on a GPU{beside}.")
    return lines + _selector_lines(sizes.shape)


def _selector_lines(shape: ModelShape) -> list[str]:
    """What choosing among tiered pages takes, where a model can have them."""
    heads = [cache.geometry for cache in shape.caches if cache.kind is LayerKind.FULL]
    if len(heads) < len(shape.caches):
        return []
    kept = {
        selector: sum(
            each.kv_heads * kept_bytes(selector, each.head_dim, TIERED_PAGE) / TIERED_PAGE
            for each in heads
            if isinstance(each, HeadGeometry)
        )
        for selector in ("bits", "token")
    }
    said = " or ".join(f"{count:,.0f} bytes ({selector})" for selector, count in kept.items())
    return [f"Choosing among tiered pages of {TIERED_PAGE} (--kv-sparse-selector) keeps {said} of a token."]


def _table(title: str, *, left: tuple[str, ...], right: tuple[str, ...] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=plain(title, "table.title"))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right")
    return table

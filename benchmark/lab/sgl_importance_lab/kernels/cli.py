"""``sgl-importance kernels``: compiles ahead of time, so that no request waits for a compiler."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    import torch

app = typer.Typer(help="Kernels that emit page scores.", no_args_is_help=True)
console = Console()

DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = {"auto": None, "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""torch's names of sglang's ``--kv-cache-dtype``; None for that of the queries."""


@app.callback()
def _kernels() -> None:
    """Kernels that emit page scores."""


@app.command()
def build(
    head_dim: Annotated[int, typer.Option(min=1, help="dimensions of a head")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="query heads of one rank")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of one rank")] = 8,
    page_size: Annotated[int, typer.Option(min=1, help="tokens per page")] = 16,
    window: Annotated[int, typer.Option(min=1, help="last prompt tokens that are observed")] = 32,
    layers: Annotated[int, typer.Option(min=1, help="sampled layers")] = 4,
    dtype: Annotated[str, typer.Option(help="of queries and keys: " + ", ".join(DTYPES))] = "bfloat16",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="as the server has it: " + ", ".join(KV_DTYPES))
    ] = "auto",
    logit_cap: Annotated[float, typer.Option(min=0, help="soft cap of the model's logits, 0 for none")] = 0.0,
    flashinfer: Annotated[bool, typer.Option(help="the FlashInfer variant too, both paths")] = False,
) -> None:
    """Compiles the kernels for one model into the caches of Triton and FlashInfer.

    Windows up to ``--window`` are run once on a few random tokens: Triton compiles what it is called with.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}, not {dtype}", param_hint="--dtype")
    if kv_cache_dtype not in KV_DTYPES:
        known = ", ".join(KV_DTYPES)
        raise typer.BadParameter(
            f"must be one of {known}, not {kv_cache_dtype}", param_hint="--kv-cache-dtype"
        )
    if heads % kv_heads:
        raise typer.BadParameter(f"{heads} query heads over {kv_heads} KV heads", param_hint="--heads")
    import torch

    device = _device()
    if flashinfer:
        _require_flashinfer(device)
    from sgl_importance_kernels.triton.qk_probe import refusal
    from sgl_importance_lab.kernels.warm_up import WarmUp

    stored = KV_DTYPES[kv_cache_dtype] or dtype
    why = refusal(
        key_dtype=getattr(torch, stored),
        query_dtype=getattr(torch, dtype),
        head_dim=head_dim,
        value_head_dim=head_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
    )
    if why is not None:
        raise typer.BadParameter(f"there is no kernel for {why}", param_hint="--head-dim")
    model = WarmUp(
        head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        page_size=page_size,
        layers=layers,
        dtype=getattr(torch, dtype),
        device=device,
        key_dtype=getattr(torch, stored),
        logit_cap=logit_cap,
    )
    for num_q in track(model.windows(window), description="qk-probe", console=console):
        model.run(num_q)
    model.run_logits()
    if flashinfer:
        _build_flashinfer(head_dim, getattr(torch, dtype), getattr(torch, stored))
    console.print(
        f"built for heads of {head_dim}, {heads}/{kv_heads} heads, pages of {page_size} on {device}"
    )


def _device() -> str:
    """Where kernels are compiled for; the interpreter, which compiles nothing, counts for trying out."""
    import torch
    import triton

    if triton.knobs.runtime.interpret:
        return "cpu"
    if not torch.cuda.is_available():
        console.print("no CUDA device: kernels are compiled on the machine that runs them", style="red")
        raise typer.Exit(1)
    return "cuda"


def _require_flashinfer(device: str) -> None:
    missing = [name for name in ("flashinfer",) if importlib.util.find_spec(name) is None]
    missing += [name for name in ("nvcc",) if shutil.which(name) is None]
    if missing or device != "cuda":
        what = ", ".join(missing) or "a CUDA device"
        console.print(f"--flashinfer needs {what}: leave it out, or install it", style="red")
        raise typer.Exit(1)


def _build_flashinfer(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    from flashinfer.jit import gen_customize_batch_decode_module, gen_customize_batch_prefill_module

    from sgl_importance_kernels.flashinfer import EmittingDecode

    for tensor_cores in track((False, True), description="FlashInfer variant", console=console):
        form = EmittingDecode(head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, tensor_cores=tensor_cores)
        arguments = form.jit_args()
        if tensor_cores:
            gen_customize_batch_prefill_module("fa2", *arguments).build_and_load()
        else:
            gen_customize_batch_decode_module(*arguments).build_and_load()

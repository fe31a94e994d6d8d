"""``sgl-importance kernels``: compiles ahead of time, so that no request waits for a compiler."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

app = typer.Typer(help="Kernels that emit page scores.", no_args_is_help=True)
console = Console()

DTYPES = ("bfloat16", "float16", "float32")


@app.callback()
def _kernels() -> None:
    """Kernels that emit page scores."""


@app.command()
def build(
    head_dim: Annotated[int, typer.Option(help="dimensions of a head")] = 128,
    heads: Annotated[int, typer.Option(help="query heads of one rank")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads of one rank")] = 8,
    page_size: Annotated[int, typer.Option(help="tokens per page")] = 16,
    window: Annotated[int, typer.Option(help="last prompt tokens that are observed")] = 32,
    layers: Annotated[int, typer.Option(help="sampled layers")] = 4,
    dtype: Annotated[str, typer.Option(help="of queries and keys: " + ", ".join(DTYPES))] = "bfloat16",
    flashinfer: Annotated[bool, typer.Option(help="the FlashInfer variant too, both paths")] = False,
) -> None:
    """Compiles the kernels for one model into the caches of Triton and FlashInfer.

    Windows up to ``--window`` are run once on a few random tokens: Triton compiles what it is called with.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}, not {dtype}", param_hint="--dtype")
    if heads % kv_heads:
        raise typer.BadParameter(f"{heads} query heads over {kv_heads} KV heads", param_hint="--heads")
    import torch

    device = _device()
    if flashinfer:
        _require_flashinfer(device)
    from sgl_importance_kernels.triton.warm_up import WarmUp

    model = WarmUp(
        head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        page_size=page_size,
        layers=layers,
        dtype=getattr(torch, dtype),
        device=device,
    )
    for num_q in track(model.windows(window), description="qk-probe", console=console):
        model.run(num_q)
    model.run_logits()
    if flashinfer:
        _build_flashinfer(head_dim, getattr(torch, dtype))
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


def _build_flashinfer(head_dim: int, dtype: object) -> None:
    from flashinfer.jit import gen_customize_batch_decode_module, gen_customize_batch_prefill_module

    from sgl_importance_kernels.flashinfer import EmittingDecode

    for tensor_cores in track((False, True), description="FlashInfer variant", console=console):
        form = EmittingDecode(head_dim=head_dim, dtype=dtype, kv_dtype=dtype, tensor_cores=tensor_cores)
        arguments = form.jit_args()
        if tensor_cores:
            gen_customize_batch_prefill_module("fa2", *arguments).build_and_load()
        else:
            gen_customize_batch_decode_module(*arguments).build_and_load()

"""Sizes of well-known models' caches, beside a sizing that takes all attention for MHA: table and picture.

Nothing is timed and nothing is random: ``benchmark/lab/test/kv_size`` computes the rows again and compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from results import print_rows, write_results

from sgl_importance_lab.kv_size.cache_dtype import cache_dtype
from sgl_importance_lab.kv_size.config_file import bundled_names, load_shape
from sgl_importance_lab.kv_size.deployment import SPARSE_PAGE, Deployment
from sgl_importance_lab.kv_size.fields import SizeError
from sgl_importance_lab.kv_size.model_shape import ModelShape
from sgl_importance_lab.kv_size.sizes import Sizes, size

FIGURE = Path(__file__).parents[1] / "docs" / "img" / "kv_size.png"
CONTEXT = 32_768
PAGE_SIZE = 64
DRAWN = (
    "llama-3.1-70b",
    "gemma-3n-e4b",
    "gpt-oss-120b",
    "deepseek-v3",
    "qwen3-next-80b-a3b",
    "nemotron-h-8b",
)
CONTEXTS = [1 << power for power in range(8, 18)]


def sized(shape: ModelShape, context: int, *, tp: int = 1, dtype: str = "bfloat16") -> Sizes:
    page_size = SPARSE_PAGE if shape.is_sparse else PAGE_SIZE
    return size(shape, Deployment(cache_dtype(dtype), page_size=page_size, tp=tp), context)


def row(name: str) -> dict[str, Any]:
    """One model, in bfloat16 unless a column says otherwise."""
    shape = load_shape(name)
    alone = sized(shape, CONTEXT)
    unread = sum(kind.unread_bytes_per_request for kind in alone.kinds)
    return {
        "model": name,
        "layers": ", ".join(f"{kind.layers} {kind.kind}" for kind in alone.kinds),
        "bytes_per_token": alone.bytes_per_token,
        "bytes_per_token_fp8": sized(shape, CONTEXT, dtype="fp8_e4m3").bytes_per_token,
        "bytes_per_token_per_gpu_of_8": _per_gpu(shape, 8),
        "request_bytes": alone.bytes_per_request,
        "never_read": unread / alone.bytes_per_request,
        "over_as_mha": _as_mha(shape, 1),
        "over_as_mha_8_gpus": _as_mha(shape, 8),
    }


def rows() -> list[dict[str, Any]]:
    return [row(name) for name in bundled_names()]


def _per_gpu(shape: ModelShape, tp: int) -> int | None:
    """None where the model's heads cannot be shared by so many."""
    try:
        return sized(shape, CONTEXT, tp=tp).bytes_per_token_per_gpu
    except SizeError:
        return None


def _as_mha(shape: ModelShape, tp: int) -> float | None:
    """Bytes of a token on a GPU if sized as MHA, over those that it has."""
    try:
        sizes = sized(shape, CONTEXT, tp=tp)
    except SizeError:
        return None
    if sizes.mha_bytes_per_token_per_gpu is None:
        return None
    return sizes.mha_bytes_per_token_per_gpu / sizes.bytes_per_token_per_gpu


def draw(path: Path) -> None:
    """Bytes of one request by its context."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a display

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in DRAWN:
        shape = load_shape(name)
        gigabytes = [sized(shape, context).bytes_per_request / 1e9 for context in CONTEXTS]
        axes.plot(CONTEXTS, gigabytes, marker=".", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the request", ylabel="GB, bfloat16, one copy")
    axes.set_xticks(CONTEXTS, [f"{context:,}" for context in CONTEXTS], rotation=30)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def main(
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file, and a picture beside it; benchmark/results and docs/img if absent."),
    ] = None,
) -> None:
    found = rows()
    print_rows("KV cache sizes", found)
    write_results("kv_size", found, out=out)
    draw(FIGURE if out is None else out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)

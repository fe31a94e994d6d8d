"""What each check of `sgl-importance doctor` finds on this machine."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from sgl_importance.laboratory import INSTALL as LABORATORY
from sglang_importance.launch.finding import Finding, Status

INSTALL = "run scripts/setup.sh"
MIN_FREE_BYTES = 5 * 2**30
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 2**30
CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    yield Finding("python", Status.OK, platform.python_version())
    ours, laboratory = _installed("sgl-importance"), _installed("sgl-importance-lab")
    yield Finding("sgl-importance", Status.OK, str(ours))
    if laboratory is None:
        yield Finding("laboratory", Status.NOTE, "not installed: nothing that serves needs it", LABORATORY)
    elif laboratory != ours:
        yield Finding("laboratory", Status.PROBLEM, f"{laboratory} beside {ours}", LABORATORY)
    else:
        yield Finding("laboratory", Status.OK, laboratory)
    torch = _installed("torch")
    if torch is None:
        yield Finding("torch", Status.PROBLEM, "not installed", INSTALL)
        return
    yield Finding("torch", Status.OK, torch)


def _accelerator() -> Iterator[Finding]:
    import torch

    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        yield Finding("accelerator", Status.OK, str(device))
        yield Finding(
            "importance on the accelerator",
            Status.NOTE,
            "evicts by predicted reuse beside any attention backend; page scores are opt-in: their "
            "producers have hardly run on a GPU",
            "nothing, or name one with --kv-importance-source; docs/extend.md settles the rest",
        )
    else:
        yield Finding(
            "accelerator",
            Status.NOTE,
            "none visible: serves on the CPU, whose latencies say nothing about a GPU",
        )
        if torch.version.cuda:
            yield Finding(
                "build of torch",
                Status.NOTE,
                f"for CUDA {torch.version.cuda}, with no GPU to be seen",
                "with one: look at nvidia-smi; without: scripts/setup.sh installs a build for CPUs",
            )
        yield from _bfloat16()


def _bfloat16() -> Iterator[Finding]:
    """What scripts/serve.sh makes of the same words: it chooses float32 where none of them is there."""
    if BFLOAT16_FLAGS.search(CPU_INFO.read_text(encoding="utf-8")):
        yield Finding("bfloat16", Status.OK, "the processor has instructions for it")
        return
    yield Finding(
        "bfloat16",
        Status.NOTE,
        "the processor has no instructions for it: products take about ten times as long as in float32, "
        "which serve.sh chooses",
        "launched otherwise: --dtype float32",
    )


def _sglang() -> Iterator[Finding]:
    found = _installed("sglang")
    if found is None:
        yield Finding("sglang", Status.PROBLEM, "not installed", INSTALL)
        return
    try:
        import sglang  # noqa: F401
    except Exception as error:
        yield Finding(
            "sglang",
            Status.PROBLEM,
            f"{found} does not import: {error}",
            "run scripts/setup.sh in a fresh .venv",
        )
        return
    yield Finding("sglang", Status.OK, found)
    from sglang_importance.upstream.symbol_check import CURE, symbol_problems, version_note, version_problem
    from sglang_importance.upstream.symbols import SYMBOLS

    problems = [problem for problem in (version_problem(), *symbol_problems()) if problem]
    for problem in problems:
        yield Finding("upstream symbols", Status.PROBLEM, problem, CURE)
    if not problems:
        yield Finding("upstream symbols", Status.OK, f"all {len(SYMBOLS)} are as expected")
        if note := version_note():
            yield Finding(
                "sglang's release", Status.NOTE, note, "run its tests: scripts/versions.sh " + found
            )


def _plugins() -> Iterator[Finding]:
    for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
        ours = [
            point.value for point in entry_points(group=group) if point.module.startswith("sglang_importance")
        ]
        if ours:
            yield Finding(f"entry point {group}", Status.OK, ", ".join(ours))
        else:
            yield Finding(
                f"entry point {group}",
                Status.PROBLEM,
                "not registered",
                "pip install . in a clone of sgl-importance, into this environment",
            )


def _cpu_shims() -> Iterator[Finding]:
    from sglang_importance.cpu import accelerator_visible, applied_shims, install

    if accelerator_visible():
        yield Finding("CPU shims", Status.OK, "inert: an accelerator is visible")
        return
    try:
        install()
    except ValueError as error:
        yield Finding("CPU shims", Status.PROBLEM, "none", str(error))
        return
    yield Finding("CPU shims", Status.OK, ", ".join(applied_shims()) or "none needed")


def _backends() -> Iterator[Finding]:
    from sglang_importance.attention.score_sources import PRODUCERS, UNPROVEN

    for source, backend in sorted(PRODUCERS.items()):
        yield Finding(f"scores from {backend}", Status.OK, f"by --kv-importance-source auto ({source})")
    for backend in sorted({backend for backends in UNPROVEN.values() for backend in backends}):
        sources = " or ".join(source for source, backends in UNPROVEN.items() if backend in backends)
        yield Finding(
            f"scores from {backend}",
            Status.NOTE,
            f"opt-in, pending a GPU run: --kv-importance-source {sources}",
            "do not serve users with it",
        )
    for package in ("triton", "flashinfer"):
        found = find_spec(package) is not None
        yield Finding(package, Status.OK if found else Status.NOTE, "installed" if found else "not installed")
    compiler = shutil.which("nvcc")
    yield Finding("nvcc", Status.OK if compiler else Status.NOTE, "found" if compiler else "not found")


def _embedded_model() -> Iterator[Finding]:
    from safetensors import safe_open

    from sgl_importance.embedded_model import checkpoint_path

    cure = "reinstall sgl-importance, or make it with benchmark/lab/scripts/train_probe.py of a clone"
    try:
        with safe_open(checkpoint_path() / "model.safetensors", framework="numpy") as weights:
            tensors = len(weights.keys())
    except Exception as error:
        yield Finding("embedded model", Status.PROBLEM, str(error), cure)
        return
    yield Finding("embedded model", Status.OK, f"{tensors} tensors")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    detail = f"{free / 2**30:.0f} GiB free here"
    if free < MIN_FREE_BYTES:
        yield Finding("disk", Status.NOTE, detail, "a storage tier needs room: free some, or leave it off")
    else:
        yield Finding("disk", Status.OK, detail)


def _shared_memory() -> Iterator[Finding]:
    """Containers have 64 MiB by default; schedulers of several ranks exchange tensors in it."""
    size = shutil.disk_usage(SHARED_MEMORY).total
    detail = f"{size / 2**30:.1f} GiB in {SHARED_MEMORY}"
    if size < MIN_SHARED_BYTES:
        cure = "--shm-size 16g for a container; for a pod an emptyDir of medium Memory, as in scripts/deploy"
        yield Finding("shared memory", Status.NOTE, detail, cure)
    else:
        yield Finding("shared memory", Status.OK, detail)


def _postgresql() -> Iterator[Finding]:
    if find_spec("psycopg") is None:
        cure = "for --kv-importance-ledger postgresql://...: pip install '.[postgresql]' in a clone"
        yield Finding("psycopg", Status.NOTE, "not installed", cure)
    else:
        yield Finding("psycopg", Status.OK, "installed")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _accelerator,
    _sglang,
    _plugins,
    _cpu_shims,
    _backends,
    _embedded_model,
    _disk,
    _shared_memory,
    _postgresql,
)

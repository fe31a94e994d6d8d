"""Puts the wheels into a folder that a command of scripts/gpu.sh needs on a machine without network.

    python scripts/gpu/carry.py {kernels,serve} FOLDER

For Python 3.12 on x86-64. CUDA and torch, with what is usual beside them (transformers, torchvision, numba,
aiohttp, httpx, uvloop, pytest), are expected there.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMANDS = ("kernels", "serve")
MOST_BYTES = 60 * 2**20
"""Of the tracked files and the folder together: what may travel."""
GLIBC = ("2_34", "2_28", "2_24", "2_17")
LEFT_OUT = (
    "sglang/multimodal_gen/",
    "sglang/test/",
    "sglang/srt/mem_cache/rust_tree_core/mem_cache.",
    *(f"sglang/srt/rust_extensions/_{name}." for name in ("server", "grpc", "multimodal")),
    "flashinfer/moe_ep/kernel_src/",
)
"""Of sglang: diffusion, its tests, and servers and tree in Rust, which it falls back from; two thirds of the
wheel. The tree was built for the torch that sglang names, and beside another one refuses its own tensors. Of
FlashInfer: kernels of experts on several machines."""


def download(command: str, folder: Path) -> None:
    platforms = [f"--platform=manylinux_{version}_x86_64" for version in GLIBC]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
            *("--python-version=3.12", "--implementation=cp", *platforms, "--platform=manylinux2014_x86_64"),
            *("-c", ROOT / "scripts/pins-cpu.txt", "-r", HERE / f"{command}.txt", "-d", folder),
        ],
        check=True,
    )


def slim(wheel: Path) -> None:
    """Makes a wheel anew, without what is left out: there must be such."""
    made = wheel.with_suffix(".slim")
    with (
        zipfile.ZipFile(wheel) as whole,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        for entry in whole.infolist():
            if entry.filename.startswith(LEFT_OUT):
                continue
            content = whole.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not line.startswith(LEFT_OUT)).encode()
            new.writestr(entry.filename, content)
        assert len(new.infolist()) < len(whole.infolist()), f"{wheel.name} has nothing that is left out"
    made.replace(wheel)


def tracked_bytes() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return sum(path.stat().st_size for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in COMMANDS:
        sys.exit(f"error: say for which command and whereto: carry {{{','.join(COMMANDS)}}} FOLDER")
    command, folder = sys.argv[1], Path(sys.argv[2])
    if folder.is_dir() and any(folder.iterdir()):
        sys.exit(f"error: {folder} is not empty: each command has a folder of its own")
    download(command, folder)
    for name in ("sglang", "flashinfer_python"):
        for wheel in folder.glob(f"{name}-*.whl"):
            slim(wheel)
    carried = sum(path.stat().st_size for path in folder.iterdir())
    everything = tracked_bytes() + carried
    print(f"{carried / 2**20:.1f} MiB of wheels, {everything / 2**20:.1f} with the tracked files")
    if everything > MOST_BYTES:
        sys.exit(f"error: more than {MOST_BYTES / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()

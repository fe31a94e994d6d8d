"""Two ranks in a real gloo world, each a process of its own that runs the same code."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

from support import warm_start

HANG_SECONDS = 120.0


def printed_by_ranks(code: str, folder: Path) -> list[str]:
    """What each of two processes prints that run ``code`` with their rank and the path of gloo's store.

    Args:
        code: of Python, indented as it stands in a test.
        folder: an empty one.
    """
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    printed = [folder / f"{rank}.out" for rank in range(2)]
    errors = [folder / f"{rank}.err" for rank in range(2)]
    processes = [
        warm_start.start(
            [sys.executable, str(script), str(rank), str(folder / "store")],
            env=environment,
            folder=folder,
            stdout=printed[rank],
            stderr=errors[rank],
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(HANG_SECONDS) for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert codes == [0, 0], [file.read_text() for file in errors]
    return [file.read_text() for file in printed]

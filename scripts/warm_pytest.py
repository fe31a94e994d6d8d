"""pytest, again and again, without the ten seconds of CPU time that each start takes to import sglang.

    python scripts/warm_pytest.py FOLDER MODULE...   # for scripts/mutations.py, in the root of a tree

The modules are imported once, and what of them lies below the folder is forgotten: each run, a process forked
from this one, reads it anew. Standard input has a line of JSON for each run, {"words": arguments of pytest,
"log": a file for what it prints, "seconds": a limit}; the answer is a line with pytest's exit code, or null
where the run took too long and was ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import Phase, settings

# What fails has been noticed: a smaller example says no more, and takes minutes to find.
settings.register_profile(
    "first-failure", deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


def import_all_but(folder: Path, modules: Sequence[str]) -> None:
    """Imports modules; those that come from below a folder are forgotten again."""
    for name in modules:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and file and Path(file).is_relative_to(folder):
            del sys.modules[name]
    gc.collect()
    gc.freeze()  # what stays need not be walked by the collections of each run


def exit_code(words: Sequence[str], log: Path, seconds: float) -> int | None:
    """Of pytest with these words, in a process of its own; None where it took longer than ``seconds``."""
    process = os.fork()
    if not process:
        _become_pytest(words, log)
    ends = os.pidfd_open(process)
    try:
        in_time = bool(select.select([ends], [], [], seconds)[0])
    finally:
        os.close(ends)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # its family as well: nothing may touch the next run's tree
        _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def _become_pytest(words: Sequence[str], log: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number, file in ((0, os.devnull), (1, log), (2, log)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), number)
        sys.stdin = os.fdopen(0, closefd=False)
        code = int(pytest.main(["--hypothesis-profile=first-failure", *words]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    folder, *modules = sys.argv[1:]
    import_all_but(Path(folder), modules)
    for line in sys.stdin:
        run = json.loads(line)
        print(json.dumps(exit_code(run["words"], Path(run["log"]), run["seconds"])), flush=True)


if __name__ == "__main__":
    main()

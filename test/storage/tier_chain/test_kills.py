"""Processes that are killed at each step of a move: nothing is lost, nothing wrong is served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_importance.storage.tier_chain.page_mover import Point

from support.tier_chains import MODEL, keys_of, open_chain, wrong_pages

CHAINS = (("cxl", "fs"), ("cxl", "hicache"))
"""Of tiers that outlive their process."""
SESSIONS = "abc"
MOVES = (1, 2, 5)

# One interpreter for all cases: each is a child of its own, which ends itself by SIGKILL.
CHILDREN = f"""
import json, os, signal, sys
from itertools import product
from pathlib import Path
from support.tier_chains import MODEL, keys_of, open_chain, write
from sgl_importance.storage.tier_chain.page_mover import Point

def begin(folder, kinds, point, move, said):
    seen = 0
    def at(reached):
        nonlocal seen
        seen += reached is point
        if seen == move:
            os.kill(os.getpid(), signal.SIGKILL)
    chain = open_chain(folder, kinds, at=at)
    for moment, session in enumerate({SESSIONS!r}):
        write(chain, keys_of(session, 2), moment=moment)
        os.write(said, session.encode())
    for moment in range(20):
        chain.touch(MODEL, keys_of({SESSIONS!r}[moment % 3], 2), 10 + moment)

for kinds, point, move in product({CHAINS}, Point, {MOVES}):
    name = f"{{kinds[-1]}}-{{point.value}}-{{move}}"
    heard, said = os.pipe()
    child = os.fork()
    if not child:
        begin(Path(sys.argv[1]) / name, kinds, point, move, said)
        os._exit(0)
    os.close(said)
    status = os.waitpid(child, 0)[1]
    print(json.dumps([name, os.waitstatus_to_exitcode(status), os.read(heard, 99).decode()]))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, str]]]:
    """The folder of each case by name, its exit code, and the sessions that it had written."""
    folder = tmp_path_factory.mktemp("killed")
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return folder, {name: (code, written) for name, code, written in rows}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("point", list(Point))
@pytest.mark.parametrize("kinds", CHAINS)
def test_a_kill_at_any_step_loses_nothing(
    killed: tuple[Path, dict[str, tuple[int, str]]], kinds: tuple[str, ...], point: Point, move: int
) -> None:
    folder, outcomes = killed
    case = f"{kinds[-1]}-{point.value}-{move}"
    code, written = outcomes[case]
    assert code == -signal.SIGKILL, "it was to be killed"
    chain = open_chain(folder / case, kinds)
    chain.check_integrity()
    for session in written:
        assert chain.count_present(MODEL, keys_of(session, 2)) == 2, "lost"
    for session in SESSIONS:
        assert wrong_pages(chain, keys_of(session, 2)) == []
    held = sum(tier["pages"] for tier in chain.snapshot())
    files = sum(1 for member in chain.members for _ in member.tier.records())
    assert files == held, "a page is left in two tiers"
    again = open_chain(folder / case, kinds)
    assert sum(tier["pages"] for tier in again.snapshot()) == held

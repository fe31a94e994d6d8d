"""What is demanded of schedulers that are ready; who ends with a launcher. test_launch.py has real ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sglang_importance.launch.launcher import PROOF_KEY, SCHEDULER_PIDS, _check_proofs
from sglang_importance.upstream.refusal import LaunchRefused

LIVE = {PROOF_KEY: {"cache": True, "hooks": True}}


def launched(*infos: dict[str, Any]) -> tuple[Any, ...]:
    """What upstream's launch returns, as far as it is looked at."""
    return (None, SimpleNamespace(scheduler_infos=list(infos)))


def test_schedulers_whose_parts_are_all_live_serve(tmp_path: Path) -> None:
    _check_proofs(launched(LIVE, LIVE), tmp_path)


@pytest.mark.parametrize(
    "infos",
    [(), ({},), (LIVE, {}), ({PROOF_KEY: {"cache": True, "hooks": False}},)],
    ids=["no scheduler", "no proof", "one without proof", "a dead part"],
)
def test_others_are_refused(infos: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    with pytest.raises(LaunchRefused, match="without proof that importance is live"):
        _check_proofs(launched(*infos), tmp_path)


def test_those_behind_a_data_parallel_controller_leave_theirs_in_a_folder(tmp_path: Path) -> None:
    for pid in (11, 12):
        (tmp_path / str(pid)).write_text(json.dumps(LIVE[PROOF_KEY]))
    _check_proofs(launched({SCHEDULER_PIDS: [11, 12]}), tmp_path)
    for pids in ([], [11, 12, 13]):
        with pytest.raises(LaunchRefused):
            _check_proofs(launched({SCHEDULER_PIDS: pids}), tmp_path)
    (tmp_path / "12").write_text(json.dumps({"cache": False}))
    with pytest.raises(LaunchRefused):
        _check_proofs(launched({SCHEDULER_PIDS: [11, 12]}), tmp_path)


STARTS_ANOTHER = """
import subprocess, sys, time
from sglang_importance.launch.launcher import _ending_together
with _ending_together():
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    time.sleep(600)
"""


def test_who_is_ended_while_it_starts_others_leaves_none() -> None:
    command = [sys.executable, "-W", "ignore", "-c", STARTS_ANOTHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        assert launcher.stdout
        other = psutil.Process(int(launcher.stdout.readline()))
        launcher.terminate()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs([other], timeout=30)[1]

"""scripts/demo.sh: its last line adds up and agrees with stock's own hits; it leaves no server."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from demo.agents import TASKS, load
from demo.served import OWN_FLAGS, Server

ROOT = Path(__file__).parents[2]
SECONDS = 240
# The embedded model knows other words: a prompt is longer in its tokens.
FLAGS = ("--model", "retrieval", "--max-total-tokens", "8192")
LINE = re.compile(
    r"([\d,]+) of ([\d,]+) prompt tokens were hit \(.*?\), stock's LRU would have hit ([\d,]+) \(.*?\); "
    r"computed: (.*)\."
)


def numbers(text: str) -> list[int]:
    return [int(each.replace(",", "")) for each in re.findall(r"[\d,]*\d", text)]


def test_every_session_is_whole_and_says_that_it_is_over() -> None:
    turns = list(load())
    assert [turn.messages for turn in turns] == [turn.messages for turn in load()]
    by_session: dict[str, list[Any]] = {}
    for turn in turns:
        by_session.setdefault(turn.session, []).append(turn)
    assert len(by_session) == len(TASKS)
    for session in by_session.values():
        assert [turn.is_last for turn in session] == [*[False] * (len(session) - 1), True]
        for earlier, later in pairwise(session):
            assert later.messages[: len(earlier.messages)] == earlier.messages


def test_a_dry_run_prints_the_servers_command(scripts: Any) -> None:
    done = scripts.run("demo.sh", "--page-size", "32", env={"SERVE_DRY_RUN": "1"})
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[words.index("--model-path") + 1].endswith("smollm2")
    assert words[words.index("--page-size") + 1] == "32"
    assert "--enable-hierarchical-cache" not in words  # stock's shadow knows the device alone


def test_it_waits_for_its_server_on_the_port_that_it_is_given(scripts: Any) -> None:
    done = scripts.run("demo.sh", "--port", "31000", env={"SERVE_DRY_RUN": "1"})
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert [words[at + 1] for at, word in enumerate(words) if word == "--port"] == ["31000"]
    assert Server(port=31000).url == "http://127.0.0.1:31000"


@pytest.mark.parametrize("flag", [*OWN_FLAGS, "--host=0.0.0.0"])
def test_what_it_would_wait_for_in_vain_is_refused_in_one_line(scripts: Any, flag: str) -> None:
    done = scripts.run("demo.sh", flag, "x", env={"SERVE_DRY_RUN": "1"})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(
        f"{flag} is the demonstration's own: leave it out, or use scripts/serve.sh"
    )


@pytest.mark.nightly
@pytest.mark.server
def test_stocks_hits_are_those_of_a_server_that_evicts_as_stock(scripts: Any) -> None:
    """Under ``observe`` a server's own hits are stock's, so the line must name one number twice."""
    command = scripts.command("demo.sh", *FLAGS, "--kv-policy", "observe")
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = LINE.fullmatch(done.stdout.splitlines()[-1])
    assert found, done.stdout
    hit, prompt, stock = numbers(" ".join(found.groups()[:3]))
    assert hit == stock
    assert hit + sum(numbers(found[4])) == prompt
    assert "given up to make room" in found[4]
    assert re.search(r"http://127\.0\.0\.1:\d+/kv_importance/ui", done.stdout)
    assert not servers_of(done.stdout)


STARTED, SERVES = "Starting a server", "The live page"


@pytest.mark.parametrize(
    ("kind", "line", "processes"),
    [
        (signal.SIGINT, STARTED, 1),
        # The server has started its own, which do not know yet that they end with it.
        (signal.SIGTERM, STARTED, 4),
        (signal.SIGKILL, STARTED, 4),
        (signal.SIGINT, SERVES, 4),
    ],
)
@pytest.mark.nightly
@pytest.mark.server
def test_interrupted_at_any_moment_it_leaves_no_server(
    scripts: Any, kind: signal.Signals, line: str, processes: int
) -> None:
    with subprocess.Popen(
        scripts.command("demo.sh", *FLAGS),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout
        while line not in demo.stdout.readline():
            assert demo.poll() is None
        while len(family := psutil.Process(demo.pid).children(recursive=True)) < processes:
            time.sleep(0.1)
        demo.send_signal(kind)
        _, errors = demo.communicate(timeout=60)
    _, left = psutil.wait_procs(family, timeout=30)
    assert not left
    if kind is not signal.SIGKILL:
        assert errors.strip() == "demo.sh: interrupted; the server has ended"


def servers_of(printed: str) -> list[psutil.Process]:
    """Processes that still have the port that was printed."""
    port = re.search(r"127\.0\.0\.1:(\d+)", printed)
    assert port
    lines = ((each, each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))
    return [process for process, words in lines if port[1] in words]

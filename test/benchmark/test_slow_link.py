"""The link of ``benchmark/fleet.py`` that is slow, narrow, lossy or cut: its arithmetic, and real packets."""

from __future__ import annotations

import itertools
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.slow_link import HERE, QUEUE_SECONDS, THERE, Line, LinkError, Quality, SlowLink

PORT = 9000
ECHO = f"""
import socket
with socket.create_server(("{THERE}", {PORT})) as server:
    print("ready", flush=True)
    while True:
        client, _ = server.accept()
        while data := client.recv(1 << 16):
            client.sendall(data)
"""


@given(
    gaps=st.lists(st.floats(0, 0.5), min_size=1, max_size=50),
    size=st.integers(40, 1500),
    rate=st.floats(1e3, 1e8),
    delay=st.floats(0, 2),
)
def test_a_line_keeps_order_rate_and_delay(gaps: list[float], size: int, rate: float, delay: float) -> None:
    line, now, arrivals = Line(random.Random(0)), 1000.0, []
    for gap in gaps:
        now += gap
        arrival = line.arrival(size, Quality(delay=delay, rate=rate), now)
        if arrival is None:  # its buffer was full
            continue
        assert now + delay + size / rate <= arrival + 1e-9
        assert arrival <= now + QUEUE_SECONDS + size / rate + delay + 1e-9
        arrivals.append(arrival)
    assert arrivals, "the first finds the line free"
    assert all(later - one >= size / rate - 1e-6 for one, later in itertools.pairwise(arrivals))


@given(loss=st.floats(0, 1))
def test_a_line_loses_its_share(loss: float) -> None:
    line = Line(random.Random(3))
    lost = sum(line.arrival(100, Quality(loss=loss), 0.0) is None for _ in range(4000))
    assert abs(lost / 4000 - loss) < 0.05
    assert lost == 4000 or loss < 1


@pytest.mark.skipif(os.geteuid() == 0, reason="this is root")
def test_without_root_one_line_says_so() -> None:
    with pytest.raises(LinkError, match="needs root"), SlowLink():
        pass


@pytest.fixture
def link() -> Iterator[SlowLink]:
    try:
        with SlowLink() as link:
            yield link
    except LinkError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def far(link: SlowLink) -> Iterator[socket.socket]:
    """A connection to a program at the far end that says everything back."""
    with subprocess.Popen(
        link.inside([sys.executable, "-I", "-c", ECHO]), stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            with socket.create_connection((THERE, PORT), timeout=60) as connection:
                yield connection
        finally:
            program.kill()


def said_back(connection: socket.socket, data: bytes) -> float:
    """Sends data, demands it back; the seconds that took."""
    began = time.monotonic()
    connection.sendall(data)
    found = b""
    while len(found) < len(data):
        found += connection.recv(1 << 16)
    assert found == data
    return time.monotonic() - began


def test_packets_pass_as_the_link_is(link: SlowLink, far: socket.socket) -> None:
    said_back(far, os.urandom(300_000))
    link.quality = Quality(delay=0.05)
    assert said_back(far, b"some") >= 0.1
    link.quality = Quality(rate=200_000)
    assert said_back(far, os.urandom(40_000)) >= 0.15
    link.quality = Quality(loss=0.1)
    said_back(far, os.urandom(40_000))
    assert far.getsockname()[0] == HERE


def test_what_is_sent_into_a_cut_arrives_when_it_is_mended(link: SlowLink, far: socket.socket) -> None:
    link.quality = Quality(loss=1)
    far.sendall(b"some")
    far.settimeout(0.5)
    with pytest.raises(TimeoutError):
        far.recv(4)
    link.quality = Quality()
    far.settimeout(60)
    assert far.recv(4) == b"some"


def test_nothing_is_left_behind(link: SlowLink) -> None:
    device = Path(f"/sys/class/net/kvh{os.getpid()}")
    assert device.exists()
    link.__exit__()
    assert not device.exists()
    assert not Path(f"/proc/{link._namespace}").exists()

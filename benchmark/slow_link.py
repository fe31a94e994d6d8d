"""A link to a network namespace that is slow, narrow, lossy or cut at will, for faults between machines.

Packets pass between two TUN devices through a thread of this process. Linux has a queueing discipline for
that (``tc netem``), but many kernels of virtual machines are built without it.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

HERE, THERE = "198.18.0.1", "198.18.0.2"
"""Addresses of both ends, of the range that RFC 2544 keeps for benchmarks of networks."""
MTU = 1500
QUEUE_SECONDS = 0.2
"""Longest wait for a narrow link before a packet is dropped, as in the buffer of a router."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_LOOK_SECONDS = 0.05
_START_SECONDS = 10.0


class LinkError(Exception):
    """There can be no such link here; the message is one line with the cure."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What a link does to the packets of each direction.

    Attributes:
        delay: of every packet, in seconds.
        rate: bytes per second; None where nothing waits for others.
        loss: share of the packets that are dropped; 1 cuts the link.
    """

    delay: float = 0.0
    rate: float | None = None
    loss: float = 0.0


class Line:
    """One direction of a link.

    Args:
        rng: chooses what is lost.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._free_at = 0.0

    def arrival(self, size: int, quality: Quality, now: float) -> float | None:
        """When a packet of ``size`` bytes that is sent now arrives; None where it is dropped."""
        if self._rng.random() < quality.loss:
            return None
        sent = now
        if quality.rate is not None:
            start = max(now, self._free_at)
            if start - now > QUEUE_SECONDS:
                return None
            sent = self._free_at = start + size / quality.rate
        return sent + quality.delay


class SlowLink:
    """A network namespace, and the one link to it, perfect at first.

    Attributes:
        quality: of the link; may be set at any time.
    """

    def __init__(self) -> None:
        self.quality = Quality()
        self._ends = ExitStack()
        self._ended = threading.Event()
        self._namespace = 0

    def __enter__(self) -> SlowLink:
        if os.geteuid() != 0:
            raise LinkError("a slow link needs root, which may make network namespaces: run as root")
        with ExitStack() as ends:
            # It ends with its input: with this process, whatever ends that.
            holder = subprocess.Popen(
                ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
            )
            ends.callback(holder.wait)
            assert holder.stdin is not None
            ends.callback(holder.stdin.close)
            self._namespace = holder.pid
            self._wait_for_namespace(holder)
            try:
                here, there = _tun(f"kvh{os.getpid()}", ends), _tun(f"kvt{os.getpid()}", ends)
            except OSError as error:
                raise LinkError(f"a slow link needs /dev/net/tun: {error}") from None
            _ip("link", "set", f"kvt{os.getpid()}", "netns", str(holder.pid))
            _join((), f"kvh{os.getpid()}", HERE, THERE)
            _join(self.inside([]), f"kvt{os.getpid()}", THERE, HERE)
            thread = threading.Thread(target=self._carry, args=(here, there), daemon=True)
            ends.callback(thread.join)
            ends.callback(self._ended.set)
            thread.start()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` at the far end."""
        return ["nsenter", "--target", str(self._namespace), "--net", *command]

    def _wait_for_namespace(self, holder: subprocess.Popen[bytes]) -> None:
        ours = Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + _START_SECONDS
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == ours:
            if holder.poll() is not None or time.monotonic() > deadline:
                assert holder.stderr is not None
                said = holder.stderr.read().decode(errors="replace").strip()
                raise LinkError(f"a slow link needs a network namespace, and there is none to be had: {said}")
            time.sleep(0.01)

    def _carry(self, here: int, there: int) -> None:
        rng = random.Random(1)
        lines = {here: (Line(rng), there), there: (Line(rng), here)}
        under_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not self._ended.is_set():
            wait = under_way[0][0] - time.monotonic() if under_way else _LOOK_SECONDS
            for end in select.select(list(lines), [], [], min(max(wait, 0.0), _LOOK_SECONDS))[0]:
                packet = os.read(end, 1 << 16)
                line, to = lines[end]
                arrival = line.arrival(len(packet), self.quality, time.monotonic())
                if arrival is not None:
                    heapq.heappush(under_way, (arrival, next(numbers), to, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(under_way)
                os.write(to, packet)


def _tun(name: str, ends: ExitStack) -> int:
    """A TUN device, which ends with its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    ends.callback(os.close, device)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _join(where: Sequence[str], device: str, own: str, peer: str) -> None:
    """Brings one end up."""
    _ip("address", "add", own, "peer", peer, "dev", device, where=where)
    _ip("link", "set", device, "mtu", str(MTU), "up", where=where)
    _ip("link", "set", "lo", "up", where=where)


def _ip(*words: str, where: Sequence[str] = ()) -> None:
    try:
        subprocess.run([*where, "ip", *words], check=True, capture_output=True, text=True)
    except FileNotFoundError as missing:
        raise LinkError(f"a slow link needs {missing.filename}: install iproute2 and util-linux") from None
    except subprocess.CalledProcessError as failed:
        raise LinkError(f"a slow link cannot be made: {failed.stderr.strip()}") from None

"""A router's end of KV events: sockets that schedulers publish to, and what is read there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import zmq
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, KVEventBatch

from sgl_importance.tiers import Tier

from support.kv_event_mirror import EventMirror, Prefix
from support.servers import ServerProcess, free_port


class Subscriber:
    """What one scheduler publishes, read with sglang's own structs.

    Attributes:
        runs: events in order, from one clearing of the cache to the next.
        ranks: data-parallel ranks that the batches name.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(type=KVEventBatch).decode
        self._last: int | None = None
        self.runs: list[list[Any]] = [[]]
        self.ranks: set[int | None] = set()

    def receive(self) -> None:
        """Takes what has come; a batch that is missing is an AssertionError."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            assert self._last in (None, sequence - 1)
            self._last = sequence
            batch = self._decode(payload)
            self.ranks.add(batch.attn_dp_rank)
            for event in batch.events:
                if isinstance(event, AllBlocksCleared):
                    self.runs.append([])
                else:
                    self.runs[-1].append(event)

    def mirror(self) -> EventMirror:
        """Of what was said since the last clearing."""
        mirror = EventMirror()
        mirror.take(self.runs[-1])
        return mirror


@contextmanager
def subscriber() -> Iterator[tuple[Subscriber, str]]:
    """The subscriber, and what a server must be told to publish to it."""
    with TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.SUB) as socket:
        # Of an endpoint of this kind the server is the one that binds.
        endpoint = f"ipc://{folder}/events"
        socket.connect(endpoint)
        socket.subscribe(b"")
        yield Subscriber(socket), json.dumps({"publisher": "zmq", "endpoint": endpoint})


@contextmanager
def subscribers(replicas: int) -> Iterator[tuple[list[Subscriber], str]]:
    """One for each replica, by rank, which publishes to the port of the endpoint plus its rank.

    A socket that is bound tells who connects what it wants when it is next read: call ``receive`` once the
    server is ready, or the first batches are lost.
    """
    with zmq.Context() as context, ExitStack() as opened:
        sockets = [opened.enter_context(context.socket(zmq.SUB)) for _ in range(replicas)]
        first = _bind_in_a_row(sockets)
        for socket in sockets:
            socket.subscribe(b"")
        config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{first}"}
        yield [Subscriber(socket) for socket in sockets], json.dumps(config)


def _bind_in_a_row(sockets: list[zmq.Socket[bytes]]) -> int:
    """Binds them to ports that follow each other; the first of these."""
    for _ in range(100):
        first = free_port()
        bound = []
        with contextlib.suppress(zmq.ZMQError):
            for rank, socket in enumerate(sockets):
                endpoint = f"tcp://127.0.0.1:{first + rank}"
                socket.bind(endpoint)
                bound.append((socket, endpoint))
            return first
        for socket, endpoint in bound:
            socket.unbind(endpoint)
    raise RuntimeError(f"no {len(sockets)} free ports in a row")


def pages_of(server: ServerProcess, page_size: int, **replica: int) -> dict[Tier, set[Prefix]]:
    """What the server itself says of its tree.

    Args:
        replica: ``dp_rank``, of a server with several.
    """
    held: dict[Tier, set[Prefix]] = {Tier.DEVICE: set(), Tier.HOST: set()}
    for node in server.get("/kv_importance", limit=1000, **replica)["nodes"]:
        whole = tuple(server.get(f"/kv_importance/node/{node['id']}/prompt", **replica)["input_ids"])
        ends = range(len(whole) - node["tokens"] + page_size, len(whole) + 1, page_size)
        for tier in held:
            if tier.value in node["tiers"]:
                held[tier].update(whole[:end] for end in ends)
    return held

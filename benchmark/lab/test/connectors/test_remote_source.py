"""A source in another process answers from what it fetched, and never from the network."""

from __future__ import annotations

import json
from dataclasses import asdict

import httpx
import pytest

from sgl_importance.cli.server_client import Server, ServerError
from sgl_importance.interface import Importance, ImportanceSource
from sgl_importance_lab.connectors.remote_source import BATCH_KEYS, RemoteSource

PAGE = Importance(0.25, 0.5, 0.2, 0.4, queries=3, weight=2.5)


class FakeServer:
    """Knows the keys that it is given."""

    def __init__(self, *known: bytes, version: int = 1) -> None:
        self.known, self.version = set(known), version
        self.batches: list[int] = []

    def source(self, **kwargs: int) -> RemoteSource:
        return RemoteSource(Server("http://server", transport=httpx.MockTransport(self._answer)), **kwargs)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        keys = json.loads(request.content)["keys"]
        self.batches.append(len(keys))
        answers = [
            {**asdict(PAGE), "later_field": 1} if bytes.fromhex(key) in self.known else None for key in keys
        ]
        return httpx.Response(200, json={"version": self.version, "page_size": 16, "importance": answers})


def key(serial: int) -> bytes:
    return serial.to_bytes(16, "big")


def test_a_page_is_known_after_the_refresh_that_follows_its_first_look_up():
    server = FakeServer(key(1))
    source = server.source()
    assert isinstance(source, ImportanceSource)
    assert source.get_importance(key(1)) is None
    assert source.get_importance(key(2)) is None
    assert source.get_importance(b"no digest") is None
    assert server.batches == []
    assert source.refresh() == 1
    assert (source.get_importance(key(1)), source.get_importance(key(2))) == (PAGE, None)
    server.known.clear()
    source.refresh()
    assert source.get_importance(key(1)) is None


def test_many_keys_go_in_batches_and_few_are_remembered():
    server = FakeServer()
    source = server.source(max_pages=BATCH_KEYS + 5)
    for serial in range(BATCH_KEYS + 100):
        source.get_importance(key(serial))
    source.refresh()
    assert server.batches == [BATCH_KEYS, 5]


def test_another_version_is_refused_and_changes_nothing():
    server = FakeServer(key(1))
    source = server.source()
    source.get_importance(key(1))
    source.refresh()
    server.version = 2
    with pytest.raises(ServerError, match="speaks version 2 of the specification, not 1"):
        source.refresh()
    assert source.get_importance(key(1)) == PAGE


def test_a_server_of_several_ranks_is_refused_for_that() -> None:
    answer = {"dp_ranks": [{"version": 1, "page_size": 16, "importance": [None]}] * 2}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    source = RemoteSource(Server("http://server", transport=transport))
    source.get_importance(key(1))
    with pytest.raises(ServerError, match="http://server has several data-parallel ranks"):
        source.refresh()

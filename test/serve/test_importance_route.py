"""POST /kv_importance/importance of a real server."""

from __future__ import annotations

import httpx
import pytest

from sgl_importance.cli.server_client import Server
from sgl_importance.interface import SignalKind
from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance_lab.connectors.remote_source import RemoteSource
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.servers import ServerProcess

pytestmark = pytest.mark.server

API_KEY = "test-key"
PAGE = 16
FIELDS = {"body_mass", "peak", "cross_body_mass", "cross_peak", "queries", "weight", "kind"}


def ask(server: ServerProcess, keys: list[str]) -> list[dict | None]:
    answer = server.post("/kv_importance/importance", {"keys": keys})
    assert (answer["version"], answer["page_size"]) == (1, PAGE)
    return answer["importance"]


def test_another_process_asks_about_pages_by_digests_it_made_itself(server: ServerProcess):
    document = make_document(400, 310)
    prompts = [encode(document.messages(name)) for name in list(document.records)[:3]]
    keys = [digest.hex() for digest in chain_digests(root_digest(None, None), prompts[0], PAGE)]
    assert ask(server, keys) == [None] * len(keys)
    for prompt in prompts:
        server.generate(prompt, max_new_tokens=4)
    known = ask(server, keys)
    assert all(page is not None and set(page) == FIELDS for page in known)
    assert {page["kind"] for page in known} == {"exact"}
    assert known[1]["queries"] == 2
    assert known[1]["weight"] > 1
    assert sum(page["body_mass"] for page in known) == pytest.approx(1, abs=0.3)
    salted = chain_digests(root_digest(None, "other"), prompts[0], PAGE)
    assert ask(server, [salted[0].hex(), keys[0].upper()]) == [None, known[0]]


def test_a_remote_source_brings_what_the_server_knows(server: ServerProcess):
    document = make_document(400, 311)
    prompts = [encode(document.messages(name)) for name in list(document.records)[:2]]
    for prompt in prompts:
        server.generate(prompt, max_new_tokens=4)
    keys = chain_digests(root_digest(None, None), prompts[0], PAGE)
    with Server(server.base_url, API_KEY) as client:
        source = RemoteSource(client)
        assert [source.get_importance(key) for key in keys] == [None] * len(keys)
        assert source.refresh() == len(keys)
    known = source.get_importance(keys[1])
    assert known is not None
    assert (known.queries, known.kind) == (1, SignalKind.EXACT)
    assert known.cross_body_mass > 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "keys: Field required"),
        ({"keys": ["00"]}, "keys.0"),
        ({"keys": ["00" * 16], "page": 1}, "page: Extra inputs"),
        ({"keys": ["00" * 16] * 4097}, "at most 4096"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(server: ServerProcess, body: dict, says: str):
    with pytest.raises(httpx.HTTPStatusError) as refused:
        server.post("/kv_importance/importance", body)
    assert refused.value.response.status_code == 400
    assert says in refused.value.response.text

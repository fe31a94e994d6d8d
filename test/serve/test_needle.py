"""Through HTTP: the node that holds the answer is the one that attention makes important."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sgl_importance_lab.probe.tasks import ProbeDocument, make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.servers import ServerProcess

pytestmark = pytest.mark.server

PAGE_SIZE = 16
SEGMENT = 6 * PAGE_SIZE
DOCUMENT_TOKENS = 600


def grow_tree(server: ServerProcess, prompt: list[int]) -> int:
    """Asks for ever longer prefixes, so that the document lies on the tree as nodes of one segment each."""
    cuts = range(SEGMENT, len(prompt), SEGMENT)
    for cut in cuts:
        server.generate(prompt[: cut + 1], max_new_tokens=1)
    return len(cuts)


def ask(server: ServerProcess, document: ProbeDocument, name: str) -> list[dict[str, Any]]:
    """Asks for one record; the nodes of the request, root side first."""
    prompt = encode(document.messages(name))
    reply = server.generate(prompt, max_new_tokens=1)
    assert reply["text"].strip() == document.records[name]
    nodes = {node["id"]: node for node in server.get("/kv_importance", limit=1000)["nodes"]}
    # The request's leaf is the node that was used last and reaches deepest.
    leaf = max(nodes.values(), key=lambda node: (-node["age"], node["depth_tokens"] + node["tokens"]))
    path = [leaf]
    while path[-1]["parent"] is not None:
        path.append(nodes[path[-1]["parent"]])
    path.reverse()
    assert sum(node["tokens"] for node in path) == math.floor(len(prompt) / PAGE_SIZE) * PAGE_SIZE
    return path


def segment_of(document: ProbeDocument, name: str) -> int:
    """Which node of ``grow_tree`` holds the whole record; -1 where a boundary cuts it."""
    span = document.token_span(name)
    # Everything before the document is the same in every prompt.
    start = len(encode(document.messages(name))) - len(encode(document.messages(name)[1:])) + 1
    first, last = start + span.start, start + span.end - 1
    return first // SEGMENT if first // SEGMENT == last // SEGMENT else -1


@pytest.mark.parametrize("seed", range(3))
def test_the_node_that_holds_the_needle_ranks_first_and_another_question_moves_it(
    server: ServerProcess, seed: int
):
    document = make_document(DOCUMENT_TOKENS, seed)
    names = list(document.records)
    segments = grow_tree(server, encode(document.messages(names[0])))
    # Neither first nor last of the request.
    inner = [name for name in names if 1 <= segment_of(document, name) <= segments - 2]
    asked = {segment_of(document, name): name for name in inner}
    assert len(asked) >= 2
    ranked = []
    for segment, name in list(asked.items())[:3]:
        path = ask(server, document, name)
        assert 0 < segment < len(path) - 1
        by_mass = max(range(len(path)), key=lambda i: path[i]["body_mass"])
        by_peak = max(range(len(path)), key=lambda i: path[i]["peak"])
        assert segment in (by_mass, by_peak)
        ranked.append(segment)
    assert len(set(ranked)) == len(ranked)

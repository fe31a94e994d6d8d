"""The page of a document that an answer was read from is lit, and most are dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.metrics_table import PREFIX
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document
from sgl_importance_lab.probe.tokenizer import encode

from support.browser import NoBrowser, open_browser
from support.config_file import config_flags
from support.live_page import TREEITEM, choose
from support.nightly_cases import rest_nightly
from support.served import script_server
from support.servers import ServerProcess

pytestmark = pytest.mark.server

PAGE_SIZE = 16
FORCED = 4  # pages at either end of a context that every query reads
FLAGS = (
    *(
        "--kv-policy",
        "importance",
        "--kv-residency",
        "tiered",
        *config_flags(signal={"layers": [1]}),
    ),
    *("--kv-sparse-selector", "bits", "--kv-sparse-budget", "0.05", "--kv-sparse-prompt-tokens", "16"),
    *("--max-total-tokens", "16384", "--max-running-requests", "2", "--kv-device-tokens", "0.2"),
    *("--chunked-prefill-size", "4096"),  # sglang's own hangs on free memory; a chunk is a node
)


@pytest.fixture(scope="module")
def server(probe_model: Path) -> Iterator[ServerProcess]:
    with script_server(*FLAGS, model=probe_model) as process:
        yield process


def ask(server: ServerProcess, document: ProbeDocument, name: str) -> tuple[dict[str, Any], set[int]]:
    """Asks for a record; the node of the document, and the pages of it that hold the record."""
    prompt = encode(document.messages(name))
    assert server.generate(prompt, max_new_tokens=1)["text"].strip() == document.records[name]
    rows = server.get("/kv_importance", limit=1000)["nodes"]
    longest = max((row for row in rows if row["age"] == 0), key=lambda row: row["tokens"])
    span = document.token_span(name)
    start = len(prompt) - len(encode(document.messages(name)[1:])) + 1 - longest["depth_tokens"]
    record = range(start + span.start, start + span.end)
    return server.get(f"/kv_importance/node/{longest['id']}"), {at // PAGE_SIZE for at in record}


@pytest.mark.parametrize("seed", rest_nightly(range(4)))
def test_the_page_of_the_answer_is_lit_and_most_are_dark(server: ServerProcess, seed: int) -> None:
    document = make_document(2400, seed)
    node, holds_record = ask(server, document, list(document.records)[20 + seed])
    chosen = node["strip"]["chosen"]
    assert node["strip"]["pages_per_cell"] == 1
    assert len(chosen) == node["pages"]
    inner = range(FORCED, len(chosen) - FORCED)
    lit = {page for page in inner if chosen[page] > 0}
    assert holds_record & lit, [chosen[page] for page in holds_record]
    assert len(lit) < len(inner) / 3, len(lit)
    assert all(node["strip"]["resident"][page] > 0 for page in holds_record)
    assert min(node["strip"]["resident"]) == 0, "every page has a slot: nothing is seen of residency"


def test_the_tree_is_told_by_those_who_read_everything(server: ServerProcess) -> None:
    document = make_document(2400, 11)
    choosing, *_, name = document.records
    node, _ = ask(server, document, choosing)
    assert not any(node["strip"]["cross_mass"])
    exact = {"input_ids": encode(document.messages(name)), "kv_hints": {"selector": "all"}}
    server.post("/generate", {**exact, "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
    told = server.get(f"/kv_importance/node/{node['id']}")["strip"]["cross_mass"]
    assert len(told) == len(node["strip"]["chosen"])
    assert sum(told) > 0.5
    start = len(encode(document.messages(name))) - len(encode(document.messages(name)[1:])) + 1
    record = (start + document.token_span(name).start - node["depth_tokens"]) // PAGE_SIZE
    around = range(record, record + 2)
    assert max(told[page] for page in around) > 10 * sum(told) / len(told)


def test_what_is_on_the_device_is_exported(server: ServerProcess) -> None:
    ask(server, document := make_document(2400, 9), next(iter(document.records)))
    pages = server.get("/kv_importance?limit=1")["pages"]
    places = pages["layers"] * pages["device_tokens_per_layer"] // PAGE_SIZE
    assert 0 < server.metric(f"{PREFIX}pages_resident") <= places


def test_the_live_page_shows_it(server: ServerProcess) -> None:
    document = make_document(2400, seed=7)
    node, _ = ask(server, document, list(document.records)[33])
    try:
        with open_browser() as browser:
            page = browser.new_page()
            page.goto(f"{server.base_url}/kv_importance/ui")
            page.wait_for_selector(TREEITEM)
            choose(page, node["id"])
            assert "where steps read of late" in page.locator("#node .strip-name").inner_text()
            absent = page.locator("#node .cell.absent").count()
            assert absent == sum(share < 0.5 for share in node["strip"]["resident"])
            assert "of the layers" in page.locator("#node .page-facts").inner_text()
    except NoBrowser as missing:
        pytest.skip(str(missing))

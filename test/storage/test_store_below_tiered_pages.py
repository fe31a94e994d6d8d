"""A store below tiered pages, which have no host tier: what goes to storage and comes from it is followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sgl_importance.metrics_table import PREFIX
from sgl_importance.nodes.ages import PLACES
from sgl_importance.storage.budget import scan

from support.config_file import config_flags
from support.prewarms import PATH, ended
from support.servers import ServerProcess
from support.store_bench import PAGE_TOKENS, count
from support.tiered import tiered_server
from support.waiting import wait_until
from support.workloads.exchanges import POOL_TOKENS, VOCABULARY

pytestmark = pytest.mark.server

STORED = 15 * PAGE_TOKENS
"""Tokens of a prompt that fill pages; it is prefilled at once, and becomes one node."""
LEFT = 100
"""Tokens of the device, too few for a prompt, that the one which takes the others' room leaves."""


class Served:
    """A server with a store below tiered pages, and what it says."""

    def __init__(self, server: ServerProcess, store: Path) -> None:
        self.server = server
        self.store = store
        self._prompts = 0

    def fresh(self, tokens: int = STORED + 5) -> list[int]:
        self._prompts += 1
        return Random(self._prompts).choices(VOCABULARY, k=tokens)

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        """The account of a request, as the operator is told."""
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        rid = self.server.post("/generate", body)["meta_info"]["id"]
        (told,) = self.server.get("/kv_importance/why", rid=rid)["requests"]
        return told

    def store_prompt(self) -> list[int]:
        """A prompt that storage has, and the device still."""
        tokens, pages = self.fresh(), count(self.server, "written_pages")
        self.ask(tokens)
        wait_until(lambda: count(self.server, "written_pages") >= pages + STORED // PAGE_TOKENS)
        return tokens

    def evict(self) -> None:
        """Gives the device's room to another prompt."""
        self.ask(self.fresh(POOL_TOKENS - LEFT))

    def node(self, tokens: list[int]) -> dict[str, Any]:
        """The one node that holds a prompt's pages."""
        (node,) = self.server.post("/kv_importance/find", {"input_ids": tokens})["path"]
        return self.server.get(f"/kv_importance/node/{node['id']}")

    def events(self, node: dict[str, Any]) -> list[tuple[str, str, str]]:
        events = self.server.get("/kv_importance/events", limit=4096)["events"]
        return [(e["kind"], e["tier"], e["reason"]) for e in events if e["node"] == node["id"]]

    def held(self) -> Counter[str]:
        """Tokens that each tier holds."""
        tiers = self.server.get("/kv_importance", limit=1)["tiers"]
        return Counter({name: tier["used_tokens"] for name, tier in tiers.items()})

    def counts(self) -> Counter[str]:
        """Tokens so far: those that moved, and those that were asked for again, by where they were."""
        self.ask(self.fresh(5))  # counts are published with requests; this one fills no page
        series = {
            "written": ("written_tokens_total", {"tier": "storage"}),
            "demoted": ("demoted_tokens_total", {"tier": "device"}),
            "loaded": ("loaded_back_tokens_total", {}),
            "prewarmed": ("prewarmed_hit_tokens_total", {}),
            **{place: ("return_age_seconds_count", {"place": place}) for place in PLACES},
        }
        return Counter({name: round(self._count(*each)) for name, each in series.items()})

    def _count(self, name: str, labels: dict[str, str]) -> float:
        try:
            return self.server.metric(PREFIX + name, **labels)
        except KeyError:
            return 0.0


@pytest.fixture(scope="module")
def served(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("store")
    flags = (
        *("--kv-importance-store", str(store), "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
        *config_flags(store={"fetch_timeout_ms": 4000}),
    )
    with tiered_server(models[0], *flags) as server:
        yield Served(server, store)


def test_what_is_written_is_counted_and_known(served: Served) -> None:
    counted, held = served.counts()["written"], served.held()
    tokens = served.store_prompt()
    wait_until(lambda: served.counts()["written"] == counted + STORED)
    assert served.held() - held == {"device": STORED, "storage": STORED}
    node = served.node(tokens)
    assert node["tiers"] == ["device", "storage"]
    assert served.events(node) == [("insert", "device", "computed"), ("back_up", "storage", "write_policy")]


def test_a_hit_in_storage_is_one(served: Served) -> None:
    tokens = served.store_prompt()
    before = served.counts()
    served.evict()
    evicted = served.counts()
    assert (evicted - before)["demoted"] >= STORED
    told = served.ask(tokens)
    assert told["found_tokens"] == {"device": 0, "host": 0, "storage": STORED}
    assert told["missed_tokens"] == {"short": 5}
    moved = served.counts() - evicted
    assert (moved["loaded"], moved["storage"], moved["none"]) == (STORED, STORED, 0)
    node = served.node(tokens)
    assert node["tiers"] == ["device", "storage"]
    assert served.events(node) == [("load_back", "device", "prefetched")]


def test_a_prewarm_from_storage_is_no_visit(served: Served) -> None:
    tokens = served.store_prompt()
    served.evict()
    before, clock = served.counts(), served.server.get("/kv_importance", limit=1)["clock"]
    job = ended(served.server, served.server.post(PATH, {"input_ids": tokens})["job_id"])
    assert job["hit_tokens"]["storage"] == STORED
    assert served.server.get("/kv_importance", limit=1)["clock"] == clock
    node = served.node(tokens)
    assert served.events(node) == [("load_back", "device", "prefetched")]
    assert node["accesses"] == 0
    moved = served.counts() - before
    assert [moved[place] for place in PLACES] == [0] * len(PLACES)
    assert served.ask(tokens)["found_tokens"]["device"] == STORED
    assert (served.counts() - before)["prewarmed"] == STORED


def test_what_storage_has_lost_was_missed_there(served: Served) -> None:
    tokens = served.store_prompt()
    served.evict()
    for file in scan(served.store / "pages"):
        file.path.unlink()
    assert served.ask(tokens)["missed_tokens"] == {"storage": STORED, "short": 5}


def test_what_is_computed_again_is_stored_still(served: Served) -> None:
    """sglang does not write it again. A prompt of one page is not looked for in storage."""
    page = served.store_prompt()[:PAGE_TOKENS]
    served.evict()
    assert served.ask(page)["missed_tokens"] == {"short": PAGE_TOKENS}
    node = served.node(page)
    assert node["tiers"] == ["device", "storage"]
    assert served.events(node) == [("insert", "device", "computed")]

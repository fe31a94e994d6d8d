"""A cache that was stopped and started again on its ledger knows what one that was never stopped knows."""

from __future__ import annotations

import random
import threading
from array import array
from pathlib import Path

import numpy as np
import pytest

from sgl_importance.metrics_table import FaultPlace
from sgl_importance.placement.ledger import ledger_writer
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import LedgerDamaged
from sgl_importance.placement.ledger.ledger_writer import Visit
from sgl_importance.placement.pins.pin import Pin
from sglang_importance.launch.finding import Status
from sglang_importance.launch.server_findings import server_findings
from sglang_importance.operations.job import run_slice
from sglang_importance.operations.snapshot import describe_tree
from sglang_importance.placement.ledger_feed import describe_ledger, model_digest, open_ledger_feed
from sglang_importance.storage.weights import WATCH, Weights

from support.drivers.ledgered_tree import POOL, WEIGHTS, prewarm, prewarm_from_ledger, serve, start
from support.drivers.tree_driver import PAGE, Request, TreeDriver
from support.waiting import HANG_SECONDS, wait_until
from support.workloads.ledger_rows import open_ledger

pytestmark = pytest.mark.usefixtures("weights")


def traffic(seed: int, requests: int) -> list[list[int]]:
    """Prompts that share prefixes, go on and come back."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(requests):
        base = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        kept = base[: rng.randint(0, len(base))]
        prompts.append(kept + [rng.randrange(50) for _ in range(rng.randint(1, 24))])
    return prompts


def reuse_of(driver: TreeDriver):
    return driver.component.state.policy.reuse


def test_watches_counts_and_clock_go_on(tmp_path: Path):
    driver = start(tmp_path / "l.sqlite")
    for prompt in traffic(1, 100):
        serve(driver, prompt)
    before = reuse_of(driver)
    driver.component.ledger.close()
    again = reuse_of(start(tmp_path / "l.sqlite"))
    assert again.clock == before.clock == 100
    np.testing.assert_allclose(again.counts(), before.counts())
    assert again.open_intervals() == before.open_intervals()
    assert sum(again.open_intervals().values()) > 50


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "pre-warmed"])
def test_requests_after_a_restart_teach_what_they_would_have_taught(tmp_path: Path, warm: bool):
    """The pre-warm itself must teach nothing, and take nothing from what the requests teach."""
    prompts = traffic(2, 64)
    driver = start(tmp_path / "l.sqlite")
    for prompt in prompts[:32]:
        serve(driver, prompt)
    driver.component.ledger.close()
    driver.component.requests.ledger = driver.component.pins.keeper = None

    restarted = start(tmp_path / "l.sqlite")
    if warm:
        assert prewarm_from_ledger(restarted) == len(list(driver.all_nodes()))
        assert reuse_of(restarted).clock == 32
        assert restarted.component.state.counters.requests == 0
        np.testing.assert_allclose(reuse_of(restarted).counts(), reuse_of(driver).counts())
        assert reuse_of(restarted).open_intervals() == reuse_of(driver).open_intervals()
        assert len(restarted.component.state.tree.ghosts) == 0
    for prompt in prompts[32:48]:
        serve(driver, prompt)
        serve(restarted, prompt)
    hits, expected = reuse_of(restarted).counts()[0], reuse_of(driver).counts()[0]
    assert expected.sum() > 10
    if warm:
        # Classes differ where a transition rests on what only the old tree knew: where requests had ended.
        np.testing.assert_allclose(hits.sum(axis=0), expected.sum(axis=0))
    else:
        assert hits.sum() > 10


def test_rows_are_the_nodes_of_the_tree(tmp_path: Path):
    """Also of a node that was cut and whose second part nobody has asked for since."""
    driver = start(tmp_path / "l.sqlite")
    serve(driver, [5] * 32 + [1] * 32)
    serve(driver, [5] * 32 + [2] * 32)
    driver.component.ledger.close()
    tree = driver.component.state.tree
    nodes = {(tree.end_digest(n), tree.start_digest(n), len(n.key)) for n in driver.all_nodes()}
    ledger = open_ledger(tmp_path / "l.sqlite", model_digest(WEIGHTS, PAGE))
    assert {(row.digest, row.parent, row.tokens) for row in ledger.prefixes()} == nodes
    assert len(nodes) == 3
    ledger.close()


def test_the_parts_of_a_node_that_comes_back_in_parts_are_watched_like_one_that_was_cut(tmp_path: Path):
    driver = start(tmp_path / "l.sqlite")
    prompt = list(range(40))
    serve(driver, prompt)
    driver.component.ledger.close()
    restarted = start(tmp_path / "l.sqlite")
    watched = sum(reuse_of(restarted).open_intervals().values())
    prewarm(restarted, [*prompt[:16], 0])
    prewarm(restarted, [*prompt[:40], 0])
    parts = [restarted.component.state.tree.metadata(node) for node in restarted.all_nodes()]
    assert sorted(part.tokens for part in parts) == [16, 24]
    assert sum(reuse_of(restarted).open_intervals().values()) == watched + 1
    assert {part.at_risk_as for part in parts} == {0}
    assert {part.last_access for part in parts} == {1}
    restarted.component.ledger.close()


def test_scores_accesses_and_block_types_come_back_with_the_pages(tmp_path: Path):
    driver = start(tmp_path / "l.sqlite")
    for prompt in traffic(3, 40):
        serve(driver, prompt)
    shared = [5] * 40
    for tail in ([1] * 8, [2] * 8, [3] * 8):
        serve(driver, shared + tail)
    driver.component.ledger.close()
    restarted = start(tmp_path / "l.sqlite")
    prewarm_from_ledger(restarted)

    def node_of(each: TreeDriver):
        request = each.admit([*shared, 9])
        node = each.core.node_by_id(request.last_node)
        each.abort(request)
        return each.component.state.tree.metadata(node)

    before, after = node_of(driver), node_of(restarted)
    assert before.accesses == after.accesses == 2
    assert before.block_type is after.block_type
    assert before.importance.queries == after.importance.queries > 0
    np.testing.assert_allclose(
        before.importance.page_vectors(), after.importance.page_vectors(), rtol=1e-6, atol=1e-12
    )


def test_a_prewarmed_page_that_nobody_asks_for_counts_for_nothing(tmp_path: Path):
    driver = start(tmp_path / "l.sqlite")
    prewarm(driver, list(range(33)))
    assert reuse_of(driver).clock == 0
    assert not reuse_of(driver).open_intervals()
    assert driver.component.state.counters.requests == 0
    driver.evict(10**6)
    assert not reuse_of(driver).open_intervals()
    driver.cache.sanity_check()
    driver.component.ledger.close()
    ledger = open_ledger(tmp_path / "l.sqlite", model_digest(WEIGHTS, PAGE))
    assert len(ledger) == 0
    ledger.close()


def test_evicted_prefixes_are_known_again_after_a_restart(tmp_path: Path):
    driver = start(tmp_path / "l.sqlite", tokens=256)
    prompts = traffic(4, 60)
    for prompt in prompts:
        serve(driver, prompt)
    driver.component.ledger.close()
    restarted = start(tmp_path / "l.sqlite", tokens=256)
    assert len(restarted.component.state.tree.ghosts) > 256 // PAGE
    for prompt in prompts:
        serve(restarted, prompt)
    restarted.cache.sanity_check()
    restarted.component.ledger.close()


def test_nothing_is_written_while_other_weights_are_in_memory(tmp_path: Path, monkeypatch):
    driver = start(tmp_path / "l.sqlite")
    for current in (
        None,
        Weights("other", "v", "config", True),
        Weights("fingerprint", "v", "config", False),
    ):
        monkeypatch.setattr(WATCH, "current", current)
        serve(driver, list(range(30)))
    driver.component.ledger.close()
    ledger = open_ledger(tmp_path / "l.sqlite", model_digest(WEIGHTS, PAGE))
    assert len(ledger) == 0
    ledger.close()


def test_no_pin_survives_while_other_weights_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that ends meanwhile leaves the ledger all the same."""
    monkeypatch.setattr(ledger_writer, "BATCH_SECONDS", 0.0)
    monkeypatch.setattr(ledger_writer, "ANSWER_SECONDS", HANG_SECONDS)
    feed = start(tmp_path / "l.sqlite").component.ledger
    ended, kept, new = (Pin(name, array("q", range(4 * PAGE))) for name in ("ended", "kept", "new"))
    feed.keep_pins([ended, kept])
    wait_until(lambda: feed.surviving_pins() == {"ended", "kept"})
    monkeypatch.setattr(WATCH, "current", Weights("other", "v", "config", True))
    assert feed.surviving_pins() == frozenset()
    feed.keep_pins([kept, new])
    monkeypatch.setattr(WATCH, "current", WEIGHTS)
    wait_until(lambda: feed.surviving_pins() == {"kept"})
    feed.keep_pins([kept, new])
    wait_until(lambda: feed.surviving_pins() == {"kept", "new"})
    feed.close()


def test_cut_nodes_are_not_held_where_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither while other weights are in memory nor after learning has failed: nobody would take them."""
    driver = start(tmp_path / "l.sqlite")
    feed = driver.component.ledger
    cuts: list[object] = []
    driver.component.node_events.on_cut.append(cuts.append)

    def part(requests: int) -> None:
        """Pairs of requests that part after two pages: each pair cuts a node."""
        for request in range(requests):
            serve(driver, [1 + request // 2] * (2 * PAGE) + [1000 + request] * (2 * PAGE))

    monkeypatch.setattr(WATCH, "current", Weights("other", "v", "config", True))
    part(40)
    assert len(cuts) == 20
    assert not feed._cut
    monkeypatch.setattr(WATCH, "current", WEIGHTS)
    feed.cut(next(iter(driver.all_nodes())))
    feed.abandon()
    assert not feed._cut


def test_a_fault_does_not_wait_for_a_write_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was handed over before is written all the same."""
    driver = start(tmp_path / "l.sqlite")
    may_write, is_writing = threading.Event(), threading.Event()
    write = Ledger.write

    def slow(ledger: Ledger, *args, **kwargs) -> None:
        is_writing.set()
        assert may_write.wait(HANG_SECONDS)
        write(ledger, *args, **kwargs)

    monkeypatch.setattr(Ledger, "write", slow)
    monkeypatch.setattr(ledger_writer, "CLOSE_SECONDS", 2 * HANG_SECONDS)
    serve(driver, list(range(30)))
    assert is_writing.wait(HANG_SECONDS)
    faults = driver.component.state.faults

    def fail() -> None:
        raise ZeroDivisionError

    faults.learn(FaultPlace.LEARNING, fail)
    may_write.set()  # only now: a fault that waited for the write would have failed it
    assert not faults.is_learning
    assert not driver.component.ledger._writer.put(Visit((), 1, None, None))
    assert not driver.component.ledger.describe()["is_written"]
    driver.component.ledger._writer.close()
    ledger = open_ledger(tmp_path / "l.sqlite", model_digest(WEIGHTS, PAGE))
    assert len(ledger) == len(list(driver.all_nodes()))
    ledger.close()


def test_salts_keep_their_own_roots(tmp_path: Path):
    driver = start(tmp_path / "l.sqlite")
    for salt in (None, "a"):
        request = Request(f"salted {salt}", array("q", range(30)), cache_salt=salt)
        driver._match_and_lock(request)
        driver.prefill(request)
        driver.decode(request, [1])
        driver.finish(request)
    driver.component.ledger.close()
    ledger = open_ledger(tmp_path / "l.sqlite", model_digest(WEIGHTS, PAGE))
    rows = list(ledger.prefixes())
    assert {row.parent for row in rows if row.depth == 0} == set(ledger.namespaces())
    assert set(ledger.namespaces().values()) == {(None, None), (None, "a")}
    ledger.close()


def attach_ledger(driver: TreeDriver) -> None:
    """As a scheduler that has just been built does; its weights are known."""
    feed = open_ledger_feed(driver.component.state, driver.component.pins, scheduler=None)
    if feed is not None:
        driver.component.attach_ledger(feed)


def test_a_ledger_that_breaks_while_it_is_read_is_set_aside(tmp_path: Path, monkeypatch, caplog):
    from sgl_importance.options.importance_options import ImportanceOptions
    from sgl_importance.options.placement_options import LedgerOptions

    driver = start(tmp_path / "ledger.sqlite")
    for prompt in traffic(5, 60):
        serve(driver, prompt)
    driver.component.ledger.close()
    # As if it had broken after the checks at its opening.
    read = Ledger.prefixes

    def broken(ledger: Ledger, max_pages: int | None = None):
        monkeypatch.setattr(Ledger, "prefixes", read)
        yield next(read(ledger, max_pages))
        raise LedgerDamaged("database disk image is malformed")

    monkeypatch.setattr(Ledger, "prefixes", broken)
    driver = TreeDriver(
        tokens=POOL, options=ImportanceOptions(policy="importance", ledger=LedgerOptions(place=str(tmp_path)))
    )
    attach_ledger(driver)
    component = driver.component
    assert component.ledger is not None
    assert (component.state.policy.clock, len(component.state.tree.ghosts)) == (0, 0)
    assert "cannot be read" in caplog.text
    serve(driver, list(range(30)))
    component.ledger.close()


def test_a_directory_that_cannot_be_used_leaves_a_server_without_ledger(tmp_path: Path, caplog):
    from sgl_importance.options.importance_options import ImportanceOptions
    from sgl_importance.options.placement_options import LedgerOptions

    (tmp_path / "file").write_text("")
    options = ImportanceOptions(policy="importance", ledger=LedgerOptions(place=str(tmp_path / "file")))
    driver = TreeDriver(tokens=POOL, options=options)
    attach_ledger(driver)
    assert driver.component.ledger is None
    assert "the server goes on without" in caplog.text
    serve(driver, list(range(30)))
    job = describe_tree(driver.cache, {})
    while (document := run_slice(job)) is None:
        pass
    place = str(tmp_path / "file" / "ledger.sqlite")
    assert document["ledger"] == {"place": place, "is_written": False, "lost_visits": 1}, "and says so"
    found = {finding.subject: finding for finding in server_findings(document)}
    assert found["ledger"].status is Status.PROBLEM


def test_without_a_ledger_there_is_none_to_tell_of():
    driver = TreeDriver(tokens=POOL)
    assert describe_ledger(driver.component.ledger, driver.component.state) is None

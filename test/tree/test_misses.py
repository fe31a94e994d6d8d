"""Accounts of misses on the real tree with a host tier, held to pages that are told apart one by one."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.misses.reason import Cause, Fate, NeededBy, Reason, Room
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import MissOptions
from sglang_importance.upstream.request_record import record_of

from support.doubles.plain_memory import Page, Path, PlainMemory
from support.drivers.hosted_driver import PAGE, HostedDriver, OutOfMemory, Request, WriteMode
from support.nightly_cases import rest_nightly

WRITE_POLICIES: tuple[WriteMode, ...] = ("write_through", "write_through_selective", "write_back")
UNBOUNDED = 10**9
STEPS = (
    *("admit",) * 6,
    *("prefill",) * 8,
    *("decode",) * 3,
    *("finish",) * 5,
    *("retract", "abort", "readmit", "readmit", "evict", "evict_host", "store", "step", "flush"),
)


class AccountedTree:
    """Drives a tree, and compares each account with the pages that the tree has been seen to hold."""

    def __init__(self, write_policy: WriteMode) -> None:
        self.driver = HostedDriver(
            write_policy=write_policy,
            tokens=256,
            options=ImportanceOptions(policy="importance", misses=MissOptions(memory=1000.0)),
        )
        misses = self.driver.component.misses
        assert misses is not None
        self.misses = misses
        self.account = misses.admitted
        misses.admitted = self.judge
        self.plain = PlainMemory(PAGE, gone_pages=UNBOUNDED, max_marks=UNBOUNDED)
        self.stored: set[tuple[str, Path]] = set()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.retracted: list[Request] = []
        self.left: list[tuple[str | None, Path]] = []
        self.met: Counter[Reason] = Counter()
        self.judged = 0

    def held(self) -> set[tuple[str, Path]]:
        places = set()
        tree = self.driver.component.state.tree
        for node in tree.nodes():
            path: list[int] = []
            for part in tree.path(node):
                path.extend(part.key.token_ids)
            start = len(path) - len(node.key)
            places |= {
                (node.key.cache_salt or "", tuple(path[:end]))
                for end in range(start + PAGE, len(path) + 1, PAGE)
            }
        return places

    def look(self, lost: Reason = Reason.EVICTED) -> None:
        """Compares what the tree holds with what it held before."""
        held = self.held()
        for place, page in self.plain.pages.items():
            if place not in held and page.fate is None:
                page.fate = fate(Reason.STORAGE if place in self.stored and lost is Reason.EVICTED else lost)
                self.stored.discard(place)
        for place in sorted(held, key=lambda place: len(place[1])):
            self.plain.events += 1
            self.plain.pages.setdefault(place, Page(None, 0, "", self.plain.events)).fate = None

    def judge(self, request: Request) -> None:
        """In place of ``Misses.admitted``: what made room for the request has gone, its own is to come."""
        self.look()
        self.account(request)
        accounted = record_of(request).misses
        assert accounted is not None
        found = request.cached_tokens_device + request.cached_tokens_host
        prompt = tuple(request.origin_input_ids)
        reasons = [part.reason for part in accounted.account.parts for _ in range(part.tokens)]
        assert reasons == self.plain.reasons(request.cache_salt or "", prompt, found)
        assert found + len(reasons) == len(prompt)
        self.met.update(reasons)
        self.judged += 1

    # ---- steps ----

    def apply(self, step: str, a: int, b: int) -> None:
        getattr(self, f"_{step}")(a, b)
        self.look()
        assert self.misses.memory is not None, "the account has not failed"
        self.driver.component.check_integrity()

    def _admit(self, a: int, b: int) -> None:
        if len(self.waiting) + len(self.running) >= 4:
            return
        document = list(range(1000 * (a % 5), 1000 * (a % 5) + 10 * PAGE))
        tokens = document[: 2 + a // 5 % len(document)] + [b % 3] * (b // 3 % (4 * PAGE))
        salt = (None, "a", "b")[a * b % 3]
        if self.left and a % 3 == 0:  # goes on from what another request was asked and answered
            salt, path = self.left[b % len(self.left)]
            tokens = [*path, b % 3]
        try:
            self.waiting.append(self.driver.admit(tokens, salt))
        except OutOfMemory:
            return

    def _prefill(self, a: int, b: int) -> None:
        if not self.waiting:
            return
        request = self.waiting[a % len(self.waiting)]
        chunk = request.filled + 1 + b % (6 * PAGE)
        try:
            self.driver.prefill(request, chunk)
        except OutOfMemory:
            return
        if request.filled == len(request.origin_input_ids):
            self.waiting.remove(request)
            self.running.append(request)

    def _decode(self, a: int, b: int) -> None:
        if self.running:
            request = self.running[a % len(self.running)]
            try:
                self.driver.decode(request, [7 + b % 2] * (1 + b % PAGE))
            except OutOfMemory:
                del request.output_ids[-(1 + b % PAGE) :]

    def _finish(self, a: int, b: int) -> None:
        if self.running:
            self.driver.finish(self.running.pop(a % len(self.running)))

    def _retract(self, a: int, b: int) -> None:
        if self.running:
            request = self.running.pop(a % len(self.running))
            self._leave(request, self.driver.retract)
            self.retracted.append(request)

    def _abort(self, a: int, b: int) -> None:
        live = [request for request in self.running + self.waiting if record_of(request).query is not None]
        if live:
            request = live[a % len(live)]
            (self.running if request in self.running else self.waiting).remove(request)
            self._leave(request, self.driver.abort)

    def _leave(self, request: Request, leave) -> None:
        computed = tuple(request.get_fill_ids())
        self.left = [*self.left, (request.cache_salt, computed)][-8:]
        leave(request)
        self.look()
        salt = request.cache_salt or ""
        for prefix in self.plain.prefixes(computed):
            self.plain.events += 1
            lost = fate(Reason.NOT_KEPT)
            page = self.plain.pages.setdefault((salt, prefix), Page(lost, 0, "", self.plain.events))
            if page.fate is not None:
                page.fate = lost

    def _readmit(self, a: int, b: int) -> None:
        if self.retracted and len(self.waiting) + len(self.running) < 4:
            request = self.retracted.pop(a % len(self.retracted))
            try:
                self.driver.readmit(request)
            except OutOfMemory:
                return
            self.waiting.append(request)

    def _evict(self, a: int, b: int) -> None:
        self.driver.evict(1 + a % 64)

    def _evict_host(self, a: int, b: int) -> None:
        self.driver.evict_host(1 + a % 128)

    def _store(self, a: int, b: int) -> None:
        """A node is handed to storage, which never brings it back."""
        backed = [node for node in self.driver.all_nodes() if node.backuped]
        if not backed:
            return
        tree = self.driver.component.state.tree
        node = backed[a % len(backed)]
        self.driver.component.node_events.handed_to_storage(node)
        path: list[int] = []
        for part in tree.path(node):
            path.extend(part.key.token_ids)
        start = len(path) - len(node.key)
        self.stored |= {
            (node.key.cache_salt or "", prefix)
            for prefix in self.plain.prefixes(tuple(path))
            if len(prefix) > start
        }

    def _step(self, a: int, b: int) -> None:
        self.driver.step()

    def _flush(self, a: int, b: int) -> None:
        if b % 4 or any(record_of(request).query is None for request in self.waiting):
            return
        while self.waiting or self.running:
            self._abort(a, b)
        self.driver.settle()
        self.look()
        self.misses.need.flush_cause = Cause.WEIGHT_UPDATE if a % 2 else Cause.FLUSH
        self.driver.flush()
        self.look(Reason.FLUSHED)


def fate(reason: Reason) -> Fate:
    return Fate(reason, 0, 0.0)


steps = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 2**16), st.integers(0, 2**16)), min_size=20, max_size=80
)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@settings(max_examples=12, deadline=None)
@given(history=steps)
def test_any_history_is_accounted_for(write_policy, history):
    tree = AccountedTree(write_policy)
    for step in history:
        tree.apply(*step)


@pytest.mark.parametrize("write_policy", rest_nightly(WRITE_POLICIES))
def test_a_long_history_meets_every_reason(write_policy):
    chance = random.Random(3)
    tree = AccountedTree(write_policy)
    for _ in range(1200):
        tree.apply(chance.choice(STEPS), chance.randrange(2**16), chance.randrange(2**16))
    assert tree.judged > 50
    # Nothing is forgotten here, ``UNUSED`` needs two requests in one step, and nobody names a session.
    assert tree.met.keys() >= set(Reason) - {Reason.FORGOTTEN, Reason.UNUSED, Reason.SESSION_OVER}, tree.met


def test_an_eviction_names_tier_time_and_who_needed_the_room(make_driver):
    driver = make_driver(tokens=64)
    need = driver.component.misses.need
    first = list(range(48))
    for tokens in (first, list(range(100, 148)), first):
        request = driver.admit(tokens)
        with need.needed_by(NeededBy.PREFILL, (request, request)):
            driver.prefill(request)
        driver.finish(request)
    accounted = record_of(request).misses
    lost = next(part for part in accounted.account.parts if part.reason is Reason.EVICTED)
    assert lost.fate.tier == "device"
    assert lost.fate.room == Room(NeededBy.PREFILL, "2", 1)
    assert lost.fate.clock == 1
    assert lost.fate.reuse >= 0
    assert need.room() == Room(NeededBy.UNKNOWN)


def test_a_thread_makes_the_same_accounts_as_the_scheduler(make_driver):
    accounts, counted = [], []
    for in_background in (False, True):
        driver, chance = make_driver(tokens=64), random.Random(5)
        misses = driver.component.misses
        published = []
        misses.on_counted = partial(published.append, None)
        if in_background:
            misses.work_in_background()
        for _ in range(60):
            start = 100 * chance.randrange(4)
            request = driver.admit([*range(start, start + chance.randrange(2, 30)), chance.randrange(3)])
            driver.prefill(request)
            driver.decode(request, [7])
            (driver.abort if chance.random() < 0.2 else driver.finish)(request)
        driver.component.check_integrity()  # which waits for the thread
        assert misses.memory is not None, "the account has not failed"
        assert published
        accounts.append(
            [(each.visit.rid, each.account.missed(), each.account.found) for each in misses.recent]
        )
        counted.append(dict(driver.component.state.counters.missed_tokens))
    assert accounts[0] == accounts[1]
    assert counted[0] == counted[1]
    assert {Reason.EVICTED, Reason.PARTED} <= {why for why, tokens in counted[0].items() if tokens}


def test_a_fault_ends_the_accounts_and_nothing_else(make_driver):
    driver = make_driver(tokens=64)
    misses = driver.component.misses
    misses.now = None
    request = driver.admit(list(range(16)))
    driver.prefill(request)
    driver.finish(request)
    driver.component.check_integrity()
    assert misses.memory is None
    assert driver.component.state.faults.is_learning
    assert driver.component.state.faults.counts["misses"] == 1


def test_no_account_is_kept_where_it_is_off(make_driver):
    driver = make_driver(options=ImportanceOptions(policy="importance", misses=MissOptions(memory=0.0)))
    assert driver.component.misses is None
    request = driver.admit(list(range(16)))
    driver.prefill(request)
    driver.finish(request)
    assert record_of(request).misses is None

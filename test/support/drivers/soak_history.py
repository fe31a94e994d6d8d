"""A long mixed history on the real cache with its host tier, books compared all along."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import SignalOptions
from sgl_importance.policy.cost_model import CostModel
from sgl_importance_lab.offline.standalone_cache import CacheKind
from sglang_importance.observe.recorder import Recorder

from support.drivers.books import check_books, check_recording, object_counts
from support.drivers.hosted_driver import PAGE, HostedDriver, OutOfMemory, Request, WriteMode
from support.drivers.soak_placement import Placement
from support.workloads.traffic import Chat, Traffic

MAX_LIVE = 6
MAX_PROMPT = 240
MAX_OUTPUT = 40
WEIGHTS = {
    "admit": 8,
    "prefill": 12,
    "decode": 14,
    "finish": 6,
    "abort": 1,
    "retract": 1,
    "readmit": 2,
    "evict": 1,
    "evict_host": 0.3,
    "settle": 0.2,
    "flush": 0.02,
    "pin": 0.4,
    "unpin": 0.1,
    "let_time_pass": 0.3,
}
COST = CostModel(1e-5, 1e-9, 4096, 4e10, 3e9)


@dataclass
class Checkpoint:
    """What was measured between two stretches of operations, with no request alive.

    Attributes:
        rss: resident bytes of the process.
        objects: live Python objects since the start, by kind.
    """

    operations: int
    rss: int
    nodes: int
    ghosts: int
    objects: dict[str, int]


@dataclass
class _Live:
    request: Request
    chat: Chat
    prefilled: bool = False


@dataclass
class Soak:
    """Runs random operations; each acts as the state allows, or does nothing.

    Args:
        kind: whose evictions.
        write_policy: of the host tier.
        seed: decides every operation.
        uses_g: whether attention moves the ranking.
        record_to: folder of a recording of all events; None records nothing.
        counts_objects: whether live Python objects are counted at rest, of those made since the start.

    Attributes:
        happened: how often each kind of operation really took place.
    """

    kind: CacheKind
    write_policy: WriteMode
    seed: int = 0
    tokens: int = 1536
    uses_g: bool = False
    record_to: Path | None = None
    counts_objects: bool = True
    happened: Counter[str] = field(default_factory=Counter)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.counts_objects:
            gc.collect()
            gc.freeze()  # what the process holds already is neither counted nor walked
        self._rng = random.Random(self.seed)
        options = ImportanceOptions(
            policy="observe" if self.kind == "observe" else "importance",
            signal=SignalOptions(g="on" if self.uses_g else "off"),
        )
        self.recorder = None
        if self.record_to is not None:
            self.recorder = Recorder(
                self.record_to,
                options,
                page_size=PAGE,
                model="none",
                layers=(),
                device_tokens=self.tokens,
                cost=COST,
            )
        self.driver = HostedDriver(
            self.kind,
            write_policy=self.write_policy,
            tokens=self.tokens,
            options=options,
            recorder=self.recorder,
        )
        # Zeroed memory becomes resident when it is first touched: not a leak.
        self.driver.component.state.policy.reuse.forget_open()
        self.traffic = Traffic(self._rng, MAX_PROMPT)
        self.placement = Placement(self.driver, self._rng, self.happened)
        self._live: list[_Live] = []
        self._retracted: list[_Live] = []
        self._operations = list(WEIGHTS)
        self._weights = list(WEIGHTS.values())

    # ---- the run ----

    def run(self, operations: int, *, check_every: int, idle_every: int) -> Iterator[int]:
        """Yields the number of operations done, after each stretch of ``idle_every``."""
        for number in range(1, operations + 1):
            (operation,) = self._rng.choices(self._operations, self._weights)
            if getattr(self, f"_{operation}")() is not False:
                self.happened[operation] += 1
            self.driver.step()
            if number % check_every == 0:
                self._check([live.request for live in self._live])
            if number % idle_every == 0:
                self._idle(number)
                yield number

    def close(self) -> dict[str, int]:
        """Ends the recording and adds it up; events by kind."""
        gc.unfreeze()
        if self.recorder is None or self.record_to is None:
            return {}
        self.recorder.close()
        return check_recording(self.record_to, self.driver)

    def _idle(self, number: int) -> None:
        """Brings the cache to rest, where upstream's own check can run, and measures."""
        for live in self._live:
            self.driver.abort(live.request)
        self._live.clear()
        self._retracted.clear()
        self.driver.settle()
        self.driver.cache.sanity_check()
        self._check([])
        self.checkpoints.append(
            Checkpoint(
                number,
                psutil.Process().memory_info().rss,
                sum(1 for _ in self.driver.component.state.tree.nodes()),
                len(self.driver.component.state.tree.ghosts),
                dict(object_counts()) if self.counts_objects else {},
            )
        )

    def _check(self, live: list[Request]) -> None:
        check_books(self.driver, live)
        self.placement.check()

    # ---- operations ----

    def _body(self, tokens: int) -> np.ndarray:
        pages = -(-tokens // PAGE)
        return np.random.default_rng(self._rng.randrange(2**32)).random(pages)

    def _admit(self) -> bool | None:
        if len(self._live) >= MAX_LIVE:
            return False
        tokens, chat = self.traffic.draw()
        request = self.driver.admit(tokens, chat.salt)
        self.placement.hint(request)
        self._live.append(_Live(request, chat))

    def _prefill(self) -> bool | None:
        waiting = [live for live in self._live if not live.prefilled]
        if not waiting:
            return False
        live = self._rng.choice(waiting)
        request = live.request
        total = len(request.origin_input_ids)
        missing = total - request.filled
        try:
            if missing > 2 * PAGE and self._rng.random() < 0.4:
                up_to = request.filled + self._rng.randrange(PAGE, missing) // PAGE * PAGE
                self.driver.prefill(request, up_to=up_to, body=self._body(up_to))
                self.happened["chunk"] += 1
                return None
            self.driver.prefill(request, body=self._body(total))
            live.prefilled = True
        except OutOfMemory:
            self._make_way(live)

    def _decode(self) -> bool | None:
        live = self._running()
        if live is None:
            return False
        request = live.request
        if len(request.output_ids) > MAX_OUTPUT:
            return self._finish()
        steps = [self._rng.randrange(5000) for _ in range(self._rng.randrange(1, 8))]
        try:
            self.driver.decode(request, steps, body=self._body(request.filled + len(steps)))
        except OutOfMemory:
            self._make_way(live)

    def _finish(self) -> bool | None:
        live = self._running()
        if live is None or not len(live.request.output_ids):
            return False
        request = live.request
        self._live.remove(live)
        self.traffic.answered(live.chat, list(request.origin_input_ids + request.output_ids)[:MAX_PROMPT])
        self.driver.finish(request)

    def _abort(self) -> bool | None:
        if not self._live:
            return False
        live = self._live.pop(self._rng.randrange(len(self._live)))
        self.driver.abort(live.request)

    def _retract(self) -> bool | None:
        live = self._running()
        if live is None or len(self._retracted) >= MAX_LIVE:
            return False
        self._live.remove(live)
        self.driver.retract(live.request)
        live.prefilled = False
        self._retracted.append(live)

    def _readmit(self) -> bool | None:
        if not self._retracted or len(self._live) >= MAX_LIVE:
            return False
        live = self._retracted.pop(0)
        self.driver.readmit(live.request)
        self._live.append(live)

    def _evict(self) -> None:
        self.driver.evict(self._rng.randrange(1, 200))

    def _evict_host(self) -> None:
        self.driver.evict_host(self._rng.randrange(1, 200))

    def _settle(self) -> None:
        self.driver.settle()

    def _flush(self) -> bool | None:
        for live in self._live:
            self.driver.abort(live.request)
        self._live.clear()
        self._retracted.clear()
        self.driver.settle()
        self.driver.flush()

    def _pin(self) -> bool:
        return self.placement.pin([live.request for live in self._live])

    def _unpin(self) -> bool:
        return self.placement.unpin()

    def _let_time_pass(self) -> None:
        self.placement.let_time_pass()

    # ---- pressure ----

    def _running(self) -> _Live | None:
        running = [live for live in self._live if live.prefilled]
        return self._rng.choice(running) if running else None

    def _make_way(self, live: _Live) -> None:
        """The pool is full of running requests: one of them is retracted, or given up."""
        self.happened["out of memory"] += 1
        others = [other for other in self._live if other is not live and other.prefilled]
        if others and len(self._retracted) < MAX_LIVE:
            other = self._rng.choice(others)
            self._live.remove(other)
            self.driver.retract(other.request)
            other.prefilled = False
            self._retracted.append(other)
            return
        self._live.remove(live)
        self.driver.abort(live.request)

"""Rows of accumulated page scores, one per request slot: attention fills them, the tree empties them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import ParamSpec, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sgl_importance.errors import ImportanceError
from sgl_importance_kernels.page_rows import PageRows
from sglang_importance.attention.staging import Mark, Stream, stream_of
from sglang_importance.metrics.emission_time import EmissionTime

logger = logging.getLogger(__name__)

P = ParamSpec("P")

MAX_ROW_BYTES = 1 << 30
"""Room for 4096 slots of 128k tokens at page size 16: a quarter of upstream's own slot table."""


class Phase(StrEnum):
    """Phase of a row's queries; apart, because a prefill is folded after the next decode step has run."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RowScores:
    """Page scores accumulated over the query tokens of one request and phase.

    Both arrays are float32 [num_pages], for the pages that the longest-sighted of these tokens saw; a page is
    ``page_size`` consecutive tokens of the sequence, the last one may be partial.

    Attributes:
        body: sum over query tokens of the body mass per page; each token adds 1 in all, or 0 where its body
            is empty.
        peak: maximum over query tokens of the page's peak, in [0, 1].
        query_tokens: number of accumulated query tokens.
    """

    body: npt.NDArray[np.float32]
    peak: npt.NDArray[np.float32]
    query_tokens: int


MAX_DEFERRED = 4
"""Forward passes of a slot whose scores may wait to be computed: a prefill and some decode steps."""


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Scores that are not computed yet."""

    phase: Phase
    compute: Callable[[], torch.Tensor]
    query_tokens: int


class StepListener(Protocol):
    """Takes the page scores of one request in one forward pass."""

    def __call__(self, rid: str, phase: Phase, seq_len: int, scores: torch.Tensor, query_tokens: int) -> None:
        """``scores`` as ``ScoreRows.add`` takes them."""


class ScoresFailed(ImportanceError, RuntimeError):
    """Page scores could not be taken, on this rank or on another; raised where they are read."""


class ScoreRows:
    """Static accumulators, one row per request slot and phase, allocated once.

    A slot outlives its request, so a row names its owner: scores of another owner zero it first, and a
    reader that names an owner gets no other's row. Not safe across threads: the scheduler thread
    both launches the forward pass and consumes. Under tensor parallelism ``over_ranks`` turns consumed
    rows into the scores of all ranks; all ranks consume the same rows in the same order.

    A failure on the way from attention to a row must end neither a forward pass nor serving: it closes the
    rows, and their next reader gets ``ScoresFailed``.

    Args:
        page_size: tokens per page.
        num_slots: rows of upstream's request table, its padding row 0 included.
        max_context_tokens: longest sequence of a slot, in tokens.
        device: where attention runs.
        layers: attention layers that fill the rows; for the record only.
        stream: for tests; the device's own where None.

    Attributes:
        time: what filling the rows costs the thread that launches forward passes.

    Raises:
        ValueError: the rows would take more than ``MAX_ROW_BYTES``.
    """

    def __init__(
        self,
        *,
        page_size: int,
        num_slots: int,
        max_context_tokens: int,
        device: torch.device | str = "cpu",
        layers: Sequence[int] = (),
        stream: Stream | None = None,
    ) -> None:
        self.mass_tolerance = 1e-4
        self.time = EmissionTime()
        self.page_size = page_size
        self.layers = tuple(layers)
        self.num_slots = num_slots
        self.max_pages = -(-max_context_tokens // page_size)
        self.num_bytes = len(Phase) * PageRows.bytes_needed(num_slots, self.max_pages)
        if self.num_bytes > MAX_ROW_BYTES:
            raise ValueError(
                f"page scores of {num_slots} request slots x {self.max_pages} pages need "
                f"{self.num_bytes / 2**30:.1f} GiB, the limit is {MAX_ROW_BYTES / 2**30:.0f} GiB: raise "
                "--page-size, lower --max-running-requests or --context-length, or start with "
                "--kv-importance-source none"
            )
        self._rows = {phase: PageRows.zeros(num_slots, self.max_pages, device) for phase in Phase}
        self._num_pages = {phase: [0] * num_slots for phase in Phase}
        self._query_tokens = {phase: [0] * num_slots for phase in Phase}
        self._owners: list[str | None] = [None] * num_slots
        self._deferred: dict[int, list[_Deferred]] = {}
        self._stream = stream or stream_of(device, most_drained=2 * self.max_pages)
        self._last_writes: dict[Phase, list[Mark | None]] = {phase: [None] * num_slots for phase in Phase}
        self._failure: Exception | None = None
        self._is_closed = False
        self.over_ranks: Callable[[RowScores | None, bool], RowScores | None] | None = None
        """Scores of all ranks out of this one's (None where nothing was accumulated), and whether any of them
        failed; raises ``ScoresFailed`` on every rank where one did."""
        self.on_step: StepListener | None = None
        """Takes the scores of each single pass, which are then computed at once; None without a listener."""
        logger.info(
            "KV importance: Page scores: %d slots x %d pages of %d tokens, %.1f MiB",
            num_slots,
            self.max_pages,
            page_size,
            self.num_bytes / 2**20,
        )

    # ---- whether scores are taken ----

    @property
    def is_open(self) -> bool:
        """Whether scores are taken: not after a failure, nor after ``close``."""
        return not self._is_closed and self._failure is None

    def attempt(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Does work on scores, where they are taken; the next reader gets ``ScoresFailed`` if it raises."""
        if self.is_open:
            try:
                work(*args, **kwargs)
            except Exception as error:
                self._failure = error

    def close(self) -> None:
        """Ends the taking of scores: the rows are not read any more."""
        self._is_closed = True
        self._deferred.clear()

    # ---- scores ----

    def owner(self, slot: int) -> str | None:
        """Id of the request that began in this slot last; None after a discard."""
        return self._owners[slot]

    def begin(self, slot: int, owner: str) -> None:
        """An extend of ``owner`` starts in this slot: nothing accumulated before it is kept."""
        self.discard(slot)
        self._owners[slot] = owner

    def add(self, slot: int, phase: Phase, owner: str, scores: torch.Tensor, query_tokens: int) -> None:
        """Accumulates page scores of ``query_tokens`` tokens.

        Args:
            owner: request that the scores belong to; those of another owner are dropped from the slot.
            scores: mass, body mass and peak per page, float32 [3, num_pages], already reduced (sum, sum,
                maximum) over the query tokens.
        """
        mass, body, peak = scores
        num_pages = len(body)
        self.claim(slot, phase, owner, num_pages, query_tokens)
        rows = self._rows[phase]
        rows.mass[slot] += mass.sum()
        rows.body[slot, :num_pages] += body
        peaks = rows.peak[slot, :num_pages]
        torch.maximum(peaks, peak, out=peaks)
        self.written(phase, [slot])

    def add_later(
        self,
        slot: int,
        phase: Phase,
        owner: str,
        compute: Callable[[], torch.Tensor],
        query_tokens: int,
    ) -> None:
        """As ``add``, with scores that are computed when they are needed: after a first token was sent.

        ``compute`` reads the KV of the request through its slot, so it is called before the slot goes to
        another request, or not at all.
        """
        if self._owners[slot] != owner:
            self.begin(slot, owner)
        deferred = self._deferred.setdefault(slot, [])
        if len(deferred) == MAX_DEFERRED:
            self._compute_deferred(slot)
            deferred = self._deferred.setdefault(slot, [])
        deferred.append(_Deferred(phase, compute, query_tokens))

    def _compute_deferred(self, slot: int) -> None:
        owner = self._owners[slot]
        for deferred in self._deferred.pop(slot, ()):
            assert owner is not None
            self.add(slot, deferred.phase, owner, deferred.compute(), deferred.query_tokens)

    def claim(self, slot: int, phase: Phase, owner: str, num_pages: int, query_tokens: int) -> None:
        """Books scores that the caller then adds to ``of_phase``: a kernel, after this call."""
        assert num_pages <= self.max_pages, (num_pages, self.max_pages)
        if self._owners[slot] != owner:
            self.begin(slot, owner)
        self._num_pages[phase][slot] = max(self._num_pages[phase][slot], num_pages)
        self._query_tokens[phase][slot] += query_tokens

    def of_phase(self, phase: Phase) -> PageRows:
        """The accumulators of all slots, for kernels."""
        return self._rows[phase]

    def written(self, phase: Phase, slots: Iterable[int]) -> None:
        """Kernels that add to these rows of ``of_phase`` were launched on the current stream: who reads or
        zeroes one of the rows waits for them, and for no others."""
        mark = self._stream.mark()
        for slot in slots:
            self._last_writes[phase][slot] = mark

    def consume(
        self, slot: int, phase: Phase, owner: str | None = None, *, compute: bool = True
    ) -> RowScores | None:
        """Reads and zeroes a row; None where nothing was accumulated.

        Args:
            owner: id of the request that reads; another's row is left alone. None takes any owner's.
            compute: whether scores that wait to be computed are computed and read too.

        Raises:
            ScoresFailed: they could not be taken.
        """
        scores = None
        if self._failure is None:
            try:
                scores = self._take(slot, phase, owner, compute=compute)
            except Exception as error:
                self._failure = error
        if self.over_ranks is not None:
            return self.over_ranks(scores, self._failure is not None)
        if self._failure is not None:
            raise ScoresFailed("page scores could not be taken") from self._failure
        return scores

    def _take(self, slot: int, phase: Phase, owner: str | None, *, compute: bool) -> RowScores | None:
        if owner is not None and self._owners[slot] != owner:
            return None
        if compute:
            self._compute_deferred(slot)
        query_tokens = self._query_tokens[phase][slot]
        if query_tokens == 0:
            return None
        # A step that was launched before a request was seen to finish still adds to its row.
        body, peak, mass = self._row(slot, phase)
        drained = self._stream.drain((body, peak), self._last_writes[phase][slot], and_zero=(mass,)).numpy()
        self._forget(slot, phase)
        return RowScores(body=drained[0], peak=drained[1], query_tokens=query_tokens)

    def discard(self, slot: int) -> None:
        """Zeroes both rows of a slot and forgets its owner."""
        self._deferred.pop(slot, None)
        for phase in Phase:
            self._clear(slot, phase)
        self._owners[slot] = None

    def _row(self, slot: int, phase: Phase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Body and peak of the pages that the row claims, and its mass, float32 [1]."""
        rows, num_pages = self._rows[phase], self._num_pages[phase][slot]
        return rows.body[slot, :num_pages], rows.peak[slot, :num_pages], rows.mass[slot : slot + 1]

    def _clear(self, slot: int, phase: Phase) -> None:
        if self._num_pages[phase][slot] == 0:
            return
        # Zeroed on the current stream, which the forward stream waits for where it is another.
        mark = self._last_writes[phase][slot]
        if mark is not None:
            mark.wait()
        for sums in self._row(slot, phase):
            sums.zero_()
        self._forget(slot, phase)

    def _forget(self, slot: int, phase: Phase) -> None:
        self._num_pages[phase][slot] = 0
        self._query_tokens[phase][slot] = 0
        self._last_writes[phase][slot] = None

    def check_integrity(self) -> None:
        """Asserts that rows are zero outside the pages that they claim and that every mass adds up."""
        for slot in list(self._deferred):
            self._compute_deferred(slot)
        for phase, slot in product(Phase, range(self.num_slots)):
            num_pages, query_tokens = self._num_pages[phase][slot], self._query_tokens[phase][slot]
            rows = self._rows[phase]
            assert not rows.body[slot, num_pages:].any(), (phase, slot, num_pages)
            assert not rows.peak[slot, num_pages:].any(), (phase, slot, num_pages)
            assert (num_pages == 0) == (query_tokens == 0), (phase, slot, num_pages, query_tokens)
            assert query_tokens == 0 or self._owners[slot] is not None, (phase, slot)
            mass = float(rows.mass[slot])
            error = abs(mass - query_tokens)
            assert error <= self.mass_tolerance * max(1, query_tokens), (phase, slot, mass, query_tokens)

"""Decode attention that emits: the choice of a step's observed requests, and the reduction behind it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_importance_kernels.triton.paged_queries import observed_at_once
from sglang_importance.attention.rows import Phase, ScoreRows
from sglang_importance.attention.sampling import ObservedQueries, StepSampler
from sglang_importance.attention.staging import StagedNumbers

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_EMITTED_BYTES = 1 << 29
"""Limit on the buffers that attention emits into. Requests beyond it are observed in the next step."""


Numbers = TypeVar("Numbers", torch.Tensor, npt.NDArray[np.int32])


class StepNumbers(NamedTuple, Generic[Numbers]):
    """What a decode step's kernels read of its observed requests; each int32 [max_batch].

    The first two go by request of the batch, the others by observed request: of these, what lies behind the
    last observed one is left over from earlier steps, but for ``num_queries``.

    Attributes:
        order: its index among the observed requests, -1 where it is not observed.
        batch_starts: its first token in a flat list of the observed requests' tokens, -1 where not observed.
        starts: the same of the observed requests.
        batch_rows: its row of the batch.
        seq_lens: its tokens.
        slots: its row of the score rows.
        num_queries: 1 of each observed request, 0 behind them.
    """

    order: Numbers
    batch_starts: Numbers
    starts: Numbers
    batch_rows: Numbers
    seq_lens: Numbers
    slots: Numbers
    num_queries: Numbers


class DecodeEmission(ABC):
    """Observes decode steps of an attention backend whose kernels emit.

    The kernels run in every decode step, captured in a CUDA graph or not, and read the observed
    requests from the device: one graph serves all steps. ``model_runner.forward`` is wrapped: before a pass
    the observed requests are named, after it the reduction is launched behind it on the same stream and
    outside the graph, so a step that observes no request launches nothing.

    Args:
        model_runner: its ``forward`` is wrapped on this instance.
        rows, sampler: shared with the producer of the prefill's scores.
        layers: the sampled layers.
        max_batch: requests of a batch, padding included.
        interval: decode steps from one observation of a request to its next.

    Attributes:
        numbers: of the observed requests, on the device. Always the same memory: graphs hold its addresses.
    """

    def __init__(
        self,
        model_runner: ModelRunner,
        rows: ScoreRows,
        sampler: StepSampler,
        *,
        layers: Sequence[int],
        max_batch: int,
        interval: int,
    ) -> None:
        self.rows = rows
        self.layers = tuple(layers)
        self.max_batch = max_batch
        self._interval = interval
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        self._sampler = sampler
        # Rows whose starts stay aligned: Triton compiles for the alignment of what it is called with.
        shape = (len(StepNumbers._fields), -(-max_batch // 4) * 4)
        self._staged = StagedNumbers(shape, model_runner.device)
        self.numbers: StepNumbers[torch.Tensor] = StepNumbers(*self._staged.device_values[:, :max_batch])
        self._to_send = torch.zeros(shape, dtype=torch.int32)
        # A write per item of a tensor takes microseconds.
        self._on_host: StepNumbers[npt.NDArray[np.int32]] = StepNumbers(*self._to_send.numpy())
        self._names_anybody = False
        self._is_in_pass = False
        self._next_row = 0
        self._observed: list[ObservedQueries] = []
        self._ran: set[int] = set()
        self._ever_ran: set[int] = set()
        self._clear_numbers()
        self._staged.send(self._to_send)
        wrapped = self._around(model_runner.forward)
        model_runner.forward = wrapped  # type: ignore[method-assign]  # on this instance only

    def observable(self, batch_size: int) -> int:
        """Requests of a batch that one step can observe."""
        return int(observed_at_once(batch_size, self._interval))

    @property
    def observes_nobody(self) -> bool:
        """Whether an eager pass that observes nobody runs now. A captured one serves every step."""
        return self._is_in_pass and not self._observed

    @abstractmethod
    def admitted(self, observed: Sequence[ObservedQueries], batch_size: int) -> int:
        """The number of requests, from the first on, that one step of such a batch can observe."""

    @abstractmethod
    def opened(self) -> None:
        """The numbers of the next pass were sent; on the stream that it will run on."""

    @abstractmethod
    def reduce(self, observed: Sequence[ObservedQueries]) -> None:
        """Adds the scores that the pass emitted for the observed requests to their rows, asynchronously."""

    def index_of(self, layer_id: int) -> int | None:
        """Index of a layer among the sampled ones, to be asked whenever it runs; None where not sampled."""
        index = self._index.get(layer_id)
        if index is not None:
            self._ran.add(layer_id)
            self._ever_ran.add(layer_id)
        return index

    def _around(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(upstream)
        def forward(forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
            self._observed = []
            self.rows.attempt(self._open, forward_batch)
            if self._names_anybody and not self._observed:
                # Rows were closed, or have just failed. Not attempted: kernels that went on with starts of
                # another batch would write behind the end of their buffers.
                self._name([])
            self._is_in_pass = True
            try:
                output = upstream(forward_batch, *args, **kwargs)
            finally:
                self._is_in_pass = False
            if self._observed:
                self.rows.attempt(self._close, self._observed, replayed=output.can_run_graph)
            return output

        return forward

    def _open(self, forward_batch: ForwardBatch) -> None:
        with self.rows.time.measured():
            is_decode = forward_batch.forward_mode == ForwardMode.DECODE
            # Others name nobody: an idle pass may replay the graph of decode steps, too.
            observed = self._chosen(forward_batch) if is_decode else []
            if observed or self._names_anybody:
                self._name(observed)
            self._observed = observed

    def _chosen(self, forward_batch: ForwardBatch) -> list[ObservedQueries]:
        wanted = self._in_turn(list(self._sampler.observed(forward_batch)))
        count = self.admitted(wanted, forward_batch.batch_size)
        for queries in wanted[count:]:
            self._sampler.postpone(queries.slot)
        self._next_row = wanted[count].rows.start if count < len(wanted) else 0
        self._ran.clear()
        return wanted[:count]

    def _in_turn(self, wanted: list[ObservedQueries]) -> list[ObservedQueries]:
        """Begins with the first request that the last step had no room for, so that each gets its turn."""
        return sorted(wanted, key=lambda queries: (queries.rows.start < self._next_row, queries.rows.start))

    def _name(self, observed: list[ObservedQueries]) -> None:
        self._names_anybody = True  # also where this fails half-way
        self._clear_numbers()
        if observed:
            batch_rows = [queries.rows.start for queries in observed]
            assert max(batch_rows) < self.max_batch, (max(batch_rows), self.max_batch)
            seq_lens = [queries.seq_len for queries in observed]
            starts = list(accumulate(seq_lens, initial=0))[:-1]
            count = len(observed)
            numbers = self._on_host
            numbers.order[batch_rows] = range(count)
            numbers.batch_starts[batch_rows] = starts
            numbers.starts[:count] = starts
            numbers.batch_rows[:count] = batch_rows
            numbers.seq_lens[:count] = seq_lens
            numbers.slots[:count] = [queries.slot for queries in observed]
            numbers.num_queries[:count] = 1
        self._staged.send(self._to_send)
        self.opened()
        self._names_anybody = bool(observed)

    def _clear_numbers(self) -> None:
        self._on_host.order[:] = -1
        self._on_host.batch_starts[:] = -1
        self._on_host.num_queries[:] = 0

    def _close(self, observed: list[ObservedQueries], *, replayed: bool) -> None:
        self.rows.time.passes += 1
        with self.rows.time.measured():
            self._take(observed, replayed=replayed)

    def _take(self, observed: list[ObservedQueries], *, replayed: bool) -> None:
        ran = self._ever_ran if replayed else self._ran
        if missing := set(self.layers) - ran:
            logger.warning(
                "KV importance: Page scores of a decode step were dropped: layers %s did not emit; "
                "check signal.layers of --kv-importance-config",
                sorted(missing),
            )
            return
        for queries in observed:
            num_pages = -(-queries.seq_len // self.rows.page_size)
            self.rows.claim(queries.slot, queries.phase, queries.owner, num_pages, queries.num_q)
        self.reduce(observed)
        self.rows.written(Phase.DECODE, [queries.slot for queries in observed])

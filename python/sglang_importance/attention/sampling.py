"""Chooses the query tokens of a forward pass that are observed, the same for every producer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.attention.rows import Phase, ScoreRows

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

PADDING_SLOT = 0  # Row of upstream's request table that padded and dummy requests point at.


@dataclass(frozen=True, slots=True)
class ObservedQueries:
    """The query tokens of one request that a forward pass observes, the last ones of its sequence.

    Attributes:
        rows: their rows in the batch's query tensor.
        seq_len: tokens of the sequence, the query tokens included.
    """

    slot: int
    owner: str
    phase: Phase
    rows: slice
    seq_len: int

    @property
    def num_q(self) -> int:
        return int(self.rows.stop - self.rows.start)


class StepSampler:
    """Opens the rows of requests that extend, counts decode steps, and picks the observed query tokens.

    Observed are the last ``window`` tokens of every extend and, per request, its first decode step and every
    ``interval``-th after it, in batches of their own or mixed with extends.
    """

    def __init__(self, rows: ScoreRows, options: ImportanceOptions) -> None:
        self._rows = rows
        self._options = options
        self._decode_steps: npt.NDArray[np.int64] = np.zeros(rows.num_slots, dtype=np.int64)
        self._slot_of: dict[str, int] = {}
        # Of the last decode batch, which most often is the next one too.
        self._decoding: list[str] = []
        self._decoding_slots: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def observed(self, forward_batch: ForwardBatch) -> Iterator[ObservedQueries]:
        """To be exhausted once per forward pass."""
        rids = forward_batch.rids
        if rids is None:  # Only upstream's own dummy batches carry no request ids.
            return
        if forward_batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            yield from self._extends(forward_batch, rids)
        elif forward_batch.forward_mode == ForwardMode.DECODE:
            yield from self._decodes(forward_batch, rids)

    def _extends(self, forward_batch: ForwardBatch, rids: Sequence[str]) -> Iterator[ObservedQueries]:
        """Extends; with mixed chunks, also the decode steps that upstream has appended to them."""
        is_mixed = forward_batch.forward_mode == ForwardMode.MIXED
        seq_lens = on_host(forward_batch, "seq_lens")
        extend_lens = on_host(forward_batch, "extend_seq_lens")
        end = 0
        # Padding follows the requests.
        slots = on_host(forward_batch, "req_pool_indices")
        for row, (rid, slot) in enumerate(zip(rids, slots, strict=False)):
            end += extend_lens[row]
            if slot == PADDING_SLOT or extend_lens[row] == 0:
                continue
            # One token of a request that has begun: a decode step, or the last of its prompt's chunks, which
            # then keeps the window of the chunk before and is observed like a first step.
            if is_mixed and extend_lens[row] == 1 and self._rows.owner(slot) == rid:
                yield from self._mixed_step(slot, rid, end - 1, seq_lens[row])
                continue
            self._begin(slot, rid)
            num_q = min(self._options.signal.window, extend_lens[row])
            yield ObservedQueries(slot, rid, Phase.PREFILL, slice(end - num_q, end), seq_lens[row])

    def _mixed_step(self, slot: int, rid: str, row: int, seq_len: int) -> Iterator[ObservedQueries]:
        is_due = self._decode_steps[slot] % self._options.signal.interval == 0
        self._decode_steps[slot] += 1
        if is_due:
            yield ObservedQueries(slot, rid, Phase.DECODE, slice(row, row + 1), seq_len)

    def _decodes(self, forward_batch: ForwardBatch, rids: Sequence[str]) -> Iterator[ObservedQueries]:
        """Counts a decode step of each request; those that are due."""
        if rids != self._decoding:
            self._decode_others(forward_batch, list(rids))
        slots = self._decoding_slots
        is_due = (self._decode_steps[slots] % self._options.signal.interval == 0) & (slots != PADDING_SLOT)
        self._decode_steps[slots] += 1
        due = np.flatnonzero(is_due).tolist()
        if not due:  # as in most steps, which need not ask how long sequences are
            return
        seq_lens = on_host(forward_batch, "seq_lens")
        for row in due:
            rid, slot = self._decoding[row], int(slots[row])
            yield ObservedQueries(slot, rid, Phase.DECODE, slice(row, row + 1), seq_lens[row])

    def _decode_others(self, forward_batch: ForwardBatch, rids: list[str]) -> None:
        """The batch has changed: looks up the slots of its requests.

        Upstream keeps them on the device only, and to read them there would wait for the step before: they
        are known from the requests' prefills.
        """
        slots = [self._slot_of[rid] for rid in rids if rid in self._slot_of]
        if len(slots) < len(rids):
            slots = on_host(forward_batch, "req_pool_indices")[: len(rids)]
            for rid, slot in zip(rids, slots, strict=True):
                if slot != PADDING_SLOT and self._rows.owner(slot) != rid:
                    self._begin(slot, rid)
        self._decoding = rids
        self._decoding_slots = np.array(slots, dtype=np.int64)

    def postpone(self, slot: int) -> None:
        """The decode step just observed of a request counts for its next one instead."""
        self._decode_steps[slot] -= 1

    def _begin(self, slot: int, rid: str) -> None:
        before = self._rows.owner(slot)
        if before is not None and self._slot_of.get(before) == slot:
            del self._slot_of[before]
        self._slot_of[rid] = slot
        self._rows.begin(slot, rid)
        self._decode_steps[slot] = 0
        self._decoding = []


def on_host(forward_batch: ForwardBatch, name: str) -> list[int]:
    """A field of the batch as numbers, from the copy that upstream keeps on the host where there is one."""
    values: torch.Tensor | list[int] | None = getattr(forward_batch, f"{name}_cpu", None)
    if values is None:
        values = getattr(forward_batch, name)
    return list(values) if isinstance(values, list) else values.tolist()

"""Which query tokens of a forward pass are observed: the same for every producer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_importance.options import ImportanceOptions
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


@dataclass(frozen=True, slots=True)
class PassRequests:
    """The fields of a ``ForwardBatch`` that sampling reads, by value.

    Upstream's eager runner copies the tensors of every pass into the same buffers, so a batch that is looked
    at after its pass tells of the next one.
    """

    forward_mode: ForwardMode
    rids: list[str]
    seq_lens: list[int]
    extend_seq_lens: list[int] | None
    req_pool_indices: list[int]

    @classmethod
    def copied(cls, forward_batch: ForwardBatch) -> Self:
        """Reads what upstream keeps on the device from there: for batches whose device is the host."""
        assert forward_batch.rids is not None, "nobody samples upstream's own dummy batches"
        extends = forward_batch.forward_mode == ForwardMode.EXTEND
        return cls(
            forward_mode=forward_batch.forward_mode,
            rids=list(forward_batch.rids),
            seq_lens=_on_host(forward_batch, "seq_lens"),
            extend_seq_lens=_on_host(forward_batch, "extend_seq_lens") if extends else None,
            req_pool_indices=_on_host(forward_batch, "req_pool_indices"),
        )


class StepSampler:
    """Opens the rows of requests that extend, counts decode steps, and picks what a pass observes.

    Observed are the last ``window`` tokens of every extend and, per request, its first decode step and every
    ``interval``-th after it.
    """

    def __init__(self, rows: ScoreRows, options: ImportanceOptions) -> None:
        self._rows = rows
        self._options = options
        self._decode_steps = [0] * rows.num_slots
        self._slot_of: dict[str, int] = {}

    def observed(self, forward_batch: ForwardBatch | PassRequests) -> Iterator[ObservedQueries]:
        """To be exhausted once per forward pass."""
        if forward_batch.rids is None:  # Only upstream's own dummy batches carry no request ids.
            return
        # Padding follows the requests.
        requests = enumerate(zip(forward_batch.rids, self._slots(forward_batch), strict=False))
        if forward_batch.forward_mode == ForwardMode.EXTEND:
            yield from self._extends(forward_batch, requests)
        elif forward_batch.forward_mode == ForwardMode.DECODE:
            due = [(row, rid, slot) for row, (rid, slot) in requests if self._is_due(rid, slot)]
            if due:  # most steps observe nobody, and need not ask how long sequences are
                seq_lens = _on_host(forward_batch, "seq_lens")
                for row, rid, slot in due:
                    yield ObservedQueries(slot, rid, Phase.DECODE, slice(row, row + 1), seq_lens[row])

    def _extends(
        self, forward_batch: ForwardBatch | PassRequests, requests: Iterable[tuple[int, tuple[str, int]]]
    ) -> Iterator[ObservedQueries]:
        seq_lens = _on_host(forward_batch, "seq_lens")
        extend_lens = _on_host(forward_batch, "extend_seq_lens")
        end = 0
        for row, (rid, slot) in requests:
            end += extend_lens[row]
            if slot == PADDING_SLOT or extend_lens[row] == 0:
                continue
            self._begin(slot, rid)
            num_q = min(self._options.window, extend_lens[row])
            yield ObservedQueries(slot, rid, Phase.PREFILL, slice(end - num_q, end), seq_lens[row])

    def _is_due(self, rid: str, slot: int) -> bool:
        """Counts a decode step of a request; whether it is observed."""
        if slot == PADDING_SLOT:
            return False
        if self._rows.owner(slot) != rid:
            self._begin(slot, rid)
        step = self._decode_steps[slot]
        self._decode_steps[slot] += 1
        return step % self._options.interval == 0

    def postpone(self, slot: int) -> None:
        """The decode step just observed of a request counts for its next one instead."""
        self._decode_steps[slot] -= 1

    def _slots(self, forward_batch: ForwardBatch | PassRequests) -> list[int]:
        """Slots of the requests; of a decode batch upstream keeps them on the device only, and to read them
        there would wait for the step before."""
        assert forward_batch.rids is not None
        if forward_batch.forward_mode == ForwardMode.DECODE:
            known = [self._slot_of[rid] for rid in forward_batch.rids if rid in self._slot_of]
            if len(known) == len(forward_batch.rids):
                return known
        return _on_host(forward_batch, "req_pool_indices")

    def _begin(self, slot: int, rid: str) -> None:
        before = self._rows.owner(slot)
        if before is not None and self._slot_of.get(before) == slot:
            del self._slot_of[before]
        self._slot_of[rid] = slot
        self._rows.begin(slot, rid)
        self._decode_steps[slot] = 0


def _on_host(forward_batch: ForwardBatch | PassRequests, name: str) -> list[int]:
    """A field of the batch as numbers, from the copy that upstream keeps on the host where there is one."""
    values: torch.Tensor | list[int] | None = getattr(forward_batch, f"{name}_cpu", None)
    if values is None:
        values = getattr(forward_batch, name)
    return list(values) if isinstance(values, list) else values.tolist()

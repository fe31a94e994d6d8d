"""Traces: requests as paths of blocks in one radix tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_importance.reuse.answer_end import AnswerEnd

__all__ = ["NO_PARENT", "IntArray", "Trace", "TraceBuilder"]

IntArray = npt.NDArray[np.int64]
NO_PARENT = -1
MOST_TOKENS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; block ids are dense, so arrays indexed by them describe the blocks.

    Attributes:
        name: in tables and figures.
        block_tokens: tokens of a whole block.
        blocks: blocks of all requests, one after the other, root side first; int64 [accesses], values in
            [0, unique blocks), numbered in order of first appearance.
        offsets: request i asks for ``blocks[offsets[i]:offsets[i + 1]]``; int64 [requests + 1].
        parents: block before each block on its path, NO_PARENT for a first block; int64 [unique blocks].
            None where blocks are independent objects (general cache traces): only object-level replay.
        input_tokens: prompt length of each request; int64 [requests]. The last block of a request may be
            filled in part.
        output_tokens: generated tokens of each request, 0 where unknown; int64 [requests].
        seconds: arrival times from the start of the trace, never decreasing; float64 [requests].
        answer_ends: an AnswerEnd for each request; int8 [requests].
        answers: blocks that each answer filled behind the whole blocks of its prompt; those that nobody asks
            for have numbers from ``num_blocks`` on. None where the trace does not say.
    """

    name: str
    block_tokens: int
    blocks: IntArray
    offsets: IntArray
    parents: IntArray | None
    input_tokens: IntArray
    output_tokens: IntArray
    seconds: npt.NDArray[np.float64]
    answer_ends: npt.NDArray[np.int8]
    answers: tuple[tuple[int, ...], ...] | None = None

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_accesses(self) -> int:
        return len(self.blocks)

    @property
    def num_blocks(self) -> int:
        """Number of unique blocks."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def request(self, index: int) -> IntArray:
        """Blocks of one request, root side first."""
        return self.blocks[self.offsets[index] : self.offsets[index + 1]]

    def check_integrity(self) -> None:
        """Asserts shapes, order, and that every path follows ``parents``."""
        assert self.block_tokens > 0
        assert self.offsets[0] == 0
        assert self.offsets[-1] == len(self.blocks)
        assert (np.diff(self.offsets) >= 0).all()
        for per_request in (self.input_tokens, self.output_tokens, self.seconds, self.answer_ends):
            assert len(per_request) == self.num_requests
        assert (np.diff(self.seconds) >= 0).all()
        _, first = np.unique(self.blocks, return_index=True)
        assert (np.diff(first) > 0).all(), "blocks are not numbered in order of first appearance"
        if self.parents is not None:
            assert len(self.parents) == self.num_blocks
            before = np.concatenate(([NO_PARENT], self.blocks[:-1])) if len(self.blocks) else self.blocks
            before[self.offsets[:-1][np.diff(self.offsets) > 0]] = NO_PARENT
            assert (self.parents[self.blocks] == before).all(), "a block has two parents"


class TraceBuilder:
    """Collects requests whose blocks have arbitrary hashable names, and numbers the blocks.

    Args:
        name: of the trace, in tables and figures.
        block_tokens: tokens of a whole block.
        prefix_tree: whether a block stands for itself and everything before it.
    """

    def __init__(self, name: str, block_tokens: int, *, prefix_tree: bool = True) -> None:
        self._name = name
        self._block_tokens = block_tokens
        self._prefix_tree = prefix_tree
        self._ids: dict[object, int] = {}
        self._parents: list[int] = []
        self._blocks = array("q")
        self._offsets = [0]
        self._input_tokens: list[int] = []
        self._output_tokens: list[int] = []
        self._seconds: list[float] = []
        self._answer_ends: list[int] = []
        self._answers: list[Sequence[object]] = []

    def add(
        self,
        blocks: Iterable[object],
        *,
        input_tokens: int,
        output_tokens: int = 0,
        seconds: float = 0.0,
        answer_end: AnswerEnd = AnswerEnd.UNKNOWN,
        answer: Sequence[object] | None = None,
    ) -> None:
        """Appends one request.

        Args:
            answer: the blocks that its answer filled, behind the whole blocks of the prompt; None where the
                trace does not say.

        Raises:
            ValueError: a block has another parent than before, or appears twice in the request; time runs
                backwards; or there are more tokens than 64 bits count. The request is then not added.
        """
        if (tokens := max(input_tokens, output_tokens)) > MOST_TOKENS:
            raise ValueError(f"has {tokens} tokens")
        if self._seconds and seconds < self._seconds[-1]:
            raise ValueError(f"arrives at {seconds} s, before the request ahead of it")
        names = list(blocks)
        if self._prefix_tree:
            self._check_path(names)
        parent = NO_PARENT
        for name in names:
            block = self._ids.setdefault(name, len(self._ids))
            if block == len(self._parents):
                self._parents.append(parent)
            self._blocks.append(block)
            parent = block
        self._offsets.append(len(self._blocks))
        self._input_tokens.append(input_tokens)
        self._output_tokens.append(output_tokens)
        self._seconds.append(seconds)
        self._answer_ends.append(answer_end)
        if answer is not None:
            self._answers.append(answer)

    def _check_path(self, names: Sequence[object]) -> None:
        if len(set(names)) != len(names):
            raise ValueError("a block appears twice in one request; block ids must stand for whole prefixes")
        parent: int | None = NO_PARENT
        for name in names:
            block = self._ids.get(name)
            if block is not None and self._parents[block] != parent:
                raise ValueError(
                    f"block {name!r} follows another block than before, so its id stands for no prefix: "
                    "leave such requests out with --skip-bad, or use --object-level where the format has it"
                )
            parent = block

    def _named_answers(self) -> tuple[tuple[int, ...], ...] | None:
        if len(self._answers) < len(self._answer_ends):
            return None
        ids = dict(self._ids)
        return tuple(tuple(ids.setdefault(name, len(ids)) for name in names) for names in self._answers)

    def build(self) -> Trace:
        return Trace(
            name=self._name,
            block_tokens=self._block_tokens,
            blocks=np.array(self._blocks, dtype=np.int64),
            offsets=np.array(self._offsets, dtype=np.int64),
            parents=np.array(self._parents, dtype=np.int64) if self._prefix_tree else None,
            input_tokens=np.array(self._input_tokens, dtype=np.int64),
            output_tokens=np.array(self._output_tokens, dtype=np.int64),
            seconds=np.array(self._seconds, dtype=np.float64),
            answer_ends=np.array(self._answer_ends, dtype=np.int8),
            answers=self._named_answers(),
        )

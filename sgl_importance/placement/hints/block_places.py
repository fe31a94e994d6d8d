"""Places of typed blocks in a prompt, and the block type of a node that follows from them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from sgl_importance.placement.hints.hints import FIELD, BadHint, Block, Hints
from sgl_importance.reuse.reuse_class import BlockType


def locate_messages(hints: Hints, num_messages: int, end_of: Callable[[int], int]) -> Hints:
    """Replaces messages by the tokens that they became.

    Args:
        hints: of a chat request.
        num_messages: messages of the request; 0 where it has none.
        end_of: tokens that the first n messages of the prompt take, n in [0, num_messages]; asked once each.

    Raises:
        BadHint: a message is named that the request does not have.
    """
    located = []
    end_of = cache(end_of)  # a message begins where the one before it ends
    for index, block in enumerate(hints.block_types):
        if block.messages is None:
            located.append(block)
            continue
        field = f"{FIELD}.block_types.{index}.messages"
        if not num_messages:
            raise BadHint(field, "only a chat request has messages: give tokens")
        first, last = (each if each >= 0 else each + num_messages for each in block.messages)
        if not 0 <= first <= last < num_messages:
            shown = block.messages[0] if first == last else list(block.messages)
            raise BadHint(field, f"the request has {num_messages} messages, {shown} names none of them")
        start, end = end_of(first), end_of(last + 1)
        if start < end:
            located.append(Block(type=block.type, tokens=(start, end)))
    return hints.model_copy(update={"block_types": tuple(located)})


class PromptBlocks:
    """The block types of one prompt as disjoint pieces, so that a node is judged in logarithmic time.

    Args:
        blocks: with their tokens; where they overlap the later one counts.
        new_from: tokens of the prompt that the cache knew: a block without a place starts there.
        prompt_tokens: length of the prompt; nothing behind it has a type.
    """

    def __init__(self, blocks: Sequence[Block], *, new_from: int, prompt_tokens: int) -> None:
        painted: list[tuple[int, int, BlockType]] = []
        for block in blocks:
            assert block.messages is None, "locate messages first"
            start, end = block.tokens or (new_from, None)
            painted.append(
                (start, min(prompt_tokens if end is None else end, prompt_tokens), block.block_type)
            )
        cuts = sorted({cut for start, end, _ in painted for cut in (start, end)})
        self._starts: list[int] = []
        self._pieces: list[tuple[int, int, BlockType]] = []
        for start, end in pairwise(cuts):
            for first, last, block_type in reversed(painted):
                if first <= start and end <= last:
                    self._starts.append(start)
                    self._pieces.append((start, end, block_type))
                    break

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def of(self, start: int, end: int) -> BlockType | None:
        """Block type of most tokens in [start, end); None where most have no type."""
        counts: dict[BlockType | None, int] = {None: end - start}
        index = max(0, bisect_right(self._starts, start) - 1)
        for first, last, block_type in self._pieces[index:]:
            if first >= end:
                break
            overlap = min(last, end) - max(first, start)
            if overlap > 0:
                counts[block_type] = counts.get(block_type, 0) + overlap
                counts[None] -= overlap
        return max(counts, key=lambda each: counts[each])

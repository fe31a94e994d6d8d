"""Which prompt tokens vLLM finds of requests that come one behind the other, without a vLLM.

Its rule, as its servers show it: blocks that no request uses wait in one queue, and what a request needs is
taken from the front. A request that ends gives its blocks back from the last to the first, so that the end
of a text goes before its beginning; a block that is not full comes to the front. A prompt is never found
whole: its last token is always computed.

It computes what vLLM's servers computed, to the token (benchmark/peers/check_vllm_blocks.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class VllmBlocks:
    """Blocks of a device, and in which order they wait.

    Args:
        blocks: that requests may have.
        block_tokens: tokens of a block.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._tokens = block_tokens
        self._names: list[object] = [None] * blocks
        self._waiting = OrderedDict.fromkeys(range(blocks))  # the next to be taken first
        self._named: dict[object, list[int]] = {}  # blocks of a name, the oldest first

    def computed(self, names: Sequence[object], prompt_tokens: int, answer_tokens: int) -> int:
        """Prompt tokens of one request that are computed; then it is over.

        Args:
            names: of whole blocks of prompt and answer, each of all tokens up to its end; those that are left
                out at the end are never asked for.
            prompt_tokens: of the prompt.
            answer_tokens: of the answer.

        Raises:
            ValueError: the request is longer than the device.
        """
        most = (prompt_tokens - 1) // self._tokens
        found = 0
        while found < min(most, len(names)) and names[found] in self._named:
            found += 1
        blocks = [self._named[name][0] for name in names[:found]]
        for block in blocks:
            del self._waiting[block]
        stored = prompt_tokens + max(answer_tokens - 1, 0)  # the last token is never read
        blocks += [self._take() for _ in range(-(-stored // self._tokens) - found)]
        full = stored // self._tokens
        named = [*names[:full], *(object() for _ in range(full - len(names)))]
        for block, name in zip(blocks[:full], named, strict=True):
            if self._names[block] is None:
                self._names[block] = name
                self._named.setdefault(name, []).append(block)
        self._waiting.update(dict.fromkeys(reversed(blocks)))
        if stored % self._tokens:
            self._waiting.move_to_end(blocks[-1], last=False)
        return prompt_tokens - found * self._tokens

    def _take(self) -> int:
        if not self._waiting:
            raise ValueError("a request is longer than the device")
        block, _ = self._waiting.popitem(last=False)
        if (name := self._names[block]) is not None:
            self._names[block] = None
            self._named[name].remove(block)
            if not self._named[name]:
                del self._named[name]
        return block

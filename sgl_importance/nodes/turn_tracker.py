"""Turns on a prefix tree: which request goes on from which, and which nodes share a turn's fate.

A request is a turn once its answer has ended (``reuse.turns``). It goes on from the turn that was the last to
visit the end of what was known of its text, when that end lies behind the turn's prompt, or in the second
half of its text where nobody had left it before (an edit). Otherwise it shares a prefix with it and departs
from it. ``replay.trace_turns`` reads the same off a whole trace; here what was evicted is known as long as
its ghosts are.

Turns rank nodes from the first answer of which it is known how it ended, and while most requests go on from
an earlier turn with a longer prompt. Otherwise they are only followed, and nodes are ranked one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.conversations import Conversations
from sgl_importance.reuse.turns import Turn, TurnEstimator


class TurnTracker:
    """Gives the nodes of a finished request its turn, and ends the turn that it goes on from.

    Args:
        estimator: learns from every turn. Its ages are in admitted requests, the same on every rank.
        page_size: tokens per page.
        on_change: called with a turn whose nodes are to be ranked anew.
    """

    def __init__(
        self, estimator: TurnEstimator, *, page_size: int, on_change: Callable[[Turn], None]
    ) -> None:
        self._estimator = estimator
        self._page_size = page_size
        self._on_change = on_change
        self._knows_ends = False
        self._conversations = Conversations()

    def finished(
        self,
        path: Sequence[NodeMetadata],
        *,
        serial: int,
        clock: int,
        prompt_tokens: int,
        output_tokens: int,
        answer_end: AnswerEnd,
    ) -> Turn | None:
        """A request ended.

        Args:
            path: its nodes in the tree, root side first.
            serial: of the request: the clock of its admission, and creator of the nodes that it brought.
            clock: admitted requests so far.
            prompt_tokens: length of its prompt.
            output_tokens: that were generated.
            answer_end: how its answer ended.

        Returns:
            Its turn; None where nothing of it is in the tree.
        """
        if not path:
            return None
        self._knows_ends |= answer_end is not AnswerEnd.UNKNOWN
        before, departed = self._relation(path, serial)
        is_longer = before is not None and prompt_tokens > before.prompt_tokens
        turn = self._estimator.begin(serial, answer_end, output_tokens, before, now=clock)
        turn.ranks = self._conversations.count(is_longer) or self._knows_ends
        turn.prompt_tokens = prompt_tokens
        turn.tokens = path[-1].depth + path[-1].tokens
        if departed is not None:
            self._estimator.departed(departed)
        for node in path:
            node.turn = turn
        for changed in (before, departed):
            if changed is not None:
                self._on_change(changed)
        return turn

    def told(self, turn: Turn | None, answer_end: AnswerEnd) -> None:
        """It became known later how an answer ended.

        Args:
            turn: that ``finished`` returned then.
            answer_end: how.
        """
        self._knows_ends |= answer_end is not AnswerEnd.UNKNOWN
        if turn is not None and turn.is_open:
            self._estimator.ended_as(turn, answer_end)
            self._on_change(turn)

    def over(self, turn: Turn) -> None:
        """The session of a turn has said that it is over."""
        if turn.is_open:
            self._estimator.over(turn)
            self._on_change(turn)

    def _relation(self, path: Sequence[NodeMetadata], serial: int) -> tuple[Turn | None, Turn | None]:
        """The open turn that a request went on from, and the open turn that it departed from."""
        last = next((node for node in reversed(path) if node.turn is not None), None)
        if last is None:
            return None, None
        turn = last.turn
        assert turn is not None
        is_new = last.importance.creator == serial
        known = last.depth + (_returned_tokens(last) if is_new else last.tokens)
        # The request itself is one of the continuations.
        is_prefix_of_others = not is_new and last.continuations > 2
        whole_prompt = turn.prompt_tokens // self._page_size * self._page_size
        if known >= whole_prompt or (2 * known >= turn.tokens and not is_prefix_of_others):
            return (turn if turn.is_open else None), None
        last.is_parted = True
        return None, (turn if turn.is_open else None)


def _returned_tokens(node: NodeMetadata) -> int:
    """Of a node made anew: the tokens at its start that were known before, through their ghosts."""
    return node.prior_segments[-1].end if node.prior_segments else 0

"""Sessions and turns of a trace, each read off nothing but what came before it."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.conversations import Conversations
from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.reuse.turns import Classify, Turn, TurnEstimator, turn_class
from sgl_importance_lab.policies.session_requests import SessionRequests
from sgl_importance_lab.replay.sessions import BlockFacts, block_facts
from sgl_importance_lab.replay.trace import NO_PARENT, IntArray, Trace

GONE_ON = -1
"""In place of a turn's class: its session went on without what is left of it."""
OVER = -2
"""In place of a turn's class: its session has said that it is over, for all that its requests asked for."""


def has_answer_ends(trace: Trace) -> bool:
    """Whether the trace says of any request how its answer ended."""
    return trace.parents is not None and bool((trace.answer_ends != AnswerEnd.UNKNOWN).any())


def ranks_by_turns(trace: Trace) -> bool:
    """Whether any turn of the trace ranks the blocks that it was the last to visit, as on a server."""
    if trace.parents is None:
        return False
    if has_answer_ends(trace):
        return True
    before, _ = _relations_of(trace, block_facts(trace), np.zeros(trace.num_accesses, dtype=np.bool_))
    return bool(_ranking_turns(trace, before).any())


def _ranking_turns(trace: Trace, before: IntArray) -> npt.NDArray[np.bool_]:
    """Which requests' turns rank blocks; bool [requests]."""
    if has_answer_ends(trace):
        return np.ones(trace.num_requests, dtype=np.bool_)
    conversations = Conversations()
    longer = longer_requests(trace, before).tolist()
    return np.array([conversations.count(each) for each in longer], dtype=np.bool_)


def longer_requests(trace: Trace, before: IntArray) -> npt.NDArray[np.bool_]:
    """Which requests go on from an earlier one with a longer prompt; bool [requests].

    Args:
        before: the turn that each request goes on from, NO_PARENT where there is none; int64 [requests].
    """
    is_longer: npt.NDArray[np.bool_] = (before != NO_PARENT) & (
        trace.input_tokens > trace.input_tokens[before]
    )
    return is_longer


def session_requests(trace: Trace) -> SessionRequests:
    """The sessions of a trace as ``TraceTurns`` finds them; of independent objects each request is one."""
    before = np.full(trace.num_requests, NO_PARENT, dtype=np.int64)
    if trace.parents is not None:
        before, _ = _relations_of(trace, block_facts(trace), np.zeros(trace.num_accesses, dtype=np.bool_))
    return SessionRequests.of(
        trace.blocks,
        trace.offsets,
        trace.seconds,
        trace.input_tokens + trace.output_tokens,
        trace.answer_ends == AnswerEnd.TOOL_CALL,
        before,
    )


class TraceTurns:
    """Drives a ``TurnEstimator`` with the requests of a trace; what it says does not depend on the cache.

    Attributes:
        estimator: learns from every turn.
        classes: class of each turn so far, GONE_ON where it went on; int64 [requests].
        since: start of each turn's interval in seconds; float64 [requests].
        before: the turn that each request goes on from, NO_PARENT where there is none; int64 [requests].
        ranks: whether each turn ranks the blocks that it is the last to visit; bool [requests].
        is_shared: whether sessions had parted behind the block of each access by then; bool [accesses].
    """

    def __init__(self, trace: Trace, facts: BlockFacts, classify: Classify = turn_class) -> None:
        assert trace.parents is not None
        self.estimator = TurnEstimator(classify)
        self.classes = np.full(trace.num_requests, GONE_ON, dtype=np.int64)
        self.since = np.zeros(trace.num_requests)
        self.is_shared = np.zeros(trace.num_accesses, dtype=np.bool_)
        self._trace = trace
        self.before, self._departed = _relations_of(trace, facts, self.is_shared)
        self.ranks = _ranking_turns(trace, self.before)
        self._open: dict[int, Turn] = {}

    def begin_request(self, request: int) -> None:
        """The request is answered at once: from now on it is a turn."""
        before, departed = int(self.before[request]), int(self._departed[request])
        trace = self._trace
        turn = self.estimator.begin(
            float(trace.seconds[request]),
            AnswerEnd(int(trace.answer_ends[request])),
            int(trace.output_tokens[request]),
            self._open.pop(before, None),
        )
        self._open[request] = turn
        self._note(request, turn)
        if before != NO_PARENT:
            self.classes[before] = GONE_ON
        if departed in self._open:
            self.estimator.departed(self._open[departed])
            self._note(departed, self._open[departed])

    def over(self, requests: IntArray) -> None:
        """The session of these requests, all that it had, has said that it is over.

        Args:
            requests: numbers of requests, each begun before; int64 [requests of the session].
        """
        self.classes[requests] = OVER
        for request in requests.tolist():
            turn = self._open.pop(request, None)
            if turn is not None:
                self.estimator.over(turn)

    def _note(self, request: int, turn: Turn) -> None:
        self.since[request], self.classes[request] = turn.since, turn.turn_class


def _relations_of(trace: Trace, facts: BlockFacts, is_shared: npt.NDArray[np.bool_]) -> IntArray:
    return _relations(
        trace.blocks,
        trace.offsets,
        trace.num_blocks,
        facts.transitions,
        int(Transition.NEXT_TURN),
        int(Transition.BRANCH),
        is_shared,
    )


@numba.njit(cache=True)
def _relations(
    blocks: IntArray,
    offsets: IntArray,
    num_blocks: int,
    transitions: npt.NDArray[np.int8],
    next_turn: int,
    branch: int,
    is_shared: npt.NDArray[np.bool_],
) -> IntArray:
    """The turn that each request went on from and the one that it departed from; int64 [2, requests].

    In one array, as in ``equivalent``. NO_PARENT where there is none. Both are the last to visit the deepest
    block that was asked for before. A request that leaves that turn's text in its second half edits it; one
    that leaves it earlier, or where others left, shares a prefix with it: another session, or the same behind
    a summary.
    """
    num_requests = len(offsets) - 1
    relations = np.full((2, num_requests), NO_PARENT, dtype=np.int64)
    before, departed = relations[0], relations[1]
    visited_by = np.full(num_blocks, NO_PARENT, dtype=np.int64)
    parted = np.zeros(num_blocks, dtype=np.bool_)
    for request in range(num_requests):
        first, end = offsets[request], offsets[request + 1]
        known = first
        while known < end and visited_by[blocks[known]] != NO_PARENT:
            known += 1
        if known > first:
            turn = visited_by[blocks[known - 1]]
            length = offsets[turn + 1] - offsets[turn]
            edits = transitions[first] == branch and 2 * (known - first) >= length
            if transitions[first] == next_turn or edits:
                before[request] = turn
            else:
                departed[request] = turn
                parted[blocks[known - 1]] = True
        for i in range(first, end):
            visited_by[blocks[i]] = request
            is_shared[i] = parted[blocks[i]]
    return relations

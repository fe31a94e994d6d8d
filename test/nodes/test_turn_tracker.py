"""Which request goes on from which, read off the nodes of its path."""

from __future__ import annotations

import pytest

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.nodes.turn_tracker import TurnTracker
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.conversations import LONGER_REQUESTS
from sgl_importance.reuse.reuse_class import BlockType
from sgl_importance.reuse.turns import Turn, TurnEstimator

PAGE = 16


class Sessions:
    """Requests of which each is at once answered; nodes are made and cut by hand."""

    def __init__(self) -> None:
        self.changed: list[Turn] = []
        self.estimator = TurnEstimator()
        self.tracker = TurnTracker(self.estimator, page_size=PAGE, on_change=self.changed.append)
        self.clock = 0

    def node(self, pages: int, after: NodeMetadata | None = None) -> NodeMetadata:
        """A node that the next request brings."""
        depth = 0 if after is None else after.depth + after.tokens
        node = NodeMetadata(tokens=pages * PAGE, depth=depth, page_size=PAGE, clock=self.clock)
        node.importance.creator = self.clock + 1
        if after is not None:
            after.continuations += 1
        return node

    def finish(
        self,
        *path: NodeMetadata,
        prompt_pages: int,
        end: AnswerEnd = AnswerEnd.TOOL_CALL,
        requests_later: int = 1,
    ) -> Turn | None:
        self.clock += requests_later
        return self.tracker.finished(
            path,
            serial=self.clock,
            clock=self.clock,
            prompt_tokens=prompt_pages * PAGE + 3,
            output_tokens=PAGE,
            answer_end=end,
        )

    def begun(self, pages: int = 10, answer_pages: int = 2) -> tuple[NodeMetadata, NodeMetadata, Turn]:
        """A session's first turn: prompt, answer, turn."""
        prompt = self.node(pages)
        answer = self.node(answer_pages, prompt)
        turn = self.finish(prompt, answer, prompt_pages=pages)
        assert turn is not None
        return prompt, answer, turn


def test_turns_rank_from_the_first_end_that_is_known() -> None:
    sessions = Sessions()
    node = sessions.node(2)
    unknown = sessions.finish(node, prompt_pages=2, end=AnswerEnd.UNKNOWN)
    assert node.turn is unknown is not None
    assert not unknown.ranks
    known = sessions.finish(node, prompt_pages=2, end=AnswerEnd.LENGTH)
    assert node.turn is known is not None
    assert known.ranks
    later = sessions.finish(sessions.node(2), prompt_pages=2, end=AnswerEnd.UNKNOWN)
    assert later is not None
    assert later.ranks
    assert sessions.finish(prompt_pages=2) is None, "nothing of it is in the tree"


@pytest.mark.parametrize("new_pages", [3, 0], ids=["conversations", "the same prompts again"])
def test_turns_rank_while_prompts_grow(new_pages: int) -> None:
    """Nobody tells how answers end; every session goes on."""
    sessions = Sessions()
    paths = [[sessions.node(4)] for _ in range(8)]
    ranks = []
    for step in range(160):
        path = paths[step % len(paths)]
        if step >= len(paths) and new_pages:
            path.append(sessions.node(new_pages, path[-1]))
        pages = sum(node.tokens for node in path) // PAGE
        turn = sessions.finish(*path, prompt_pages=pages, end=AnswerEnd.UNKNOWN)
        assert turn is not None
        ranks.append(turn.ranks)
    assert not any(ranks[:16])
    assert ranks[-1] is bool(new_pages)
    if not new_pages:
        assert not any(ranks)
    for _ in range(LONGER_REQUESTS):
        last = sessions.finish(sessions.node(2), prompt_pages=2, end=AnswerEnd.UNKNOWN)
    assert last is not None
    assert not last.ranks, "traffic is something else by now"


def test_a_request_behind_the_prompt_ends_the_turn() -> None:
    sessions = Sessions()
    prompt, answer, first = sessions.begun()
    second = sessions.finish(prompt, answer, sessions.node(3, answer), prompt_pages=15, requests_later=9)
    assert not first.is_open
    assert second is not None
    assert second.is_open
    assert prompt.turn is answer.turn is second
    assert sessions.changed == [first]
    assert second.rhythm > first.rhythm, "its session has a gap now"


def test_an_answer_that_is_left_out_of_the_history_is_gone_on_without() -> None:
    sessions = Sessions()
    prompt, answer, first = sessions.begun()
    sessions.finish(prompt, sessions.node(4, prompt), prompt_pages=14)
    assert not first.is_open
    assert answer.turn is first


def test_an_edit_goes_on_and_an_early_leave_departs() -> None:
    for pages_kept, goes_on in ((7, True), (3, False)):
        sessions = Sessions()
        prompt, answer, first = sessions.begun()
        kept = prompt.split(pages_kept * PAGE, PAGE)
        other = sessions.finish(kept, sessions.node(5, kept), prompt_pages=pages_kept + 5)
        assert first.is_open is not goes_on
        assert kept.is_parted is not goes_on
        assert kept.turn is other
        assert prompt.turn is answer.turn is first
        assert sessions.changed == [first]
        if not goes_on:
            assert first.since == sessions.clock, "it waits anew, in a class of such turns"


def test_where_others_have_left_before_nobody_edits() -> None:
    sessions = Sessions()
    prompt, _, first = sessions.begun()
    kept = prompt.split(7 * PAGE, PAGE)
    kept.continuations = 2
    sessions.finish(kept, sessions.node(5, kept), prompt_pages=12)
    assert first.is_open
    assert kept.is_parted


def test_what_was_evicted_is_known_by_its_ghosts() -> None:
    """A node comes back in one with what follows it."""
    sessions = Sessions()
    *_, first = sessions.begun()
    again = sessions.node(15)
    again.turn = first
    again.recall(11 * PAGE, accesses=1, span=1, block_type=BlockType.USER)
    sessions.finish(again, prompt_pages=15)
    assert not first.is_open


def test_a_turn_that_has_gone_on_goes_on_once() -> None:
    sessions = Sessions()
    prompt, answer, first = sessions.begun()
    sessions.finish(prompt, sessions.node(4, prompt), prompt_pages=14)
    hits = sessions.estimator._hits.sum()
    retried = sessions.node(2, answer)
    sessions.finish(prompt, answer, retried, prompt_pages=14)
    assert sessions.estimator._hits.sum() == hits
    assert answer.turn is retried.turn
    assert answer.turn is not first


def test_an_end_that_is_told_later_moves_an_open_turn() -> None:
    sessions = Sessions()
    sessions.begun()
    node = sessions.node(2)
    turn = sessions.finish(node, prompt_pages=1, end=AnswerEnd.UNKNOWN)
    assert turn is not None
    before = turn.turn_class
    reached = sessions.estimator._reached.sum()
    sessions.tracker.told(turn, AnswerEnd.END_OF_TURN)
    assert turn.turn_class > before
    assert sessions.changed[-1] is turn
    assert sessions.estimator._reached.sum() == reached, "one interval, in another class"
    turn.is_open = False
    moved = turn.turn_class
    sessions.tracker.told(turn, AnswerEnd.TOOL_CALL)
    assert turn.turn_class == moved

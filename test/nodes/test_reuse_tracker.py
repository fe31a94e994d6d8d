"""The tracker of reuse: facts that it reads off a tree, and one at-risk interval for each node and ghost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.nodes.node_metadata import NodeMetadata, transition_after
from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.reuse.reuse_class import BlockType, Transition

PAGE = 16
Intervals = Counter[tuple[int, int | None]]


class Told:
    """A tracker, its clock, and nodes of whole pages."""

    def __init__(self, ghost_pages: int = 0) -> None:
        self.reuse = ReuseEstimator()
        self.tracker = ReuseTracker(self.reuse, page_size=PAGE, ghost_pages=ghost_pages)
        self.reuse.tick()

    def node(self, pages: int = 1) -> NodeMetadata:
        return NodeMetadata(tokens=pages * PAGE, depth=0, page_size=PAGE, clock=self.reuse.clock)

    def created(self, pages: int = 1, **told) -> NodeMetadata:
        node = self.node(pages)
        self.tracker.created(node, told.pop("transition", Transition.COLD), **told)
        return node

    def intervals(self) -> Intervals:
        """Open at-risk intervals by (start, class)."""
        return Counter(self.reuse.open_intervals())


def pages_of(name: int, pages: int) -> list[bytes]:
    return chain_digests(root_digest(str(name)), list(range(pages * PAGE)), PAGE)


def test_classes_follow_what_a_node_holds_how_it_was_reached_and_visits():
    told = Told()
    node = told.created()
    classes = [node.reuse_class]
    for _ in range(2):
        told.reuse.tick()
        told.tracker.accessed(node, Transition.COLD)
        classes.append(node.reuse_class)
    told.tracker.holds(node, BlockType.GENERATED)
    classes.append(node.reuse_class)
    told.reuse.tick()
    told.tracker.accessed(node, Transition.NEXT_TURN)
    classes.append(node.reuse_class)
    assert len(set(classes)) == len(classes)
    assert (node.accesses, node.span) == (3, 3)


def test_a_node_with_two_continuations_is_a_shared_prefix():
    told = Told()
    node = told.created(pages=4)
    told.created(parent=node)
    assert transition_after(node) is Transition.BRANCH
    prefix = told.tracker.split(node, PAGE)
    told.created(parent=prefix)
    assert (prefix.block_type, node.block_type) == (BlockType.SHARED_PREFIX, BlockType.USER)
    assert transition_after(prefix) is Transition.NEW_SESSION
    told.tracker.ended([node], serial=1, prompt_tokens=4 * PAGE, is_finished=False)
    assert transition_after(node) is Transition.NEXT_TURN
    assert transition_after(None) is Transition.COLD


def test_a_chat_goes_on_from_an_answer_that_its_client_has_cut_short():
    told = Told()
    answer = told.created(pages=4)
    told.tracker.holds(answer, BlockType.GENERATED)
    told.tracker.ended([answer], serial=1, prompt_tokens=0, is_finished=False)
    kept = told.tracker.split(answer, PAGE)
    assert not kept.is_tip
    assert transition_after(kept) is Transition.NEXT_TURN


def test_what_follows_a_prompt_is_generated_where_its_own_request_brought_it():
    told = Told()
    path = [told.node(), told.node(), told.node()]
    for position, node in enumerate(path):
        node.depth = position * PAGE
        node.importance.creator = 7
    path[0].importance.creator = 3
    told.tracker.ended(path, serial=7, prompt_tokens=PAGE + 3, is_finished=False)
    assert all(node.block_type is BlockType.USER for node in path)
    told.tracker.ended(path, serial=7, prompt_tokens=PAGE + 3, is_finished=True)
    assert [node.block_type for node in path] == [BlockType.USER, BlockType.GENERATED, BlockType.GENERATED]
    assert [node.is_tip for node in path] == [False, False, True]


def test_an_evicted_node_that_is_asked_for_again_was_at_risk_all_the_time():
    told = Told(ghost_pages=8)
    node = told.created(pages=2)
    for _ in range(3):
        told.reuse.tick()
    told.tracker.accessed(node, Transition.NEXT_TURN)
    told.tracker.removed(node, pages_of(0, 2))
    for _ in range(10):
        told.reuse.tick()
    parent = told.node()
    again = told.node(pages=3)
    ((ghost, tokens),) = told.tracker.created(
        again, Transition.BRANCH, parent=parent, pages=[*pages_of(0, 2), b"new"]
    )
    assert (ghost.resolved, tokens) == (True, 2 * PAGE)
    assert (again.accesses, again.span) == (2, 13)
    assert parent.continuations == 0, "what comes back is no new continuation"
    assert told.intervals() == {(14, again.reuse_class): 1}
    assert told.reuse.counts()[0].sum() == 2


def test_what_a_pre_warm_brings_back_is_at_risk_as_it_was():
    told = Told(ghost_pages=8)
    node = told.created(pages=2, transition=Transition.NEW_SESSION)
    told.tracker.removed(node, pages_of(0, 2))
    told.reuse.tick()
    first, rest = told.node(), told.node()
    told.tracker.created(first, None, pages=pages_of(0, 1))
    told.tracker.created(rest, None, pages=pages_of(0, 2)[1:])
    for part in (first, rest):
        assert (part.at_risk_as, part.last_access, part.accesses) == (node.at_risk_as, 1, 0)
    assert told.intervals() == {(1, node.at_risk_as): 2}
    assert told.reuse.counts()[0].sum() == 0


def test_what_storage_brings_is_visited_by_the_admission_only():
    told = Told(ghost_pages=8)
    for node in (told.created(pages=1), told.created(pages=1)):
        told.tracker.removed(node, pages_of(0, 2)[len(told.tracker.ghosts) :][:1])
    told.reuse.tick()
    node = told.node(pages=2)
    told.tracker.created(node, Transition.COLD, pages=pages_of(0, 2), is_admitted=False)
    assert (node.at_risk_as, node.accesses, node.last_access) == (None, 0, 2)
    assert told.reuse.counts()[0].sum() == 2, "both were asked for again"
    told.reuse.tick()
    told.tracker.accessed(node, Transition.BRANCH)
    assert (node.accesses, node.span) == (1, 2)
    assert told.intervals() == {(3, node.reuse_class): 1}
    assert told.reuse.counts()[0].sum() == 2


def test_a_node_that_nobody_asked_for_and_nobody_knew_is_not_at_risk():
    told = Told(ghost_pages=8)
    assert told.created(transition=None).at_risk_as is None
    assert not told.intervals()


_EVENTS = ("create", "access", "split", "holds", "continued", "evict", "return", "restore", "storage")


@given(st.lists(st.tuples(st.sampled_from(_EVENTS), st.integers(0, 50)), min_size=1, max_size=60))
def test_every_node_and_ghost_is_at_risk_once_in_its_class(events: list[tuple[str, int]]):
    """Whatever happens to nodes, open intervals are those of the nodes there are and of the ghosts that are
    remembered and were not resolved."""
    told = Told(ghost_pages=12)
    alive: list[tuple[NodeMetadata, list[bytes]]] = []
    gone: list[list[bytes]] = []
    for serial, (event, which) in enumerate(events):
        told.reuse.tick()
        if event == "create" or not alive:
            node, pages = told.node(4), pages_of(serial, 4)
            told.tracker.created(node, Transition(which % len(Transition)), pages=pages)
            alive.append((node, pages))
            continue
        index = which % len(alive)
        node, pages = alive[index]
        if event == "access":
            told.tracker.accessed(node, Transition.NEXT_TURN)
        elif event == "split" and len(pages) > 1:
            alive[index] = (node, pages[1:])
            alive.append((told.tracker.split(node, PAGE), pages[:1]))
        elif event == "holds":
            told.tracker.holds(node, BlockType(which % len(BlockType)))
        elif event == "continued":
            follower, its_pages = told.node(), pages_of(serial, 1)
            told.tracker.created(follower, Transition.COLD, parent=node, pages=its_pages)
            alive.append((follower, its_pages))
        elif event == "evict":
            del alive[index]
            told.tracker.removed(node, pages)
            gone.append(pages)
        elif gone:
            pages = gone.pop(which % len(gone))
            node = told.node(len(pages))
            transition = None if event == "restore" else Transition.BRANCH
            told.tracker.created(node, transition, pages=pages, is_admitted=event == "return")
            alive.append((node, pages))
        ghosts = {id(ghost): ghost for ghost, _ in told.tracker.ghosts._pages.values() if not ghost.resolved}
        at_risk = [node for node, _ in alive] + list(ghosts.values())
        expected = Counter(
            (each.last_access, each.at_risk_as) for each in at_risk if each.at_risk_as is not None
        )
        assert told.intervals() == expected
        assert all(node.at_risk_as in (None, node.reuse_class) for node, _ in alive)

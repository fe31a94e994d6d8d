"""Nodes are ranked by the turns that visited them last."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.policy.victim_order import level_value, value_level
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.reuse.turns import Turn
from sgl_importance.tiers import Tier

PAGE = 16
COST = CostModel(
    prefill_seconds_per_token=1e-4,
    prefill_seconds_per_token_pair=1e-8,
    bytes_per_token=1000,
    host_bytes_per_second=1e9,
    storage_bytes_per_second=1e8,
)


class World:
    """A policy and some evictable nodes of the device."""

    def __init__(self) -> None:
        self.policy = ImportancePolicy(COST)
        self.nodes: dict[int, NodeMetadata] = {}

    def turn(self, before: Turn | None = None, end: AnswerEnd = AnswerEnd.TOOL_CALL) -> Turn:
        """A request that is answered at once."""
        serial = self.policy.admit()
        turn = self.policy.turns.begin(serial, end, 50, before)
        if before is not None:
            self.policy.turn_changed(before)
        return turn

    def enter(self, node_id: int, turn: Turn | None, *, is_parted: bool = False) -> NodeMetadata:
        node = self.nodes.setdefault(
            node_id, NodeMetadata(tokens=PAGE, depth=0, page_size=PAGE, clock=self.policy.clock)
        )
        node.turn, node.is_parted = turn, is_parted
        self.policy.enter(Tier.DEVICE, node_id, node, below=None)
        return node

    def loss(self, node_id: int) -> tuple[float, float, int]:
        """As the order ranks: by quantised values, then by age, then by number."""
        node, policy = self.nodes[node_id], self.policy
        value = policy.value(Tier.DEVICE, node, below=None)
        rate = policy.loss(Tier.DEVICE, node, below=None) / value
        is_by_turn = node.turn is not None and not node.is_parted
        since = node.turn.since if node.turn is not None and is_by_turn else node.last_access
        return rate * level_value(value_level(value)), since, node_id


def test_what_a_session_went_on_without_goes_first_and_oldest_first() -> None:
    world = World()
    never = world.enter(1, world.turn(end=AnswerEnd.END_OF_TURN))
    left = [world.turn() for _ in range(2)]
    for number, turn in enumerate(left):
        world.enter(10 + number, turn)
    for turn in reversed(left):
        world.turn(before=turn)
    assert [world.policy.victim(Tier.DEVICE) for _ in range(3)] == [10, 11, 1]
    assert world.policy.reuse_probability(never) > 0.0
    assert world.policy.reuse_probability(world.nodes[10]) == 0.0


def test_a_pin_and_a_shared_end_are_ranked_by_themselves() -> None:
    world = World()
    turn = world.turn()
    pinned = world.enter(1, turn)
    pinned.pin_octaves = {Tier.DEVICE: 3.0}
    shared = world.enter(2, turn, is_parted=True)
    left = world.enter(3, turn)
    world.turn(before=turn)
    losses = [world.policy.loss(Tier.DEVICE, node, below=None) for node in (pinned, shared, left)]
    assert losses[0] > losses[1] > losses[2] == 0.0
    assert world.policy.victim(Tier.DEVICE) == 3


_events = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, 12), st.integers(-1, 8), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 12)),
        st.tuples(st.just("go on"), st.integers(0, 8), st.sampled_from(AnswerEnd)),
        st.tuples(st.just("depart"), st.integers(0, 8)),
        st.tuples(st.just("told"), st.integers(0, 8), st.sampled_from(AnswerEnd)),
        st.tuples(st.just("admit"), st.integers(1, 40)),
        st.tuples(st.just("victim")),
    ),
    max_size=80,
)


@settings(max_examples=150)
@given(_events)
def test_the_victim_is_what_a_scan_of_all_finds(events: list[tuple]) -> None:
    world = World()
    policy = world.policy
    turns = [world.turn() for _ in range(9)]
    for event in events:
        match event:
            case ("enter", node_id, number, is_parted):
                world.enter(node_id, None if number < 0 else turns[number], is_parted=is_parted)
            case ("leave", node_id):
                policy.leave(Tier.DEVICE, node_id)
                world.nodes.pop(node_id, None)
            case ("go on", number, end):
                turns[number] = world.turn(turns[number], end)
            case ("depart", number):
                world.turn()
                policy.turns.departed(turns[number])
                policy.turn_changed(turns[number])
            case ("told", number, end):
                policy.turns.ended_as(turns[number], end)
                policy.turn_changed(turns[number])
            case ("admit", requests):
                for _ in range(requests):
                    policy.admit()
            case ("victim",):
                expected = min(world.nodes, key=world.loss, default=None)
                assert policy.victim(Tier.DEVICE) == expected
                world.nodes.pop(expected, None)
        policy.check_integrity()
        assert policy.evictable(Tier.DEVICE) == len(world.nodes)

"""The write gate: budget, displacement, payback, and the same answers for the same history."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.nodes.reuse_tracker import ReuseTracker
from sgl_importance.options import ImportanceOptions
from sgl_importance.pins.pin import PIN_OCTAVES
from sgl_importance.ranking.cost_model import CostModel
from sgl_importance.ranking.marginal_loss import ImportancePolicy
from sgl_importance.ranking.write_gate import (
    BURST_REQUESTS,
    MIN_RESIDENCE,
    GateSettings,
    TierPressure,
    WriteGate,
)
from sgl_importance.reuse.life_table import MAX_AGE
from sgl_importance.reuse.reuse_class import Transition
from sgl_importance.tiers import Tier

PAGE = 16
COST = CostModel(
    prefill_seconds_per_token=1e-4,
    prefill_seconds_per_token_pair=1e-9,
    bytes_per_token=100,
    host_bytes_per_second=1e9,
    storage_bytes_per_second=1e8,
)
OPEN = GateSettings(host_payback=0.0, storage_payback=0.0, displacement=0.0)


class World:
    """Requests for numbered nodes of one page, told to a policy and a gate."""

    def __init__(self, settings: GateSettings | None = None, host_bytes: int | None = 1 << 30) -> None:
        self.policy = ImportancePolicy(COST, use_importance=False)
        self.tracker = ReuseTracker(self.policy.reuse, page_size=PAGE)
        self.gate = WriteGate(self.policy, {Tier.HOST: host_bytes, Tier.STORAGE: None}, settings)
        self.nodes: dict[int, NodeMetadata] = {}

    def request(self, *names: int) -> None:
        self.policy.admit()
        self.gate.tick()
        for depth, name in enumerate(names):
            node = self.nodes.get(name)
            if node is None:
                node = NodeMetadata(tokens=PAGE, depth=depth * PAGE, page_size=PAGE, clock=self.policy.clock)
                self.nodes[name] = node
                self.tracker.created(node, Transition.COLD)
            else:
                self.tracker.accessed(node, Transition.NEXT_TURN)

    def admits(self, *names: int, tier: Tier = Tier.HOST) -> bool:
        return self.gate.admits(tier, [self.nodes[name] for name in names])


def returning_world(requests: int = 400) -> World:
    """Even nodes come again and again, odd ones never."""
    world = World()
    for serial in range(requests):
        world.request(2 * (serial % 8), 2 * serial + 1001)
    return world


def test_where_there_is_room_everything_with_a_prospect_is_copied():
    world = returning_world()
    assert world.admits(0)
    assert world.admits(2 * 399 + 1001)


def test_under_pressure_a_copy_must_lose_more_than_what_is_given_up():
    world = returning_world()
    for _ in range(2000):
        world.gate.gave_up(Tier.HOST, world.nodes[0])
    assert world.admits(0)
    assert world.admits(2)
    assert not world.admits(2 * 399 + 1001)


def test_a_chain_is_judged_as_a_whole():
    world = returning_world()
    for _ in range(2000):
        world.gate.gave_up(Tier.HOST, world.nodes[1001])
    last = 2 * 399 + 1001
    least = 1.5 * world.policy.loss(Tier.HOST, world.nodes[last], below=None)
    world.gate.tiers[Tier.HOST].victim_loss = least / world.gate.settings.displacement
    assert not world.admits(last)
    assert world.admits(14, last), "a node that returns pays for one ahead of it"


def test_pressure_fades_where_nothing_is_given_up():
    world = returning_world()
    for _ in range(2000):
        world.gate.gave_up(Tier.HOST, world.nodes[0])
    last = 2 * 399 + 1001
    assert not world.admits(last)
    for serial in range(4000):
        world.request(2 * (serial % 8))
    assert world.gate.tiers[Tier.HOST].victim_loss < 1e-4 * world.policy.loss(
        Tier.HOST, world.nodes[0], below=None
    )


def test_what_never_returns_is_not_stored():
    world = returning_world()
    assert world.admits(0, tier=Tier.STORAGE)
    for serial in range(400, 800):
        world.request(2 * (serial % 8), 2 * serial + 1001)
    assert not world.admits(1001, tier=Tier.STORAGE)


@pytest.mark.parametrize("can_wait", [False, True])
def test_a_higher_bar_stores_less(can_wait: bool):
    stored = []
    for payback in (0.0, 0.2, 0.9, 1.0):
        world = World(GateSettings(storage_payback=payback))
        for serial in range(400):
            world.request(2 * (serial % 8), 2 * serial + 1001)
        chains = [[node] for node in world.nodes.values()]
        stored.append(sum(world.gate.admits(Tier.STORAGE, chain, can_wait=can_wait) for chain in chains))
    assert sorted(stored, reverse=True) == stored
    assert stored[0] > 0 == stored[-1]


def test_the_servers_bar_is_the_gates_own_unless_chosen():
    assert ImportanceOptions().gate_payback == GateSettings().storage_payback


def test_no_copy_is_made_for_ages_that_nobody_has_watched():
    """A store without bound keeps a copy for ever, and the prior alone makes any return likely by then."""
    world = returning_world(40)
    one_off = world.nodes[2 * 39 + 1001]
    likely = world.policy.reuse.probability_within(one_off.reuse_class, 1, MAX_AGE)
    assert likely > world.gate.settings.early_payback
    assert not world.gate.admits(Tier.STORAGE, [one_off], can_wait=True)
    assert world.gate.admits(Tier.STORAGE, [world.nodes[0]], can_wait=True)


def test_a_pin_raises_what_a_copy_promises():
    world = returning_world(800)
    assert not world.admits(1001, tier=Tier.STORAGE)
    world.nodes[1001].pin_octaves = {Tier.HOST: 20.0}
    assert world.gate.payback(Tier.STORAGE, world.nodes[1001]) == 1.0
    assert world.admits(1001, tier=Tier.STORAGE)


def test_a_pinned_victim_does_not_keep_the_others_out():
    world, pinned = returning_world(), returning_world()
    pinned.nodes[1001].pin_octaves = {Tier.HOST: PIN_OCTAVES}
    for each in (world, pinned):
        each.gate.gave_up(Tier.HOST, each.nodes[1001])
    losses = [each.gate.tiers[Tier.HOST].victim_loss for each in (world, pinned)]
    assert losses[0] == losses[1] > 0


@settings(max_examples=50)
@given(
    st.integers(1, 4).map(lambda pages: pages * PAGE * COST.bytes_per_token * MIN_RESIDENCE),
    st.lists(st.integers(4, 8), min_size=20, max_size=100),
)
def test_the_budget_of_a_tier_holds_over_any_history(capacity: int, lengths: list[int]):
    world = World(OPEN, host_bytes=capacity)
    budget = capacity / MIN_RESIDENCE
    written, longest = 0, 0
    for serial, length in enumerate(lengths):
        chain = [serial * 10 + part for part in range(length)]
        world.request(*chain)
        size = length * PAGE * COST.bytes_per_token
        longest = max(longest, size)
        if world.admits(*chain):
            written += size
        assert written <= budget * (BURST_REQUESTS + serial + 1) + longest


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=10, max_size=200))
def test_the_same_history_gets_the_same_answers(history: list[tuple[int, int]]):
    def answers() -> list[bool]:
        world = World(host_bytes=PAGE * COST.bytes_per_token * 200)
        given = []
        for name, kind in history:
            world.request(name)
            if kind == 1:
                world.gate.gave_up(Tier.HOST, world.nodes[name])
            given.append(world.admits(name, tier=Tier.STORAGE if kind == 2 else Tier.HOST))
        return given

    assert answers() == answers()


def test_residence_is_capacity_over_write_rate():
    pressure = TierPressure(1_000_000)
    assert pressure.residence == MAX_AGE
    for _ in range(500):
        pressure.wrote(2_000)
        pressure.tick()
    assert pressure.residence == pytest.approx(500, rel=0.01)
    for _ in range(4000):
        pressure.wrote(8_000)
        pressure.tick()
    assert pressure.residence == pytest.approx(125, rel=0.01)

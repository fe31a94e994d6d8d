"""The pin table alone: budgets, order, lifetime and decay."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.placement.pins import pin_room
from sgl_importance.placement.pins.pin import HALF_LIFE_REQUESTS, PIN_OCTAVES, Pin, PinSource
from sgl_importance.placement.pins.pin_room import PinRefused
from sgl_importance.placement.pins.pin_table import PinTable
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sgl_importance.reuse.reuse_class import BlockType, Transition
from sgl_importance.tiers import Tier

PAGE = 4
DEVICE, HOST = Tier.DEVICE, Tier.HOST
# A slow processor beside a fast host: the widest span of costs.
COST = CostModel(
    prefill_seconds_per_token=1e-2,
    prefill_seconds_per_token_pair=1e-6,
    bytes_per_token=1,
    host_bytes_per_second=1e12,
    storage_bytes_per_second=1e9,
)


def text(start: int, pages: int) -> array:
    return array("q", range(start, start + pages * PAGE))


def make_pin(name: str, tokens: array, salt: str | None = None, **kwargs) -> Pin:
    return Pin(name, tokens, cache_salt=salt, **kwargs)


def make_table(device_pages: int = 100, share: float = 0.2, **tiers: int) -> PinTable:
    pages = {DEVICE: device_pages, **{Tier(name): pages for name, pages in tiers.items()}}
    return PinTable(PAGE, share, {tier: count * PAGE for tier, count in pages.items()})


def held_tokens(table: PinTable, tier: Tier, *, salt: str | None, source: PinSource | None = None) -> int:
    chosen = [p for p in table.pins() if p.tenant == salt and source in (None, p.source)]
    return PAGE * len({digest for p in chosen for digest in p.digests[: p.granted[tier]]})


# ---- budget ----

texts = st.builds(text, st.integers(0, 3).map(lambda i: i * 1000), st.integers(1, 30))
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            texts,
            st.sampled_from([None, "a", "b", "c"]),
            st.sampled_from([None, 10.0, 100.0]),
            st.sampled_from(PinSource),
        ),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.tuples(st.just("pass"), st.integers(0, 2 * HALF_LIFE_REQUESTS), st.floats(0, 50)),
        st.tuples(st.just("resize"), st.integers(0, 200), st.integers(0, 300)),
    ),
    max_size=25,
)


@given(steps, st.floats(0, 1))
def test_no_tenant_and_no_tier_ever_exceeds_its_budget(steps, share: float):
    table = make_table(share=share, host=150)
    clock, now = 0, 0.0
    for serial, (kind, *arguments) in enumerate(steps):
        before = {pin.pin_id: (pin.octaves, dict(pin.granted)) for pin in table.pins()}
        if kind == "add":
            tokens, salt, ttl, source = arguments
            end = None if ttl is None else now + ttl
            try:
                changed = table.add(make_pin(str(serial), tokens, salt, expires_at=end, source=source))
            except PinRefused:
                continue
        elif kind == "remove" and len(table):
            changed = table.remove(table.pins()[arguments[0] % len(table)].pin_id)
        elif kind == "pass":
            clock, now = clock + arguments[0], now + arguments[1]
            changed = table.advance(clock, now)
        elif kind == "resize":
            changed = table.resize({DEVICE: arguments[0] * PAGE, HOST: arguments[1] * PAGE})
        else:
            continue
        table.check_integrity()
        after = {pin.pin_id: (pin.octaves, dict(pin.granted)) for pin in table.pins()}
        differs = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert differs <= {pin.pin_id for pin in changed}, "who must be ranked again is told"
        assert all(pin.expires_at is None or pin.expires_at > now for pin in table.pins())
        tenants = {pin.tenant for pin in table.pins() if pin.source is PinSource.REQUESTED}
        for tier in (DEVICE, HOST):
            budget = table.budget_tokens(tier)
            assert sum(held_tokens(table, tier, salt=s) for s in (None, "a", "b", "c")) <= budget
            for salt in tenants:
                used = held_tokens(table, tier, salt=salt, source=PinSource.REQUESTED)
                assert used <= budget / len(tenants)


@given(
    st.lists(texts, min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from("bcd"), texts), max_size=20),
)
def test_a_tenant_keeps_his_share_whatever_the_others_pin(mine: list[array], theirs):
    table = make_table(device_pages=400, share=0.5)
    for serial, tokens in enumerate(mine):
        table.add(make_pin(f"mine{serial}", tokens, "a"))
    alone = held_tokens(table, DEVICE, salt="a")
    for serial, (salt, tokens) in enumerate(theirs):
        table.add(make_pin(f"theirs{serial}", tokens, salt))
    tenants = 1 + len({salt for salt, _ in theirs})
    share = 200 // tenants * PAGE
    assert held_tokens(table, DEVICE, salt="a") == min(alone, share)


@given(st.lists(texts, min_size=1, max_size=10))
def test_a_later_pin_never_weakens_an_earlier_one_of_its_tenant(pinned: list[array]):
    table = make_table(device_pages=400, share=0.1)
    granted: dict[str, int] = {}
    for serial, tokens in enumerate(pinned):
        table.add(make_pin(str(serial), tokens))
        for name, pages in granted.items():
            assert table.get(name).granted[DEVICE] >= pages
        granted = {pin.pin_id: pin.granted[DEVICE] for pin in table.pins()}


def test_a_prefix_in_common_is_paid_for_once():
    table = make_table()  # 20 pages
    table.add(make_pin("long", text(0, 18)))
    table.add(make_pin("part", text(0, 10)))
    table.add(make_pin("other", text(5000, 5)))
    assert [pin.granted[DEVICE] for pin in table.pins()] == [18, 10, 2]


def test_pins_that_nobody_of_authority_asked_for_live_on_what_requested_ones_leave():
    table = make_table(host=100)  # 20 pages of each
    for salt in "bcd":
        table.add(make_pin(f"hint {salt}", text(0, 20), salt, source=PinSource.HINTED))
    assert table.granted_tokens(DEVICE) == 18 * PAGE
    table.add(make_pin("asked", text(0, 20), "a"))
    assert table.get("asked").granted[DEVICE] == 20
    assert table.granted_tokens(DEVICE) == 20 * PAGE
    table.remove("asked")
    assert table.get("hint b").granted[DEVICE] == 6


def test_salts_and_keys_never_share_pages():
    table = make_table()
    for serial, (key, salt) in enumerate([(None, None), ("k", None), (None, "k"), ("k", "k")]):
        table.add(Pin(str(serial), text(0, 1), key, salt))
    assert len({pin.digests[0] for pin in table.pins()}) == 4


# ---- bias ----


def test_the_bias_ends_where_the_share_ends_and_is_the_strongest_pin_s():
    table = make_table(host=200)  # 20 and 40 pages
    pin = make_pin("p", text(0, 30))
    table.add(pin)
    octaves = {tier: [table.octaves(digest, tier) for digest in pin.digests] for tier in (DEVICE, HOST)}
    assert octaves[DEVICE] == [PIN_OCTAVES] * 20 + [0.0] * 10
    assert octaves[HOST] == [PIN_OCTAVES] * 30
    table.advance(HALF_LIFE_REQUESTS, 0.0)
    table.add(make_pin("fresh", text(0, 5)))
    assert [table.octaves(digest, DEVICE) for digest in pin.digests[:6]] == [PIN_OCTAVES] * 5 + [
        PIN_OCTAVES / 2
    ]
    assert table.octaves(b"unknown", DEVICE) == 0.0


def test_an_unused_pin_fades_in_halves_and_ends():
    table = make_table()
    table.add(make_pin("p", text(0, 2)))
    seen = []
    for step in range(1, 9):
        assert table.advance(step * HALF_LIFE_REQUESTS - 1, 0.0) == []
        (changed,) = {pin.pin_id for pin in table.advance(step * HALF_LIFE_REQUESTS, 0.0)}
        assert changed == "p"
        seen.append(table.get("p").octaves if len(table) else 0.0)
    assert seen == [64, 32, 16, 8, 4, 2, 1, 0]
    assert len(table) == 0


def test_a_use_makes_a_pin_fresh_again():
    table = make_table()
    pin = make_pin("p", text(0, 2))
    table.add(pin)
    table.advance(3 * HALF_LIFE_REQUESTS, 0.0)
    assert pin.octaves == PIN_OCTAVES / 8
    assert table.used(pin.digests[1], 3 * HALF_LIFE_REQUESTS) == [pin]
    assert pin.octaves == PIN_OCTAVES
    assert table.advance(4 * HALF_LIFE_REQUESTS - 1, 0.0) == []
    assert table.advance(4 * HALF_LIFE_REQUESTS, 0.0) == [pin]


def test_a_lifetime_counts_in_full_to_its_end():
    table = make_table()
    table.add(make_pin("p", text(0, 2), expires_at=60.0))
    assert table.advance(100 * HALF_LIFE_REQUESTS, 59.9) == []
    assert table.get("p").octaves == PIN_OCTAVES
    (ended,) = table.advance(100 * HALF_LIFE_REQUESTS, 60.0)
    assert ended.granted == {DEVICE: 0}
    assert table.octaves(ended.digests[0], DEVICE) == 0.0
    assert len(table) == 0


@pytest.mark.parametrize("given_up", [0, 10**7])
def test_the_bias_is_more_than_losses_can_differ_by(given_up: int):
    """The least that a pinned node can lose, against the most that another can."""
    policy = ImportancePolicy(COST)
    pinned = NodeMetadata(tokens=PAGE, depth=0, page_size=PAGE, clock=0)
    hot = NodeMetadata(tokens=PAGE, depth=1_000_000, page_size=PAGE, clock=0)
    hot.block_type, hot.transition = BlockType.SHARED_PREFIX, Transition.NEXT_TURN
    hits, reached = policy.reuse.counts()
    reached[[pinned.reuse_class, hot.reuse_class]] = given_up
    hits[hot.reuse_class] = given_up
    policy.reuse.restore(hits, reached, 0)
    least = min(policy.reuse.bucket_index(pinned.reuse_class))
    most = max(policy.reuse.bucket_index(hot.reuse_class))
    pinned.pin_octaves = {DEVICE: PIN_OCTAVES}
    assert least * policy.value(DEVICE, pinned, below=HOST) > 1e3 * most * policy.value(
        DEVICE, hot, below=None
    )


# ---- limits ----


def test_text_shorter_than_a_page_is_refused_and_a_tail_is_left_out():
    table = make_table()
    with pytest.raises(PinRefused, match="shorter than one page of 4 tokens"):
        table.add(make_pin("p", array("q", [1, 2, 3])))
    table.add(make_pin("p", array("q", range(7))))
    assert len(table.get("p").tokens) == 4


def test_the_table_is_bounded_for_each_tenant_and_in_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pin_room, "MAX_PINS_PER_TENANT", 2)
    monkeypatch.setattr(pin_room, "MAX_TENANTS", 2)
    table = make_table()
    with pytest.raises(PinRefused, match="the largest tier is 400: unpin some"):
        table.add(make_pin("big", text(0, 101), "a"))
    table.add(make_pin("1", text(0, 1), "a"))
    table.add(make_pin("2", text(0, 1), "a"))
    with pytest.raises(PinRefused, match="holds 2 pins already"):
        table.add(make_pin("3", text(0, 1), "a"))
    table.add(make_pin("3", text(0, 1), "b"))
    with pytest.raises(PinRefused, match="2 cache salts hold pins already: unpin"):
        table.add(make_pin("4", text(0, 1), "c"))
    table.check_integrity()


def test_a_client_who_cannot_unpin_is_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_room, "MAX_TENANTS", 2)
    table = make_table()
    for salt in ("a", "b"):
        table.add(make_pin(salt, text(0, 1), salt, source=PinSource.HINTED, expires_at=60.0))
    with pytest.raises(PinRefused, match=r"requests of 2 cache salts .* use one of these, or ask again"):
        table.add(make_pin("c", text(0, 1), "c", source=PinSource.HINTED, expires_at=60.0))
    table.check_integrity()


# ---- across a restart ----


def again(table: PinTable) -> list[Pin]:
    """The pins that outlive the table, as another process reads them."""
    kept = table.requested()
    return [Pin(pin.pin_id, pin.tokens[:], pin.extra_key, pin.cache_salt, pin.expires_at) for pin in kept]


def test_pins_that_were_asked_for_are_restored_but_for_what_ended():
    table = make_table()
    table.add(make_pin("kept", text(0, 3), "a"))
    table.add(make_pin("short", text(50, 3), expires_at=10.0))
    table.add(make_pin("long", text(90, 3), expires_at=1000.0))
    table.add(make_pin("hint", text(0, 3), source=PinSource.HINTED))
    restarted = make_table()
    restarted.advance(0, 100.0)
    assert {pin.pin_id for pin in restarted.restore(again(table))} == {"kept", "long"}
    assert [pin.pin_id for pin in restarted.pins()] == ["kept", "long"]
    assert restarted.get("kept").digests == chain_digests(root_digest(None, "a"), text(0, 3), PAGE)
    assert restarted.get("kept").granted == {DEVICE: 3}
    assert restarted.get("long").expires_at == 1000.0
    restarted.restore(again(table))
    assert len(restarted) == 2
    restarted.check_integrity()
    assert restarted.advance(0, 1000.0)[0].pin_id == "long"
    smaller = make_table(device_pages=2)
    smaller.restore(again(table))
    assert len(smaller) == 0

"""What a session that is over gives back, on a real tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_importance.misses.reason import Reason
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import PinOptions
from sgl_importance.placement.hints.hints import Hints
from sgl_importance.tiers import Tier
from sglang_importance.operations.handlers import OPERATIONS
from sglang_importance.upstream.request_record import record_of

from support.doubles.lower_tiers import LowerTiers
from support.drivers.hinted_requests import envelope
from support.drivers.tree_driver import PAGE, Request, TreeDriver
from support.drivers.tree_requests import path_of, prompt

SHARED = prompt(0, 3)


def begin(driver: TreeDriver, tokens: list[int], session: str | None, salt: str | None = None) -> Request:
    request = driver.admit(tokens)
    request.session_id, request.cache_salt = session, salt
    driver.prefill(request)
    return request


def ask(driver: TreeDriver, tokens: list[int], session: str | None, **hints: Any) -> Request:
    request = driver.admit(tokens)
    request.session_id = session
    if hints:
        request.kv_hints = envelope(**hints)
    driver.prefill(request)
    driver.decode(request, [7])
    driver.finish(request)
    return request


def close(driver: TreeDriver, session: str, salt: str | None = None, *, at_once: bool = False) -> Any:
    name = {"session_id": session, "extra_key": None, "cache_salt": salt, "at_once": at_once}
    return OPERATIONS["close_session"](driver.cache, name)


def evict(driver: TreeDriver, pages: int) -> None:
    driver.cache.evict(EvictParams(num_tokens=pages * PAGE))


def facts(driver: TreeDriver, tokens: list[int]) -> list[NodeMetadata]:
    return [metadata for _, metadata in path_of(driver, tokens)]


def resident(driver: TreeDriver, tokens: list[int]) -> int:
    return sum(metadata.tokens for metadata in facts(driver, tokens)) // PAGE


def test_a_closed_sessions_own_pages_leave_before_older_ones() -> None:
    driver = TreeDriver()
    ask(driver, prompt(200, 3), "older")
    first, second = [*SHARED, *prompt(100, 2)], [*SHARED, *prompt(100, 4)]
    ask(driver, first, "a")
    ask(driver, second, "a")
    ask(driver, [*SHARED, *prompt(300, 2)], "b")
    assert close(driver, "a") == {
        "session_id": "a",
        "was_open": True,
        "is_opened": False,
        "given_back_tokens": {"device": 4 * PAGE, "host": 0},
    }
    evict(driver, 4)
    assert (resident(driver, second), resident(driver, prompt(200, 3))) == (3, 3)
    assert not any(metadata.expendable for metadata in facts(driver, SHARED))
    evicted = driver.component.state.counters.evicted_tokens
    assert sum(tokens for (_, why), tokens in evicted.items() if why == "session_over") == 4 * PAGE
    assert driver.component.state.counters.sessions_given_back_tokens == 4 * PAGE
    driver.cache.sanity_check()


@pytest.mark.parametrize("other", ["b", None])
def test_what_somebody_else_asked_for_stays(other: str | None) -> None:
    driver = TreeDriver()
    ask(driver, SHARED, "a")
    ask(driver, SHARED, other)
    assert close(driver, "a")["given_back_tokens"]["device"] == 0
    assert not facts(driver, SHARED)[0].expendable


def test_at_once_frees_what_no_running_request_holds_and_nothing_else() -> None:
    driver = TreeDriver()
    ask(driver, prompt(200, 3), "older")
    ask(driver, prompt(100, 2), "a")
    ask(driver, prompt(400, 4), "a")
    running = begin(driver, prompt(100, 2), "a")
    assert close(driver, "a", at_once=True)["given_back_tokens"] == {"device": 4 * PAGE, "host": 0}
    assert [resident(driver, prompt(start, 4)) for start in (400, 100, 200)] == [0, 2, 3]
    assert driver.component.state.counters.evicted_from(Tier.DEVICE) == 4 * PAGE
    driver.decode(running, [7])
    driver.finish(running)
    assert all(metadata.is_given_back for metadata in facts(driver, prompt(100, 2)))
    driver.cache.sanity_check()


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_at_once_frees_the_host_too(write_policy: str) -> None:
    driver = TreeDriver(tokens=128, options=ImportanceOptions(policy="importance"))
    tiers = LowerTiers.attach(driver.cache, host_tokens=192, write_policy=write_policy)
    driver.filter_backups()
    for _ in range(2):
        ask(driver, prompt(0, 3), "a")
    ask(driver, prompt(100, 3), "b")
    tiers.settle(driver.cache)
    evict(driver, 6)
    tiers.settle(driver.cache)
    assert sum(len(node.key) for node in driver.all_nodes() if node.backuped) == 6 * PAGE
    assert close(driver, "a", at_once=True)["given_back_tokens"] == {"device": 0, "host": 3 * PAGE}
    assert (resident(driver, prompt(0, 3)), resident(driver, prompt(100, 3))) == (0, 3)
    driver.cache.sanity_check()


def missed(driver: TreeDriver, tokens: list[int]) -> dict[tuple[str, Tier | None], int]:
    """Tokens that a request for these would not find, by reason and by the tier that had them."""
    account = record_of(begin(driver, tokens, None)).misses
    assert account is not None
    tokens: dict[tuple[str, Tier | None], int] = {}
    for part in account.account.parts:
        if part.reason is not Reason.SHORT:
            why = part.reason.value, part.fate and part.fate.tier
            tokens[why] = tokens.get(why, 0) + part.tokens
    return tokens


class Looked(list[Any]):
    """Counts its elements as they are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.looks += 1
            yield each


def test_at_once_looks_at_each_node_once() -> None:
    driver = TreeDriver(tokens=1024)
    for number in range(20):
        ask(driver, prompt(1000 * number, 3), None)
    nodes = Looked(driver.all_nodes())
    assert len(nodes) == 20
    with driver.component.evicting_only(nodes):
        for node in list(nodes)[:10]:
            driver.back_up(node.id)
        nodes.looks = 0
        assert driver.evict(20 * 3 * PAGE) == 20 * 3 * PAGE
        assert nodes.looks == 20
        driver.evict_host(10 * 3 * PAGE)
        assert nodes.looks == 20 + 10
    assert not list(driver.all_nodes())
    driver.cache.sanity_check()


@pytest.mark.parametrize("at_once", [True, False])
def test_who_misses_a_closed_sessions_pages_is_told_so(at_once: bool) -> None:
    driver = TreeDriver()
    ask(driver, prompt(100, 4), "a")
    ask(driver, prompt(200, 3), "b")
    close(driver, "a", at_once=at_once)
    evict(driver, 4)
    assert missed(driver, [*prompt(100, 4), 1]) == {("session_over", Tier.DEVICE): 4 * PAGE}
    evict(driver, 100)
    assert missed(driver, [*prompt(200, 3), 1]) == {("evicted", Tier.DEVICE): 3 * PAGE}


@pytest.mark.parametrize("storage", [True, False])
def test_so_is_who_misses_what_lay_on_host_and_storage(storage: bool) -> None:
    driver = TreeDriver(tokens=128, options=ImportanceOptions(policy="importance"))
    tiers = LowerTiers.attach(driver.cache, host_tokens=192, write_policy="write_through", storage=storage)
    driver.filter_backups()
    for session, start in (("a", 0), ("b", 100)) * 2:
        ask(driver, prompt(start, 3), session)
        tiers.settle(driver.cache)
    evict(driver, 6)
    assert {node.backuped and node.evicted for node in driver.all_nodes()} == {True}
    close(driver, "a", at_once=True)
    assert resident(driver, prompt(0, 3)) == 0
    lay = Tier.STORAGE if storage else Tier.HOST
    assert missed(driver, [*prompt(0, 3), 1]) == {("session_over", lay): 3 * PAGE}
    driver.cache.evict_host(100)
    lost = ("storage" if storage else "evicted", Tier.HOST)
    assert missed(driver, [*prompt(100, 3), 1]) == {lost: 3 * PAGE}


def test_another_namespaces_session_of_the_same_name_is_not_touched() -> None:
    driver = TreeDriver()
    for salt in ("x", "y", None):
        request = begin(driver, prompt(0, 3), "a", salt)
        driver.finish(request)
    assert close(driver, "a", "x", at_once=True)["given_back_tokens"]["device"] == 3 * PAGE
    assert not close(driver, "a", "x")["was_open"]
    assert not close(driver, "a", "z", at_once=True)["was_open"]
    assert sorted(node.key.cache_salt or "" for node in driver.all_nodes()) == ["", "y"]
    assert not any(driver.component.state.tree.metadata(node).expendable for node in driver.all_nodes())


def test_a_session_under_an_empty_key_is_closed_without_one() -> None:
    driver = TreeDriver()
    request = driver.admit(prompt(0, 3))
    request.session_id, request.extra_key = "a", ""
    driver.prefill(request)
    driver.finish(request)
    assert close(driver, "a")["was_open"]


def test_who_comes_back_is_a_new_session_and_keeps_what_it_finds() -> None:
    driver = TreeDriver()
    ask(driver, prompt(0, 3), "a")
    close(driver, "a")
    ask(driver, prompt(0, 5), "a")
    assert not any(metadata.expendable for metadata in facts(driver, prompt(0, 5)))
    assert close(driver, "a")["given_back_tokens"]["device"] == 5 * PAGE


def test_a_shared_prefix_that_came_back_from_a_ghost_is_shared_still() -> None:
    driver = TreeDriver()
    ask(driver, SHARED, "a")
    ask(driver, SHARED, "b")
    evict(driver, 3)
    assert resident(driver, SHARED) == 0
    ask(driver, [*SHARED, *prompt(100, 2)], "a")
    assert close(driver, "a")["given_back_tokens"]["device"] == 0  # one node: its front is others', too


def test_what_is_left_of_a_session_is_given_back_when_its_last_node_went_before() -> None:
    driver = TreeDriver()
    ask(driver, prompt(0, 2), "a")
    ask(driver, prompt(0, 4), "a")
    evict(driver, 1)
    assert resident(driver, prompt(0, 4)) == 2
    assert close(driver, "a")["given_back_tokens"]["device"] == 2 * PAGE


def test_the_turns_of_a_closed_session_are_over_and_shared_text_is_ranked_by_itself() -> None:
    driver = TreeDriver()
    ask(driver, SHARED, "b", answer_end="end_of_turn")
    ask(driver, [*SHARED, *prompt(100, 2)], "a", answer_end="tool_call")
    shared, own = facts(driver, [*SHARED, *prompt(100, 2)])
    turn = own.turn
    assert turn is not None
    assert turn.is_open
    assert shared.turn is turn
    close(driver, "a")
    assert not turn.is_open
    assert shared.turn is None
    policy = driver.component.state.policy
    assert policy.reuse_probability(own) == 0.0
    assert policy.reuse_probability(shared) > 0.0


def test_a_retain_of_the_closed_session_alone_ends_with_it() -> None:
    options = ImportanceOptions(policy="importance", pins=PinOptions(budget=0.5))
    driver = TreeDriver(options=options)
    retain = {"ttl_seconds": 60.0}
    ask(driver, prompt(0, 3), "a", retain=retain)
    ask(driver, prompt(100, 3), "a", retain=retain)
    ask(driver, prompt(100, 3), "b", retain=retain)
    close(driver, "a")
    (pin,) = driver.component.pins.current()
    assert list(pin.tokens) == prompt(100, 3)
    driver.cache.sanity_check()


def test_under_observe_nothing_moves_and_the_turns_are_told() -> None:
    driver = TreeDriver(options=ImportanceOptions(policy="observe"))
    ask(driver, prompt(0, 3), "a", answer_end="end_of_turn")
    (own,) = facts(driver, prompt(0, 3))
    assert close(driver, "a", at_once=True)["given_back_tokens"]["device"] == 0
    assert not own.expendable
    assert own.turn is not None
    assert not own.turn.is_open


# ---- by hints ----


def test_the_last_request_of_a_session_says_so_itself() -> None:
    driver = TreeDriver()
    ask(driver, prompt(0, 3), "a")
    ask(driver, prompt(0, 4), "a", session_over=True)
    assert all(metadata.is_given_back for metadata in facts(driver, prompt(0, 4)))
    assert not close(driver, "a")["was_open"]


def shared_envelope(*actions: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    given = [
        {"action_id": str(number), "action_type": kind, "action_version": version, "payload": payload}
        for number, (kind, version, payload) in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": given}


def test_shared_actions_are_followed_or_ignored_and_counted() -> None:
    driver = TreeDriver(options=ImportanceOptions(policy="importance", pins=PinOptions(budget=0.5)))
    retain = {"directives": [{"end": 2 * PAGE, "priority": 50, "duration": 60.0}]}
    given = shared_envelope(
        ("kv.retain", "1.0", retain),
        ("kv.prefetch", "1.0", {}),
        ("kv.deref", "2.0", {}),
        ("acme.warm", "1", {"x": 1}),
    )
    for session in ("a", None):
        request = driver.admit(prompt(0, 3))
        request.session_id = session
        request.kv_hints = envelope_of(given)
        driver.prefill(request)
        driver.decode(request, [7])
        driver.finish(request)
        given = shared_envelope(("kv.deref", "1.0", {}))  # without a session: ignored
    counted = driver.component.state.counters.hint_actions
    assert {name: count for name, count in counted.items() if count} == {
        ("kv.retain", "followed"): 1,
        ("kv.prefetch", "ignored"): 1,
        ("kv.deref", "ignored"): 2,
        ("other", "ignored"): 1,
    }
    (pin,) = driver.component.pins.current()
    assert list(pin.tokens) == prompt(0, 2)


def envelope_of(value: dict[str, Any]) -> Any:
    return decode_kv_hints_envelope(Hints.parse(value).envelope(value))


def test_a_dereference_closes_the_session_of_its_request() -> None:
    driver = TreeDriver()
    ask(driver, prompt(0, 3), "a")
    request = driver.admit(prompt(0, 4))
    request.session_id = "a"
    request.kv_hints = envelope_of(shared_envelope(("kv.deref", "1.0", {})))
    driver.prefill(request)
    driver.decode(request, [7])
    driver.finish(request)
    assert all(metadata.is_given_back for metadata in facts(driver, prompt(0, 4)))
    assert driver.component.state.counters.hint_actions["kv.deref", "followed"] == 1


def test_a_demoted_prompt_leaves_the_device_first_and_stays_on_the_host() -> None:
    driver = TreeDriver(tokens=128, options=ImportanceOptions(policy="importance"))
    tiers = LowerTiers.attach(driver.cache, host_tokens=192, write_policy="write_through", storage=False)
    driver.filter_backups()
    shared, own = prompt(0, 3), [*prompt(0, 3), *prompt(100, 3)]
    ask(driver, shared, "b")
    ask(driver, prompt(200, 3), "b")
    request = driver.admit(own)
    request.session_id, request.kv_hints = "a", envelope_of(shared_envelope(("kv.demote", "1.0", {})))
    driver.prefill(request)
    driver.finish(request)
    ask(driver, prompt(300, 3), "b")
    tiers.settle(driver.cache)
    evict(driver, 3)
    (demoted,) = [node for node in driver.all_nodes() if node.evicted]
    assert (demoted.backuped, list(demoted.key.token_ids)) == (True, prompt(100, 3))
    assert driver.component.state.counters.hint_actions["kv.demote", "followed"] == 1
    ask(driver, own, "a")  # it comes back, and is worth what any other text is
    assert not any(metadata.is_demoted for metadata in facts(driver, own))
    driver.cache.sanity_check()


@pytest.mark.parametrize("policy", ["importance", "observe"])
def test_a_demotion_that_nothing_follows_says_why(policy: str) -> None:
    driver = TreeDriver(options=ImportanceOptions(policy=policy))
    ask(driver, SHARED, "b")
    driver.core.enable_hicache = False
    request = ask(driver, SHARED, "a", demote=True)
    hinted = record_of(request).hinted
    assert hinted is not None
    assert not hinted.outcome["demote"]["applied"]
    assert "host tier" in hinted.outcome["demote"]["reason"] or policy == "observe"

"""How an answer ended, on the nodes of a real tree."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from sgl_importance.misses.reason import Reason
from sgl_importance.nodes.digests import chain_digests, root_digest
from sgl_importance.nodes.node_metadata import NodeMetadata
from sgl_importance.observe.shadow.shadow_cache import ShadowCache
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.observe.shadow.shadow_ranking import ImportanceRanking
from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.arrivals import arrivals
from sgl_importance.observe.trace.records import AnswerTold, RequestFinished
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.placement.hints.hints import Hints
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.reuse.answer_end import MAX_AWAITED, AnswerEnd, AnswerMarkers
from sgl_importance.reuse.reuse_class import BlockType, answer_end_of
from sgl_importance_lab.replay.formats.detect import read_trace
from sglang_importance.observe.recorder import Recorder
from sglang_importance.operations.parsed_answers import answered
from sglang_importance.operations.snapshot import describe_node
from sglang_importance.placement.answer_ends import AnswerEnds
from sglang_importance.upstream.request_record import record_of

from support.drivers.ledgered_tree import prewarm, start, weights_loaded
from support.drivers.shadowed_tree import settle, shadowed
from support.drivers.tree_driver import PAGE, Request, TreeDriver
from support.drivers.tree_requests import path_of, prompt
from support.nightly_cases import rest_nightly
from support.workloads.recordings import COST

MARKER = 99_999
POOL_TOKENS = 1 << 14
ROOM_PAGES = 60
"""Of a pool that never fills: what is beyond it is evicted after each request."""


def with_tools(driver: TreeDriver, *markers: int, mark_every_call: bool) -> TreeDriver:
    """As installed on a server whose parser these markers belong to."""
    component = driver.component
    found = AnswerMarkers(frozenset(markers), mark_every_call=mark_every_call)
    component.requests.answer_ends = AnswerEnds(found, component.state.tree, component.leaves.refresh)
    return driver


def tool_server(driver: TreeDriver) -> TreeDriver:
    return with_tools(driver, MARKER, mark_every_call=True)


def serve(driver: TreeDriver, tokens: list[int], *, calls: bool, reason: str = "stop") -> Request:
    """One request; its answer fills a page."""
    request = driver.admit(tokens)
    driver.prefill(request)
    driver.decode(request, [*range(tokens[0] + 1000, tokens[0] + 1000 + PAGE - 1), MARKER if calls else 5, 6])
    request.finished_reason = SimpleNamespace(to_json=lambda: {"type": reason})
    driver.finish(request)
    return request


def ends(driver: TreeDriver, tokens: list[int]) -> list[AnswerEnd]:
    return [metadata.answer_end for _, metadata in path_of(driver, tokens)]


def test_what_was_accepted_behind_the_stop_says_nothing() -> None:
    """A step that verifies drafts may take in more than the answer; it is right, and never shown."""
    driver = tool_server(TreeDriver())
    request = driver.admit(prompt(0, 3))
    driver.prefill(request)
    driver.decode(request, [*range(1000, 1000 + PAGE), MARKER, 5])
    request.finished_len = PAGE
    driver.finish(request)
    assert set(ends(driver, [*request.origin_input_ids, *request.output_ids])) == {AnswerEnd.END_OF_TURN}


@pytest.mark.parametrize(
    ("calls", "reason", "end"),
    [
        (True, "stop", AnswerEnd.TOOL_CALL),
        (False, "stop", AnswerEnd.END_OF_TURN),
        (True, "length", AnswerEnd.LENGTH),
        (False, "abort", AnswerEnd.ABORT),
    ],
)
def test_an_end_becomes_a_fact_of_the_whole_path(calls: bool, reason: str, end: AnswerEnd) -> None:
    driver = tool_server(TreeDriver())
    request = serve(driver, prompt(0, 3), calls=calls, reason=reason)
    path = path_of(driver, [*request.origin_input_ids, *request.output_ids])
    assert [metadata.block_type for _, metadata in path] == [BlockType.USER, BlockType.GENERATED]
    for node, metadata in path:
        assert metadata.answer_end is end
        assert metadata.at_risk_as == metadata.reuse_class
        assert answer_end_of(metadata.reuse_class) is end
        described = describe_node(driver.component, node, loss=0.0, p_reuse=0.0)
        assert described["answer_end"] == end.name.lower()
    driver.cache.sanity_check()


def test_the_next_request_takes_it_back_until_it_ends_too() -> None:
    driver = tool_server(TreeDriver())
    first = serve(driver, prompt(0, 3), calls=True)
    turn = [*first.origin_input_ids, *first.output_ids, *prompt(200, 2)]
    running = driver.admit(turn)
    driver.prefill(running)
    path = driver.component.state.tree.path_to(running.last_node)
    assert {driver.component.state.tree.metadata(node).answer_end for node in path} == {AnswerEnd.UNKNOWN}
    driver.decode(running, [1, 2])
    driver.finish(running)
    assert set(ends(driver, turn)) == {AnswerEnd.END_OF_TURN}


def test_a_prefix_that_sessions_share_does_not_follow_one_of_them() -> None:
    driver = tool_server(TreeDriver())
    system = prompt(0, 3)
    for session in range(3):
        serve(driver, [*system, *prompt(100 * (session + 1), 2)], calls=session == 0)
    shared, own = (metadata for _, metadata in path_of(driver, [*system, *prompt(100, 2)]))
    assert shared.block_type is BlockType.SHARED_PREFIX
    assert answer_end_of(shared.reuse_class) is AnswerEnd.UNKNOWN
    assert answer_end_of(own.reuse_class) is AnswerEnd.TOOL_CALL


def test_a_hint_overrides_what_was_seen_and_needs_no_parser() -> None:
    for driver in (TreeDriver(), tool_server(TreeDriver())):
        request = driver.admit(prompt(0, 3))
        request.kv_hints = decode_kv_hints_envelope(Hints(answer_end="end_of_turn").envelope())
        driver.prefill(request)
        driver.decode(request, [MARKER])
        driver.finish(request)
        assert ends(driver, prompt(0, 3)) == [AnswerEnd.END_OF_TURN]


def test_a_retracted_request_has_not_ended() -> None:
    driver = tool_server(TreeDriver())
    request = driver.admit(prompt(0, 3))
    driver.prefill(request)
    driver.retract(request)
    assert ends(driver, prompt(0, 3)) == [AnswerEnd.UNKNOWN]


def test_what_is_learnt_of_an_end_moves_its_nodes_only() -> None:
    """Sessions go on after a tool's call, and never after a turn."""
    driver = tool_server(TreeDriver(tokens=1 << 14, requests=4))
    for session in range(60):
        calls = session % 2 == 0
        request = serve(driver, prompt(100 * session, 2), calls=calls)
        if calls:
            text = [*request.origin_input_ids, *request.output_ids, *prompt(10**6 + 100 * session, 2)]
            serve(driver, text, calls=False)
    called = serve(driver, prompt(2 * 10**6, 2), calls=True)
    turned = serve(driver, prompt(3 * 10**6, 2), calls=False)
    policy = driver.component.state.policy

    def probability(request: Request) -> float:
        metadata: NodeMetadata = path_of(driver, [*request.origin_input_ids, *request.output_ids])[-1][1]
        return policy.reuse.probability_within(metadata.reuse_class, 1, 8)

    assert probability(called) > 0.9
    assert probability(turned) < 0.2


def test_it_survives_in_ghosts_and_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with weights_loaded(monkeypatch):
        driver = tool_server(start(tmp_path / "l.sqlite"))
        tokens = prompt(0, 3)
        serve(driver, tokens, calls=True)
        driver.evict(10**6)
        assert not list(driver.all_nodes())
        prewarm(driver, [*tokens, 0])
        assert ends(driver, tokens) == [AnswerEnd.TOOL_CALL]
        driver.component.ledger.close()
        again = start(tmp_path / "l.sqlite")
        prewarm(again, [*tokens, 0])
        assert ends(again, tokens) == [AnswerEnd.TOOL_CALL]


def test_what_the_http_process_parses_is_told_later() -> None:
    driver = with_tools(TreeDriver(), mark_every_call=False)
    first, second = (serve(driver, prompt(1000 * number, 3), calls=True) for number in (1, 2))
    assert ends(driver, prompt(1000, 3)) == [AnswerEnd.UNKNOWN]
    answered(driver.cache, {"ends": {first.rid: int(AnswerEnd.TOOL_CALL), "another server's": 2}})
    path = path_of(driver, [*first.origin_input_ids, *first.output_ids])
    assert {metadata.answer_end for _, metadata in path} == {AnswerEnd.TOOL_CALL}
    assert all(metadata.at_risk_as == metadata.reuse_class for _, metadata in path)
    answered(driver.cache, {"ends": {first.rid: int(AnswerEnd.END_OF_TURN)}})  # a second report of one answer
    assert ends(driver, prompt(1000, 3)) == [AnswerEnd.TOOL_CALL]
    assert ends(driver, prompt(2000, 3)) == [AnswerEnd.UNKNOWN]
    driver.evict(10**6)
    answered(driver.cache, {"ends": {second.rid: int(AnswerEnd.TOOL_CALL)}})  # its nodes are gone
    driver.cache.sanity_check()
    answered(TreeDriver().cache, {"ends": {first.rid: 1}})  # a server without tools is told nothing


def test_a_report_that_comes_behind_the_next_request_is_not_taken() -> None:
    driver = with_tools(TreeDriver(), mark_every_call=False)
    first = serve(driver, prompt(0, 3), calls=True)
    turn = [*first.origin_input_ids, *first.output_ids, *prompt(200, 2)]
    serve(driver, turn, calls=False)
    answered(driver.cache, {"ends": {first.rid: int(AnswerEnd.TOOL_CALL)}})
    assert set(ends(driver, turn)) == {AnswerEnd.UNKNOWN}


def test_ends_that_nobody_tells_are_forgotten() -> None:
    driver = with_tools(TreeDriver(), mark_every_call=False)
    request = serve(driver, prompt(0, 3), calls=True)
    for number in range(MAX_AWAITED):
        driver.component.requests.answer_ends.await_end(f"lost {number}", None, 1, None)
    answered(driver.cache, {"ends": {request.rid: int(AnswerEnd.TOOL_CALL)}})
    assert ends(driver, prompt(0, 3)) == [AnswerEnd.UNKNOWN]


def victims(driver: TreeDriver, seed: int) -> list[tuple[tuple[int, ...], ...]]:
    """Serves sessions in a small pool; what is left of the tree after each request."""
    rng = Random(seed)
    texts: list[list[int]] = []
    left = []
    for number in range(120):
        if texts and rng.random() < 0.6:
            text = [*texts.pop(rng.randrange(len(texts))), *prompt(1000 * number, rng.randint(1, 3))]
        else:
            text = [*prompt(0, rng.randint(1, 2)), *prompt(1000 * number, rng.randint(1, 4))]
        request = serve(driver, text[:160], calls=rng.random() < 0.5)
        texts.append([*request.origin_input_ids, *request.output_ids])
        left.append(tuple(sorted(tuple(node.key.raw_token_ids()) for node in driver.all_nodes())))
    return left


@pytest.mark.parametrize("seed", rest_nightly(range(3)))
def test_a_server_without_tools_evicts_as_if_there_were_no_ends(seed: int) -> None:
    plain = victims(TreeDriver(), seed)
    # As a parser whose calls have no tokens: whatever it sees, it says nothing.
    assert victims(with_tools(TreeDriver(), mark_every_call=False), seed) == plain
    assert victims(tool_server(TreeDriver()), seed) != plain, "ends do move victims"


# ---- turns ----


def test_what_a_session_goes_on_without_is_evicted_first() -> None:
    """An edit leaves the rest of a text behind: it goes before what others used longer ago."""
    driver = tool_server(TreeDriver(requests=4))
    serve(driver, prompt(5000, 4), calls=True)
    text = [*prompt(0, 6)]
    first = serve(driver, text, calls=True)
    left = path_of(driver, [*first.origin_input_ids, *first.output_ids])[-1][0]
    serve(driver, [*text[: 4 * PAGE], *prompt(300, 3)], calls=True)
    policy = driver.component.state.policy
    assert driver.component.leaves.loss(left) == 0.0
    assert policy.reuse_probability(driver.component.state.tree.metadata(left)) == 0.0
    driver.evict(PAGE)
    assert left not in list(driver.all_nodes())
    assert len(path_of(driver, prompt(5000, 4))) == 1
    driver.cache.sanity_check()


def test_a_turn_whose_end_is_told_later_is_of_that_end_from_then_on() -> None:
    driver = with_tools(TreeDriver(), mark_every_call=False)
    first = serve(driver, prompt(3000, 2), calls=True)
    (turn,) = {metadata.turn for _, metadata in path_of(driver, prompt(3000, 2))}
    assert turn is not None
    assert not turn.ranks
    answered(driver.cache, {"ends": {first.rid: int(AnswerEnd.TOOL_CALL)}})  # from here on, turns rank
    request = serve(driver, prompt(0, 3), calls=False)
    (turn,) = {metadata.turn for _, metadata in path_of(driver, prompt(0, 3))}
    assert turn is not None
    assert turn.ranks
    before = turn.turn_class
    answered(driver.cache, {"ends": {request.rid: int(AnswerEnd.END_OF_TURN)}})
    assert turn.turn_class > before
    driver.cache.sanity_check()


def test_an_account_of_misses_has_the_prediction_by_which_a_node_was_evicted() -> None:
    """A session goes on without its answer, so that this earns nothing, whatever others of its class do."""
    driver = tool_server(TreeDriver())
    component = driver.component
    first = serve(driver, prompt(0, 3), calls=True)
    whole = [*first.origin_input_ids, *first.output_ids]
    serve(driver, [*prompt(0, 3), *prompt(500, 1)], calls=True)
    *_, (_, answer) = path_of(driver, whole)
    assert answer.ranking_turn is not None
    assert not answer.ranking_turn.is_open
    policy = component.state.policy
    assert policy.reuse.index(answer.reuse_class, policy.clock - answer.last_access) > 0
    driver.evict(10**6)
    missed = serve(driver, whole, calls=True)
    accounted = record_of(missed).misses
    assert accounted is not None
    lost = [part.fate for part in accounted.account.parts if part.fate is not None]
    assert {fate.reason for fate in lost} == {Reason.EVICTED}
    assert [fate.reuse == 0 for fate in lost] == [False, True], (
        "the prompt, which the session kept, and the answer"
    )


@pytest.mark.parametrize("seed", rest_nightly(range(3)))
@pytest.mark.parametrize("late", [False, True])
def test_a_shadow_finds_what_the_server_finds(late: bool, seed: int) -> None:
    """Sessions go on, edit, share a first text, and are evicted in between.

    Args:
        late: whether what no marker says is told up to five requests later, if at all.
    """
    driver = TreeDriver(tokens=POOL_TOKENS, requests=4)
    driver = with_tools(driver, MARKER, mark_every_call=False) if late else tool_server(driver)
    policy = driver.component.state.policy
    ghost_pages = driver.component.state.tree.ghosts.capacity_pages
    ranking = ImportanceRanking(policy.cost, PAGE, ghost_pages)
    shadow = ShadowCache(POOL_TOKENS // PAGE, PAGE, ranking)
    rng = Random(seed)
    texts: list[list[int]] = []
    untold: list[tuple[int, str, str]] = []  # request to tell behind, id on the server, name in the shadow
    gone_on = told = 0
    for number in range(200):
        draw = rng.random()
        text = texts.pop(rng.randrange(len(texts))) if texts and draw < 0.8 else prompt(0, rng.randint(1, 2))
        if draw < 0.2:
            text = text[: rng.randrange(0, len(text), PAGE)]
        text = [*text[: 30 * PAGE], *prompt(1000 * (number + 1), rng.randint(1, 3))]
        calls = rng.random() < 0.5
        found = shadow.admit(str(number), _digests(text), len(text))
        request = serve(driver, text, calls=calls)
        assert request.cached_tokens_device == found, number
        whole = [*request.origin_input_ids, *request.output_ids]
        end = AnswerEnd.TOOL_CALL if calls else AnswerEnd.UNKNOWN if late else AnswerEnd.END_OF_TURN
        shadow.finish(str(number), _digests(whole), len(whole), end)
        if end is AnswerEnd.UNKNOWN and rng.random() < 0.9:
            untold.append((number + rng.randrange(6), request.rid, str(number)))
        for _, rid, name in (due := [each for each in untold if each[0] <= number]):
            answered(driver.cache, {"ends": {rid: int(AnswerEnd.END_OF_TURN)}})
            shadow.told(name, AnswerEnd.END_OF_TURN)
        untold = [each for each in untold if each not in due]
        told += len(due)
        texts = [*texts[-6:], whole]  # of more, few go on before they are evicted
        gone_on += sum(1 for node in driver.all_nodes() if _has_gone_on(driver, node))
        while shadow.used > ROOM_PAGES:
            driver.evict(1)
            shadow.evict(1)
        policy.check_integrity()
        ranking.policy.check_integrity()
    assert gone_on > 20
    assert policy.turns.version > 5
    assert late == (told > 50)
    np.testing.assert_array_equal(ranking.policy.turns.index, policy.turns.index)
    np.testing.assert_array_equal(ranking.policy.reuse.counts(), policy.reuse.counts())
    assert ranking.policy.reuse.open_intervals() == policy.reuse.open_intervals()


def test_shadows_and_the_recording_hear_what_is_told_later(tmp_path: Path) -> None:
    recorder = Recorder(
        tmp_path,
        ImportanceOptions(policy="observe"),
        page_size=PAGE,
        model="none",
        layers=(),
        device_tokens=256,
        cost=CostModel(**COST),
    )
    driver = with_tools(TreeDriver("observe", recorder=recorder), mark_every_call=False)
    pair = ShadowPair(256 // PAGE, PAGE, driver.component.state.policy.cost, 256)
    shadowing = shadowed(driver.component, pair)
    told, _ = (serve(driver, prompt(1000 * number, 3), calls=True) for number in (1, 2))
    driver.evict(10**6)  # shadows and recording do not depend on what the server still holds
    report = {"ends": {told.rid: int(AnswerEnd.TOOL_CALL), "another server's": 2}}
    for _ in range(2):  # the second report of one answer says nothing
        answered(driver.cache, report)
    settle(shadowing)
    recorder.close()
    nodes = list(pair.importance.nodes())
    ends_of_shadow = {
        node.pages[0]: node.metadata.answer_end for node in nodes if node.metadata and not node.start
    }
    assert ends_of_shadow == {
        _digests(prompt(1000, 3))[0]: AnswerEnd.TOOL_CALL,
        _digests(prompt(2000, 3))[0]: AnswerEnd.UNKNOWN,
    }
    assert [each.answer_end for each in arrivals(open_trace(tmp_path))] == ["tool_call", "unknown"]
    assert read_trace(tmp_path).answer_ends.tolist() == [AnswerEnd.TOOL_CALL, AnswerEnd.UNKNOWN]
    ended = [each for each in open_trace(tmp_path) if isinstance(each, RequestFinished | AnswerTold)]
    assert [type(each) for each in ended] == [RequestFinished, RequestFinished, AnswerTold]
    assert [each.answer_end for each in ended] == ["unknown", "unknown", "tool_call"]
    assert [each.request for each in ended] == [0, 1, 0]
    assert [each.microseconds for each in ended] == sorted(each.microseconds for each in ended)


def _digests(tokens: list[int]) -> list[bytes]:
    return chain_digests(root_digest(None, None), tokens, PAGE)


def _has_gone_on(driver: TreeDriver, node: UnifiedTreeNode) -> bool:
    turn = driver.component.state.tree.metadata(node).turn
    return turn is not None and not turn.is_open


def test_a_prompt_that_a_pin_cuts_learns_in_all_its_parts() -> None:
    driver = TreeDriver(tokens=1024)
    tokens = list(range(400))
    request = driver.admit(tokens)
    hints = {"answer_end": "tool_call", "retain": {"ttl_seconds": 600}}
    request.kv_hints = decode_kv_hints_envelope(Hints.parse(hints).envelope())
    driver.prefill(request)
    driver.decode(request, [7] * PAGE)
    driver.finish(request)
    path = path_of(driver, tokens)
    assert len(path) > 1, "the pin fits as a whole"
    assert {metadata.answer_end for _, metadata in path} == {AnswerEnd.TOOL_CALL}
    assert all(metadata.turn is not None for _, metadata in path)

"""The serving benchmark's workloads, the same for everybody and as demanding as named; its report."""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmark.serving import load
from benchmark.serving.arms import ARMS, OURS, PUBLISHED, STOCK, Arm, server_flags
from benchmark.serving.load import Answer
from benchmark.serving.measured import bootstrap, paired_ratios
from benchmark.serving.report import TIMES, tables
from benchmark.serving.rows import Rows
from benchmark.serving.workloads import (
    ONE_OFF,
    Workload,
    document_of,
    load_parameters,
    make_workload,
    prefix_pages,
)
from sgl_importance_lab.workload.workload_request import WorkloadRequest
from sglang_importance.launch.flags import add_flags, options_of

PARAMETERS = load_parameters()
PAGE = PARAMETERS["page_tokens"]
NAMES = list(PARAMETERS["workloads"])


def _pages(request: WorkloadRequest, page_tokens: int) -> set[int]:
    return {hash(prefix) for prefix in prefix_pages(request.token_ids(), page_tokens)}


def distinct_tokens(requests: Sequence[WorkloadRequest], page_tokens: int) -> int:
    """Prompt tokens that a cache of any size would hold in the end, in whole pages."""
    return page_tokens * len(set[int]().union(*(_pages(request, page_tokens) for request in requests)))


def live_tokens(requests: Sequence[WorkloadRequest], page_tokens: int) -> float:
    """Distinct prompt tokens of the sessions that asked before and will ask again, mean over time."""
    last = {request.session: place for place, request in enumerate(requests)}
    latest: dict[str, set[int]] = {}
    holders: dict[int, int] = {}
    sizes = []
    for place, request in enumerate(requests):
        for page in latest.pop(request.session, set()):
            holders[page] -= 1
            if not holders[page]:
                del holders[page]
        if last[request.session] > place:
            pages = latest[request.session] = _pages(request, page_tokens)
            for page in pages:
                holders[page] = holders.get(page, 0) + 1
        sizes.append(len(holders) * page_tokens)
    # The ends of the list look like starts and ends of sessions.
    middle = sizes[len(sizes) // 3 : max(len(sizes) // 3 + 1, math.ceil(len(sizes) * 2 / 3))]
    return sum(middle) / len(middle)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_parameters_make_the_same_requests(name: str) -> None:
    assert make_workload(name, PARAMETERS) == make_workload(name, PARAMETERS)
    other = make_workload(name, {**PARAMETERS, "seed": 1})
    assert other.requests[0].messages != make_workload(name, PARAMETERS).requests[0].messages


@pytest.mark.parametrize("name", NAMES)
def test_requests_come_in_order_at_the_rate(name: str) -> None:
    requests = make_workload(name, PARAMETERS).requests
    shape = PARAMETERS["workloads"][name]
    arrivals = [request.seconds for request in requests]
    assert len(requests) == shape["requests"] == len({request.id for request in requests})
    assert arrivals == sorted(arrivals)
    assert (len(requests) - 1) / arrivals[-1] == pytest.approx(shape["rate"], rel=0.01)


@pytest.mark.parametrize("name", [name for name in NAMES if "working_set" in PARAMETERS["workloads"][name]])
def test_live_sessions_need_the_named_multiple_of_the_pool(name: str) -> None:
    factor = live_tokens(make_workload(name, PARAMETERS).requests, PAGE) / PARAMETERS["device_tokens"]
    assert factor == pytest.approx(PARAMETERS["workloads"][name]["working_set"], rel=0.1)


def test_turns_of_a_session_extend_each_other() -> None:
    latest: dict[str, list[dict[str, str]]] = {}
    extended = 0
    for request in make_workload("agents-2x", PARAMETERS).requests:
        before = latest.get(request.session, [])
        assert request.messages[: len(before)] == before
        extended += bool(before)
        latest[request.session] = request.messages
    assert extended > len(latest)


def test_what_fits_fits_and_the_rest_does_not() -> None:
    sizes = {name: distinct_tokens(make_workload(name, PARAMETERS).requests, PAGE) for name in NAMES}
    pool = PARAMETERS["device_tokens"]
    assert sizes["fits"] < pool / 2  # generated text needs room too
    assert all(size > 2 * pool for name, size in sizes.items() if name != "fits")


def test_documents_of_a_scan_are_asked_about_once() -> None:
    asked = [document_of(request) for request in make_workload("scan", PARAMETERS).requests]
    once = [document for document in asked if document >= ONE_OFF]
    assert len(once) == len(set(once))
    assert len(once) / len(asked) == pytest.approx(PARAMETERS["workloads"]["scan"]["one_off"], abs=0.05)
    assert set(asked) - set(once) == set(range(PARAMETERS["workloads"]["scan"]["documents"]))


def test_arms_differ_in_nothing_but_their_own_flags() -> None:
    workload = Workload("any", [], "storage", 1)
    for arm in ARMS.values():
        flags = server_flags(arm, workload, PARAMETERS, 4096, "/store")
        assert flags[len(flags) - len(arm.flags) :] == arm.flags
        shared = flags[: len(flags) - len(arm.flags)]
        assert shared == server_flags(ARMS[STOCK], workload, PARAMETERS, 4096, "/store")[: len(shared)]
        assert arm.same_as is None or arm.same_as in ARMS
    assert {OURS, STOCK, *PUBLISHED} <= set(ARMS)


def _decisions(arm: Arm, tiers: str) -> dict[str, Any]:
    """What decides under an arm, on workloads that neither hint nor ask for a pin or a pre-warm."""
    words = [*arm.flags, *(("--kv-importance-store", "/store") if tiers == "storage" else ())]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    options = options_of(parser.parse_args(words))
    return {
        "environment": dict(arm.env),
        "policy": options.policy,
        "g": arm.g,
        "prewarm": options.prewarm.at if options.ledger_place else "off",
    }


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm.same_as])
@pytest.mark.parametrize("tiers", ["device", "host", "storage"])
def test_a_copied_arm_decides_as_the_one_that_it_copies_and_only_there(name: str, tiers: str) -> None:
    arm = ARMS[name]
    same = _decisions(arm, tiers) == _decisions(ARMS[arm.same_as], tiers)
    assert arm.is_copy(tiers) == same


def test_rows_stay_until_they_are_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    first = Rows(file)
    cell = {"workload": "fits", "arm": OURS}
    measured = [
        {"pass": "counts", **cell},
        {"pass": "capacity", **cell},
        {"pass": "times", **cell, "alternation": 0},
        {"pass": "times", **cell, "alternation": 1},
        {"pass": "restart", **cell, "alternation": 1, "document": 3},
        {"pass": "restart", **cell, "alternation": 1, "document": 4},
    ]
    for row in measured:
        first.add({**row, "run": 1})
    later = Rows(file)
    assert later.have(**{"pass": "times"}, arm=OURS, alternation=1)
    assert not later.have(**{"pass": "times"}, arm=OURS, alternation=2)
    later.add({**measured[2], "run": 2})
    assert [row["run"] for row in Rows(file)] == [1, 1, 2, 1, 1, 1]


def _counts(workload: str, arm: str, uncached: int) -> dict:
    return {"pass": "counts", "workload": workload, "arm": arm, "uncached_tokens": uncached, "hit_rate": 0.5}


def test_the_tables_name_what_was_lost() -> None:
    rows = [
        _counts("agents-4x", STOCK, 1000),
        _counts("agents-4x", OURS, 800),
        _counts("agents-4x", "lfu", 700),
    ]
    made = tables(rows, PARAMETERS)
    assert "| agents-4x | 800 against 700 (lfu): 1.143 | **no** |" in made["goals"]
    assert "| agents-4x | 0.800 | **no** |" in made["goals"]
    assert "| fits, open loop | not measured yet | - |" in made["goals"]
    assert "| fits, side by side | not measured yet | - |" in made["goals"]
    assert "| restart | not measured yet | - |" in made["goals"]
    assert "| ours | 0.8 (0.80) |" in made["uncached"]
    assert "| ours (g = 1) | = ours |" in made["uncached"]
    assert "| ours (g on) | - |" in made["uncached"]
    assert "| counts | unknown | 3 |" in made["commits"]


def test_capacity_is_that_of_stock_lru_at_the_same_hit_rate() -> None:
    rates = {STOCK: (0.2, 0.3, 0.5), OURS: (0.25, 0.4, 0.6)}
    rows = [
        {"pass": "counts" if size == 4096 else "capacity", "workload": "documents", "arm": arm}
        | {"device_tokens": size, "hit_rate": rate}
        for arm, found in rates.items()
        for size, rate in zip((2048, 4096, 8192), found, strict=True)
    ]
    assert f"| documents | {OURS} | 0.250 | 0.400 | 0.600 | 6,144 |" in tables(rows, PARAMETERS)["capacity"]


def test_a_restart_counts_once_whatever_its_documents() -> None:
    rows = [
        {
            "pass": "restart",
            "workload": "restart",
            "arm": OURS,
            "alternation": alternation,
            "document": document,
        }
        | {f"{which}_uncached_tokens": 12 for which in ("first", "warm")}
        | {"first_seconds": ratio, "warm_seconds": 1.0}
        for alternation, ratios in enumerate(((1.0, 1.1, 9.0), (1.1, 1.1, 1.1), (1.1, 1.3, 1.3)))
        for document, ratio in enumerate(ratios)
    ]
    made = tables(rows, PARAMETERS)
    assert f"| {OURS} | 3 | 9 | 12 | 12 |" in made["restart"]
    assert "| restart | 1.10 (1.10 - 1.30) | yes |" in made["goals"]


def test_times_are_compared_within_an_alternation() -> None:
    rows = [
        {"pass": "times", "workload": "fits", "arm": arm, "alternation": number, "ttft_p50": seconds}
        for number, pair in enumerate(((1.0, 1.1), (2.0, 2.2), (4.0, 4.4)))
        for arm, seconds in zip((STOCK, OURS), pair, strict=True)
    ]
    ratios = paired_ratios([*rows, {**rows[-1], "alternation": 9}], "fits", OURS, "ttft_p50")
    assert ratios == pytest.approx([1.1, 1.1, 1.1])
    assert bootstrap(ratios) == pytest.approx((1.1, 1.1, 1.1))


def test_servers_side_by_side_get_each_request_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []

    async def send(client: httpx.AsyncClient, model: str, request: WorkloadRequest, arrival: float) -> Answer:
        sent.append((model, request.id))
        assert str(client.base_url).startswith(f"http://{model}")
        return Answer("", 1, 0, 1, 0.0, 0.0, 0.0, None)

    monkeypatch.setattr(load, "_send", send)
    monkeypatch.setattr(load, "REST_SECONDS", 0.0)
    requests = make_workload("fits", PARAMETERS).requests[:100]
    answers = load.send_in_turns({name: (f"http://{name}", name) for name in ("a", "b")}, requests)
    assert [request_id for _, request_id in sent[::2]] == [request.id for request in requests]
    assert {name: len(found) for name, found in answers.items()} == {"a": 100, "b": 100}
    behind_itself = sum(before[0] == after[0] for before, after in itertools.pairwise(sent))
    first = Counter(model for model, _ in sent[::2])
    assert 30 < behind_itself < 70, "no server comes behind a certain other one"
    assert 30 < first["a"] < 70


def test_the_goal_about_the_first_token_is_judged_by_both_ways_to_time_it() -> None:
    rows = [
        {"workload": "fits", "arm": arm, "alternation": number, "pass": name} | dict.fromkeys(TIMES, seconds)
        for name, ours in (("times", 1.5), ("pairs", 1.01))
        for number in range(3)
        for arm, seconds in ((STOCK, 1.0), (OURS, ours))
    ]
    made = tables(rows, PARAMETERS)["goals"]
    assert "| fits, open loop | 1.5000 (1.5000 - 1.5000) | **no** |" in made
    assert "| fits, side by side | 1.0100 (1.0100 - 1.0100) | yes |" in made

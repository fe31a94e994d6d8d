"""The serving benchmark's workloads, the same for everybody and as demanding as named; its report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))
from benchmark.serving.arms import ARMS, OURS, PUBLISHED, STOCK, server_flags
from benchmark.serving.measured import bootstrap, paired_ratios
from benchmark.serving.report import write_report
from benchmark.serving.workloads import (
    ONE_OFF,
    Workload,
    distinct_tokens,
    document_of,
    live_tokens,
    load_parameters,
    make_workload,
)

PARAMETERS = load_parameters()
PAGE = PARAMETERS["page_tokens"]
NAMES = list(PARAMETERS["workloads"])


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


def _counts(workload: str, arm: str, uncached: int) -> dict:
    return {"pass": "counts", "workload": workload, "arm": arm, "uncached_tokens": uncached, "hit_rate": 0.5}


def test_the_report_names_what_was_lost(tmp_path: Path) -> None:
    tables = ("goals", "uncached", "tiers", "capacity", "times", "restart", "replay", "seeds")
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- table {name} -->\nold\n<!-- end {name} -->\n" for name in tables))
    rows = [
        _counts("agents-4x", STOCK, 1000),
        _counts("agents-4x", OURS, 800),
        _counts("agents-4x", "lfu", 700),
    ]
    write_report(rows, PARAMETERS, page=page, figure=None)
    text = page.read_text()
    assert "old" not in text
    assert "| agents-4x | 800 against 700 (lfu): 1.143 | **no** |" in text
    assert "| agents-4x | 0.800 | **no** |" in text
    assert "| ours | 0.8 (0.80) |" in text
    page.write_text("no place")
    with pytest.raises(ValueError, match="places for the table"):
        write_report(rows, PARAMETERS, page=page, figure=None)


def test_times_are_compared_within_an_alternation() -> None:
    rows = [
        {"pass": "times", "workload": "fits", "arm": arm, "alternation": number, "ttft_p50": seconds}
        for number, pair in enumerate(((1.0, 1.1), (2.0, 2.2), (4.0, 4.4)))
        for arm, seconds in zip((STOCK, OURS), pair, strict=True)
    ]
    ratios = paired_ratios([*rows, {**rows[-1], "alternation": 9}], "fits", OURS, "ttft_p50")
    assert ratios == pytest.approx([1.1, 1.1, 1.1])
    assert bootstrap(ratios) == pytest.approx((1.1, 1.1, 1.1))

"""Finished requests on the real tree reach the search for volatile beginnings, and operators hear of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_importance.observe.volatile.detector import VolatileBeginnings
from sglang_importance.http import tree_route
from sglang_importance.http.tree_route import write_out_beginnings
from sglang_importance.launch.finding import Status
from sglang_importance.launch.server_findings import server_findings
from sglang_importance.operations.snapshot import describe_cache

from support.drivers.tree_driver import TreeDriver

STABLE = list(range(100, 300))


def driver_after(prompts: list[list[int]]) -> TreeDriver:
    driver = TreeDriver(tokens=4096)
    driver.component.requests.beginnings = VolatileBeginnings()
    for prompt in prompts:
        request = driver.admit(prompt)
        driver.prefill(request)
        driver.decode(request, [7])
        driver.finish(request)
    return driver


def test_finished_prompts_are_compared_and_their_loss_is_counted():
    driver = driver_after([[1, 2, 50 + number, *STABLE] for number in range(10)])
    document = describe_cache(driver.cache, 0)
    (place,) = document["volatile"]
    assert (place["start_token"], place["end_token"], place["prompts"]) == (2, 3, 9)
    assert driver.component.state.counters.volatile_lost_tokens == 9 * len(STABLE)


def test_what_the_cache_found_is_no_loss():
    driver = driver_after([[*STABLE, *range(400, 400 + number)] for number in range(20)])
    assert driver.component.state.counters.volatile_lost_tokens == 0
    assert describe_cache(driver.cache, 0)["volatile"] == []


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict:
    class Letters:
        def decode(self, ids: list[int], **_: object) -> str:
            return "".join(chr(each) for each in ids)

    monkeypatch.setattr(tree_route, "tokenizer_manager", lambda: SimpleNamespace(tokenizer=Letters()))
    driver = driver_after([[65, 66, 48 + number, *STABLE] for number in range(10)])
    document = describe_cache(driver.cache, 0)
    write_out_beginnings(document)
    return document


def test_its_text_is_written_out_and_says_what_to_do(document: dict):
    (place,) = document["volatile"]
    assert (place["before"], place["variants"]) == ("AB", ["8", "9"])
    assert not [key for key in place if key.endswith("_ids")]
    assert place["sentence"].startswith(
        "prompts part at token 2 ('8', then '9') and go on alike: 1,800 tokens"
    )
    assert "strip it in the client" in place["cure"]


def test_doctor_finds_it(document: dict):
    (finding,) = (each for each in server_findings(document) if each.subject == "volatile beginning")
    assert finding.status is Status.NOTE
    assert (finding.detail, finding.cure) == (
        document["volatile"][0]["sentence"],
        document["volatile"][0]["cure"],
    )

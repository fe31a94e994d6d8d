"""Whatever of ours raises in a real server, it answers with the same tokens, and says what has happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from sglang_importance.launch import doctor
from sglang_importance.operations.handlers import OPERATIONS

from support.browser import NoBrowser, open_browser
from support.callbacks import BESIDE, LEARNING, ON_FLUSH, RECORDING, WITH_STORAGE, name_of
from support.config_file import config_flags
from support.python_path import FAULTS, TEST, python_path
from support.served import script_server
from support.servers import ServerProcess
from support.waiting import wait_until
from support.workloads.exchanges import TIER_FLAGS, Exchange, replay

pytestmark = pytest.mark.server

PREFIX = "sglang:kv_importance_"
EXCHANGES = 10
PROMPT = {"input_ids": list(range(300, 340))}
# How each operation is asked for; a pre-warm asks for its room only where a ledger has planned it.
ASKED: dict[str, tuple[str, str, Any]] = {
    "snapshot": ("GET", "/kv_importance", None),
    "tree": ("GET", "/kv_importance/tree", None),
    "node": ("GET", "/kv_importance/node/1", None),
    "node_prompt": ("GET", "/kv_importance/node/1/prompt", None),
    "events": ("GET", "/kv_importance/events", None),
    "pins": ("GET", "/kv_importance/pins", None),
    "importance": ("POST", "/kv_importance/importance", {"keys": ["00" * 16]}),
    "find": ("POST", "/kv_importance/find", PROMPT),
    "pin": ("POST", "/kv_importance/pin", PROMPT),
    "unpin": ("POST", "/kv_importance/unpin", {"pin_id": "none"}),
    "prewarm_facts": ("POST", "/kv_importance/prewarm", PROMPT),
    "why": ("GET", "/kv_importance/why?rid=none", None),
    "close_session": ("POST", "/close_session", {"session_id": "none"}),
    "why_prompt": ("POST", "/kv_importance/why", PROMPT),
}
WITHOUT_CALLER = {"prewarm_room", "answered"}
"""Asked by the HTTP process itself: beside a job, and behind an answer, which waits for neither."""


@dataclass
class Breakable:
    """A server that fails where it is told to."""

    server: ServerProcess
    plan: Path

    def break_(self, target: str, call: int) -> None:
        """From a flush on; what has failed before works again, and learning with it."""
        self.plan.write_text(json.dumps({"target": target, "call": call}))
        self.plan.with_suffix(".checked").unlink(missing_ok=True)
        self.server.flush_cache()

    def empty_storage(self) -> None:
        """Else nothing is copied there that was once, and what comes from there is not cut."""
        for file in self.server.store.rglob("*"):
            if file.is_file():
                file.unlink()

    def wait_until_checked(self, target: str) -> None:
        """The fault has come, and the whole tree was found as it should be after it."""
        checked = self.plan.with_suffix(".checked")
        wait_until(lambda: checked.exists() and checked.read_text() == target)

    def check_answers(self, exchanges: list[Exchange]) -> None:
        assert replay(self.server, exchanges[:EXCHANGES], concurrency=8).differing == []

    def said(self) -> dict[str, Any]:
        return self.server.get("/kv_importance", limit=1)["faults"]

    def counted(self) -> dict[str, float]:
        names = ("faults_total", "fallback", "requests_total")
        return {name: self.server.metric(f"{PREFIX}{name}") for name in names}


@pytest.fixture(scope="module")
def breakable(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    folder = tmp_path_factory.mktemp("faults")
    plan = folder / "plan.json"
    plan.write_text("{}")
    flags = (
        *("--kv-policy", "importance", *config_flags(signal={"g": "on"}), "--page-size", "16", *TIER_FLAGS),
        *("--kv-importance-trace", str(folder / "recording")),
    )
    env = python_path(FAULTS / "kv_callback_fault", TEST) | {"KV_CALLBACK_FAULT_FILE": str(plan)}
    with script_server(*flags, model=random_model, env=env) as server:
        server.expects_faults = True
        yield Breakable(server, plan)


# Before the others: a fault in the account of misses ends it for good, and with it what ``why`` knows.
@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - WITHOUT_CALLER))
def test_a_fault_in_an_operation_is_its_caller_s_answer(
    breakable: Breakable, exchanges: list[Exchange], operation: str
):
    server, (method, path, body) = breakable.server, ASKED[operation]
    url = f"{server.base_url}{path}"
    before = server.metric(f"{PREFIX}faults_total", place="operation")
    breakable.break_(f"operation {operation}", 0)
    answer = httpx.request(method, url, json=body, trust_env=False)
    expected = f"Planned: operation {operation}; see the server's log"
    if operation == "prewarm_facts":
        job = f"/kv_importance/prewarm/{answer.json()['job_id']}"
        wait_until(lambda: server.get(job)["state"] == "failed")
        assert server.get(job)["detail"] == expected
    else:
        assert (answer.status_code, answer.json()["message"]) == (500, expected)
    assert server.metric(f"{PREFIX}faults_total", place="operation") == before + 1
    breakable.wait_until_checked(f"operation {operation}")
    breakable.break_("", 0)
    assert httpx.request(method, url, json=body, trust_env=False).status_code in (200, 404)
    assert breakable.said()["fallback"] is None


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [*WITH_STORAGE, *LEARNING, *ON_FLUSH],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_after_a_fault_in_learning_or_ranking(
    breakable: Breakable, exchanges: list[Exchange], owner: type, method: str, call: int
):
    target = name_of(owner, method)
    before = breakable.counted()
    breakable.break_(target, call)
    if method != "prefetched":
        breakable.empty_storage()
    asked = 0
    while (fallback := breakable.said()["fallback"]) is None:
        assert asked < len(exchanges), f"{target} was not called {call} times"
        breakable.check_answers(exchanges[asked:])
        asked += EXCHANGES
    breakable.check_answers(exchanges)
    assert (fallback["error"], fallback["evicts_by"]) == (f"Planned: {target}", "lru"), breakable.server.log()
    breakable.wait_until_checked(target)
    assert breakable.counted() == {
        "faults_total": before["faults_total"] + 1,
        "fallback": 1,
        "requests_total": before["requests_total"] + asked + EXCHANGES,
    }


@pytest.mark.parametrize(("owner", "method", "call"), [*RECORDING, *BESIDE])
def test_after_a_fault_beside_learning(
    breakable: Breakable, exchanges: list[Exchange], owner: type, method: str, call: int
):
    target = name_of(owner, method)
    before = breakable.counted()
    breakable.break_(target, call)
    breakable.check_answers(exchanges)
    hinted = {**PROMPT, "sampling_params": {"max_new_tokens": 2}, "kv_hints": {"report": True}}
    reports = [breakable.server.post("/generate", hinted)["meta_info"].get("kv_importance") for _ in "ab"]
    assert [report is None for report in reports] == [False, target == "HintedRequest.report"]
    breakable.wait_until_checked(target)
    assert breakable.said()["fallback"] is None
    assert breakable.counted() == {
        "faults_total": before["faults_total"] + 1,
        "fallback": 0,
        "requests_total": before["requests_total"] + EXCHANGES + 2,
    }


def test_the_doctor_and_the_page_say_what_the_server_says(breakable: Breakable, exchanges: list[Exchange]):
    breakable.break_("MarginalLossOrder.begin", 1)
    breakable.check_answers(exchanges)
    asked = CliRunner().invoke(doctor.app, ["--url", breakable.server.base_url, "--json"])
    (problem,) = (each for each in json.loads(asked.stdout) if each["status"] == "problem")
    assert asked.exit_code == 1
    fallback = breakable.said()["fallback"]
    assert problem["detail"].startswith(
        f"evicts by LRU until it is restarted, since request {fallback['clock']}"
    )
    assert problem["detail"].endswith(": Planned: MarginalLossOrder.begin")
    try:
        with open_browser() as browser:
            page = browser.new_page()
            page.goto(f"{breakable.server.base_url}/kv_importance/ui")
            page.locator("#faults").wait_for()
            banner = page.locator("#faults").inner_text()
    except NoBrowser as missing:
        pytest.skip(str(missing))
    assert f"Since request {fallback['clock']} this server evicts by LRU, until it is restarted" in banner


def test_no_server_with_a_fault_is_stopped_unnoticed(breakable: Breakable, exchanges: list[Exchange]):
    """Last: it stops the server, as the end of every test does."""
    breakable.break_("MarginalLossOrder.begin", 1)
    breakable.check_answers(exchanges)
    breakable.server.expects_faults = False
    with pytest.raises(AssertionError, match=r"faults of ours:\n.*faults_total") as noticed:
        breakable.server.stop()
    assert "KV importance: fault in ranking" in str(noticed.value)

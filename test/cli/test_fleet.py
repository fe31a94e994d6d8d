"""What several servers say together."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from sgl_importance.cli.fleet import Member, ask_all, pins_of, pins_together, summary_of, together
from sgl_importance.cli.fleet_command import app
from sgl_importance.cli.server_client import Server

from support.waiting import HANG_SECONDS


def document(**changes: Any) -> dict[str, Any]:
    tiers = ("device", "host", "storage")
    return {
        "policy": "importance",
        "clock": 5,
        "tiers": {tier: {"used_tokens": 10, "total_tokens": 100} for tier in tiers},
        "hits": {
            "requests": 5,
            "prompt_tokens": 1000,
            "hit_tokens": {"device": 500, "host": 0, "storage": 100},
        },
        "faults": {"counts": {}, "fallback": None},
        **changes,
    }


def member(**changes: Any) -> Member:
    return Member(Server("http://somewhere:1"), None, document(**changes))


def test_hits_of_all_are_weighed_by_their_prompts() -> None:
    idle = {"requests": 0, "prompt_tokens": 0, "hit_tokens": {"device": 0, "host": 0, "storage": 0}}
    busy = {"requests": 9, "prompt_tokens": 3000, "hit_tokens": {"device": 0, "host": 300, "storage": 0}}
    summaries = [summary_of(member()), summary_of(member(hits=busy)), summary_of(member(hits=idle))]
    assert together(summaries) == {
        "requests": 14,
        "prompt_tokens": 4000,
        "hit_rate": {"device": 0.125, "host": 0.075, "storage": 0.025},
    }
    assert summaries[2]["hit_rate"]["device"] == 0


def test_trouble_of_every_kind_has_a_line() -> None:
    assert summary_of(member())["trouble"] == []
    ledger = {"place": "postgresql://host/db", "is_written": False, "lost_visits": 1200}
    sick = member(
        faults={"counts": {"ranking": 2}, "fallback": {"error": "KeyError: 3"}},
        ledger=ledger,
        store_tiers={"tiers": [{"name": "fast", "state": "in use"}, {"name": "slow", "state": "left out"}]},
    )
    assert summary_of(sick)["trouble"] == [
        "evicts by LRU until it is restarted: KeyError: 3",
        "2 faults in ranking, caught",
        "the ledger postgresql://host/db is not written: 1,200 visits lost",
        "storage tier slow: left out",
    ]
    assert summary_of(member(ledger=ledger | {"is_written": True}))["trouble"] == []


def test_pins_of_every_rank_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint pins on the rank that serves its request alone."""
    everywhere, hinted = {"pin_id": "everywhere"}, {"pin_id": "hinted"}
    ranks = [{"pins": [everywhere]}, None, {"pins": [everywhere, hinted]}]
    monkeypatch.setattr(Server, "get", lambda server, path: {"dp_ranks": ranks})
    assert pins_of(Server("http://somewhere:1"))["pins"] == [everywhere, hinted]


def test_a_pin_of_one_name_is_one_pin() -> None:
    def pin(name: str, granted: int) -> dict[str, Any]:
        shown = {"pin_id": name, "source": "requested", "cache_salt": None, "tokens": 64}
        return shown | {"granted_tokens": {"device": granted}}

    rows = pins_together([("a", {"pins": [pin("p", 64), pin("q", 32)]}), ("b", {"pins": [pin("p", 16)]})])
    assert [(row["pin_id"], row["granted_tokens"]) for row in rows] == [
        ("p", {"a": 64, "b": 16}),
        ("q", {"a": 32}),
    ]


def test_addresses_alone_are_shown_and_each_once() -> None:
    url = "http://127.0.0.1:9"
    for words in ([url, f"{url}/"], ["show", url], ["--hot", "1", url], ["--json", url]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith(f"error: no server at {url}")
    two = CliRunner().invoke(app, [url, "http://127.0.0.1:10"])
    assert two.stderr.startswith("error: none of 2 servers")


def test_an_interrupt_waits_for_no_server_that_hangs() -> None:
    answered, hang = threading.Event(), threading.Event()

    def question(server: str) -> None:
        main = threading.main_thread().ident
        assert main is not None
        time.sleep(0.2)  # it waits for the answer by then
        signal.pthread_kill(main, signal.SIGINT)
        hang.wait(HANG_SECONDS)
        answered.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's ``&``
    try:
        with pytest.raises(KeyboardInterrupt):
            ask_all(["hung"], question)
        assert not answered.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
        hang.set()


def test_what_a_question_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        ask_all([1, 0], lambda number: 1 // number)

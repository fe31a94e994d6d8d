"""Requests that go to servers side by side: each to all, and who is asked first changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from benchmark.peers import side_by_side
from benchmark.peers.workloads import Sent

REQUESTS = [Sent(session=number, ids=[number] * (number + 4), is_last=number == 4) for number in range(6)]


def test_each_request_goes_to_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def ask(client: Any, served: Any, ids: list[int], session: str | None) -> dict[str, Any]:
        asked.append((served.url, ids[0]))
        return {"ttft": 0.5, "cached": 3, "text": f"{ids[0]}" if ids[0] else served.url}

    monkeypatch.setattr(side_by_side, "ask", ask)
    monkeypatch.setattr(side_by_side, "SETTLES", 0)
    servers: Any = {
        arm: SimpleNamespace(url=arm, flags=[], cpu_seconds=lambda: 1.0, memory_bytes=lambda: 2)
        for arm in ("ours (told)", "stock sglang")
    }
    closed: list[tuple[str, str]] = []
    monkeypatch.setattr(
        side_by_side, "close_session", lambda client, served, session: closed.append((served.url, session))
    )
    ours, stock = side_by_side.rows_of(servers, REQUESTS, "")
    assert sorted(asked) == [(arm, number) for arm in sorted(servers) for number in range(len(REQUESTS))]
    assert [number for _, number in asked[::2]] == [number for _, number in asked[1::2]]
    assert Counter(arm for arm, _ in asked[::2]) == {"ours (told)": 3, "stock sglang": 3}
    assert ours["computed"] == stock["computed"] == [len(request.ids) - 3 for request in REQUESTS]
    assert closed == [("ours (told)", "4")]
    assert stock["same_text"] == len(REQUESTS) - 1


def test_an_arm_that_there_is_not_is_refused_in_one_line() -> None:
    with pytest.raises(typer.BadParameter, match="no arm is called 'mine': choose from stock sglang, "):
        side_by_side.started("mine", Path("model"), 4_096)

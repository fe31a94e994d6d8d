"""What we know of a request goes with it, in one record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_importance.placement.hints.hints import Hints
from sglang_importance.placement.hint_follower import hints_of
from sglang_importance.upstream.request_record import RECORD_ATTRIBUTE, record_of

from support.drivers.hinted_requests import envelope


def test_a_request_has_one_record_which_goes_with_it() -> None:
    request, other = SimpleNamespace(), SimpleNamespace()
    record = record_of(request)  # type: ignore[arg-type]  # not all of a Req
    assert vars(request) == {RECORD_ATTRIBUTE: record}
    assert record_of(request) is record  # type: ignore[arg-type]
    assert record_of(other) is not record  # type: ignore[arg-type]


def test_hints_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    of_actions = Hints.of_actions
    monkeypatch.setattr(Hints, "of_actions", lambda actions: read.append(actions) or of_actions(actions))
    hinted: Any = SimpleNamespace(kv_hints=envelope(drop_after_use=True))
    hints = hints_of(hinted)
    assert hints is not None
    assert hints.drop_after_use
    assert hints_of(hinted) is hints
    assert len(read) == 1


def test_hints_that_cannot_be_read_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    sent = envelope(budget=0.5)
    for action in sent.actions:
        action.payload.update(budget="half of it")
    hinted: Any = SimpleNamespace(kv_hints=sent)
    assert hints_of(hinted) is None
    assert hints_of(hinted) is None
    assert len(caplog.records) == 1

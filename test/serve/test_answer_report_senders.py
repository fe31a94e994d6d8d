"""Whose reports on answers go out together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_importance.http.answer_reports import answer_reports


def test_each_tokenizer_manager_sends_reports_of_its_own():
    one: Any = SimpleNamespace()
    other: Any = SimpleNamespace()
    assert answer_reports(one) is answer_reports(one)
    assert answer_reports(one) is not answer_reports(other)

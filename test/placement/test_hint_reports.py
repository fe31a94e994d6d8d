"""When a scheduler hands out the report that a request asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_importance.tiers import Tier
from sglang_importance.placement.hint_reports import DETAILS_TARGET, HOOKS, REPORT_KEY
from sglang_importance.upstream.request_record import record_of


def details_of(request: SimpleNamespace, details: dict[str, int | str] | None) -> Any:
    """What upstream's streamer asks for at each part of an answer, with our hook behind it."""
    hook, _ = HOOKS[DETAILS_TARGET]
    return hook(details, None, request)


@pytest.mark.parametrize("upstreams", [None, {"device": 3}])
def test_an_answer_that_is_streamed_carries_one_report_with_its_last_part(
    upstreams: dict[str, int | str] | None,
) -> None:
    reports: list[dict[Tier, int]] = []
    request = SimpleNamespace(
        finished=lambda: False, cached_tokens_device=3, cached_tokens_host=2, cached_tokens_storage=1
    )
    assert details_of(request, upstreams) is None, "it asked for none, so upstream's stay as they are"
    record_of(request).make_report = lambda hits: reports.append(hits) or {"hints": {}}
    assert details_of(request, upstreams) is None
    assert not reports, "hints still do something: what becomes of them is not known yet"
    request.finished = lambda: True
    details = details_of(request, upstreams)
    assert reports == [{Tier.DEVICE: 3, Tier.HOST: 2, Tier.STORAGE: 1}]
    assert {name: value for name, value in details.items() if name != REPORT_KEY} == (upstreams or {})
    assert json.loads(details[REPORT_KEY]) == {"hints": {}}
    record_of(request).make_report = lambda hits: None
    assert details_of(request, upstreams) is None, "a report that failed leaves upstream's as they are"

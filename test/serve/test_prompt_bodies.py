"""Bodies that name a prompt: which namespaces every route of ours refuses."""

from __future__ import annotations

import pytest
from fastapi import HTTPException

from sglang_importance.http.pins_route import PinBody
from sglang_importance.http.prewarm_route import PrewarmRequest
from sglang_importance.http.prompt_tokens import Prompt
from sglang_importance.http.requests.fields.text_rules import MAX_NAME
from sglang_importance.http.scheduler_client import validated

KINDS = (Prompt, PinBody, PrewarmRequest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_a_namespace_is_a_short_text_that_answers_can_name(kind: type[Prompt], field: str) -> None:
    for name in ("\ud800", "x" * (MAX_NAME + 1)):
        with pytest.raises(HTTPException) as refused:
            validated(kind, {"text": "a", field: name})
        assert refused.value.status_code == 400
        assert refused.value.detail.startswith(f"{field}: ")
    for name in ("\U0001f511", "x" * MAX_NAME, ""):
        assert getattr(validated(kind, {"text": "a", field: name}), field) == name

"""Pre-warms into the namespaces of LoRA adapters."""

from __future__ import annotations

import pytest
from sglang.srt.lora.lora_registry import LoRARef

from sglang_importance.http.adapter_namespaces import split_namespace

LOADED, GONE = LoRARef.deterministic_id("one", "/a"), LoRARef.deterministic_id("gone", "/b")
ADAPTERS = {LOADED: "one"}


@pytest.mark.parametrize(
    ("extra_key", "adapters", "request_parts"),
    [
        (None, ADAPTERS, (None, None)),
        ("tenant", ADAPTERS, ("tenant", None)),
        (LOADED, ADAPTERS, (None, "one")),
        ("tenant" + LOADED, ADAPTERS, ("tenant", "one")),
        (GONE, None, (GONE, None)),  # a server without adapters: a name like any other
    ],
)
def test_a_request_for_a_namespace_carries_its_adapter(extra_key, adapters, request_parts) -> None:
    assert split_namespace(extra_key, adapters) == request_parts


def test_nothing_is_computed_for_an_adapter_that_is_not_loaded() -> None:
    with pytest.raises(ValueError, match=f"not loaded: {GONE}"):
        split_namespace("tenant" + GONE, ADAPTERS)

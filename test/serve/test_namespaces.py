"""LoRA adapters in namespaces: no two requests spell the same pages, and pre-warms find the way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.mem_cache.utils import storage_namespace_seed

from sglang_importance.http.adapter_namespaces import name_adapters, split_namespace

LOADED, GONE = LoRARef.deterministic_id("one", "/a"), LoRARef.deterministic_id("gone", "/b")
ADAPTERS = {LOADED: "one"}
IDS = {"one": LOADED, "two": LoRARef.deterministic_id("two", "/c")}

parts = st.sampled_from(["", "a", "ab", "bc", "+lora:", *IDS.values(), LOADED[:16], LOADED[16:]])
keys = st.lists(parts, max_size=3).map("".join)
clients = st.tuples(keys, st.sampled_from([None, *IDS]), st.sampled_from([None, "a", "ab"]))


def pages_of(key: str, adapter: str | None, salt: str | None) -> tuple[str | None, str | None] | None:
    """Where sglang's ``Req`` puts the pages of a request; None where the key is refused."""
    request = GenerateReqInput(text="a", extra_key=key or None, lora_path=adapter, cache_salt=salt)
    try:
        name_adapters(request)
    except ValueError:
        return None
    own = request.extra_key
    return ((own or "") + IDS[adapter] if adapter else own), salt


@given(clients, clients)
def test_two_requests_share_pages_only_if_key_adapter_and_salt_are_the_same(one, other) -> None:
    places = pages_of(*one), pages_of(*other)
    if None in places:
        return
    assert (places[0] == places[1]) == (one == other)
    assert (storage_namespace_seed(*places[0]) == storage_namespace_seed(*places[1])) == (one == other)


@given(keys, st.sampled_from([None, "a"]))
def test_a_key_without_an_adapter_stays_as_it_is(key, salt) -> None:
    assert pages_of(key, None, salt) in ((key or None, salt), None)


@given(clients)
def test_a_namespace_tells_what_made_it(client) -> None:
    place = pages_of(*client)
    if place is not None:
        names = {lora_id: name for name, lora_id in IDS.items()}
        assert split_namespace(place[0], names) == (client[0] or None, client[1])


@pytest.mark.parametrize(
    ("keys", "adapters", "expected"),
    [
        (None, ["one", None], ["+lora:", ""]),
        ("x", ["one", None], ["x+lora:", "x"]),
        (["x", ""], "one", ["x+lora:", "+lora:"]),
        (["x", "y"], [None, "one"], ["x", "y+lora:"]),
        ("x", "one", "x+lora:"),
        (["x"], ["one", "two"], ["x"]),  # sglang refuses the lengths
    ],
)
def test_each_request_of_a_batch_is_named(keys, adapters, expected) -> None:
    request = GenerateReqInput(text=["a", "b"], extra_key=keys, lora_path=adapters)
    name_adapters(request)
    assert request.extra_key == expected


@pytest.mark.parametrize("key", [f"x+lora:{LOADED}", [None, f"+lora:{GONE}"]])
def test_a_key_that_spells_an_adapter_s_pages_is_refused(key) -> None:
    with pytest.raises(ValueError, match=r"extra_key: .* end the key otherwise"):
        name_adapters(GenerateReqInput(text="a", extra_key=key))


def test_an_adapter_named_by_its_id_alone_is_one() -> None:
    request = GenerateReqInput(text="a", lora_id=LOADED)
    name_adapters(request)
    assert request.extra_key == "+lora:"


@pytest.mark.parametrize(
    ("extra_key", "adapters", "request_parts"),
    [
        (None, ADAPTERS, (None, None)),
        ("tenant", ADAPTERS, ("tenant", None)),
        (GONE, ADAPTERS, (GONE, None)),  # a key that happens to be an id
        ("+lora:" + LOADED, ADAPTERS, (None, "one")),
        ("tenant+lora:" + LOADED, ADAPTERS, ("tenant", "one")),
    ],
)
def test_a_request_for_a_namespace_carries_its_adapter(extra_key, adapters, request_parts) -> None:
    assert split_namespace(extra_key, adapters) == request_parts


@pytest.mark.parametrize("adapters", [ADAPTERS, None])
def test_nothing_is_computed_for_an_adapter_that_is_not_loaded(adapters) -> None:
    with pytest.raises(ValueError, match=f"not loaded: {GONE}"):
        split_namespace("tenant+lora:" + GONE, adapters)

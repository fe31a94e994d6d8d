"""What an HTTP request carries of its body: a namespace for what its handler asks, and reports."""

from __future__ import annotations

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sgl_importance.placement.hints.hints import Hints
from sglang_importance.http.requests.carried_fields import CarriedFields
from sglang_importance.http.requests.kv_fields import KvFields
from sglang_importance.http.requests.prompt_messages import PromptMessages

TENANT = KvFields(cache_salt="a", extra_key="b")


def carrying(fields: KvFields, choices: int = 1) -> CarriedFields:
    return CarriedFields(fields, PromptMessages(), choices)


@pytest.mark.parametrize("text", ["a", ["a", "b"]])
def test_a_request_that_its_handler_made_without_a_namespace_gets_it(text: str | list[str]) -> None:
    request = GenerateReqInput(text=text)
    carrying(TENANT).put_namespace(request)
    request.normalize_batch_and_arguments()
    each = [request] if isinstance(text, str) else [request[0], request[1]]
    assert [(one.cache_salt, one.extra_key) for one in each] == [("a", "b")] * len(each)


def test_an_empty_salt_of_the_body_does_not_hide_that_of_its_metadata() -> None:
    request = GenerateReqInput(text="a", cache_salt="", extra_key="")
    carrying(TENANT).put_namespace(request)
    request.normalize_batch_and_arguments()
    assert (request.cache_salt, request.extra_key) == ("a", "b")


def test_what_a_handler_has_put_there_stays() -> None:
    request = GenerateReqInput(text=["a", "b"], cache_salt=["x", "y"])
    carrying(KvFields(cache_salt=["x", "y"])).put_namespace(request)
    assert (request.cache_salt, request.extra_key) == (["x", "y"], None)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (TENANT, "cache_salt and extra_key"),
        (KvFields(hints=Hints()), "kv_hints"),
        (KvFields("a"), "cache_salt"),
    ],
)
def test_a_model_that_does_not_generate_refuses_by_name(fields: KvFields, names: str) -> None:
    with pytest.raises(ValueError, match=f"^{names}: a model that does not generate"):
        carrying(fields).put_namespace(EmbeddingReqInput(text="a"))


def test_reports_are_one_for_each_prompt_and_each_round() -> None:
    carried = carrying(TENANT, choices=2)
    assert carried.reports() is None
    carried.rounds.append({0: {"n": 0}, 1: {"n": 1}})
    assert carried.reports() == {"n": 0}
    carried.rounds.append({3: {"n": 3}, 2: {"n": 2}, 0: {"n": 4}})
    assert carried.reports() == [{"n": 0}, {"n": 4}, {"n": 2}]

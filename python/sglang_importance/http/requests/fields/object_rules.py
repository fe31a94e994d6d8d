"""Rules for objects whose fields have rules of their own."""

from __future__ import annotations

import json
from typing import Any

from sglang_importance.http.requests.fields.field import Rule, Table
from sglang_importance.http.requests.fields.number_rules import INT64
from sglang_importance.http.requests.fields.refusal import shown
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.text_rules import name


def fields_of(table: Table) -> Rule:
    """An object with these fields and no other, each of which may be null."""

    def check(value: Any, server: ServerFacts) -> str | None:
        if not isinstance(value, dict):
            return f"must be an object, not {shown(value)}"
        for key, inner in value.items():
            if key not in table:
                return f"has the unknown field {shown(key)}: there are {', '.join(table)}"
            if inner is not None and (problem := table[key].rule(inner, server)):
                return f"has {key}, which {problem}"
        return None

    return check


def custom_params(value: Any, server: ServerFacts) -> str | None:
    """Plain values, lists and objects of them: the shape of sglang's message (``CustomParamValue``)."""
    if not isinstance(value, dict):
        return f"must be an object, not {shown(value)}"
    for key, inner in value.items():
        if problem := name(key, server):
            return f"has a key that {problem}"
        if key == "__req__":
            return "has the key '__req__', which sglang keeps for itself: leave it out"
        values = [inner]
        if isinstance(inner, list):
            values = inner
        elif isinstance(inner, dict):
            if any(name(each, server) for each in inner):
                return f"has {shown(key)} with keys that are no texts"
            values = list(inner.values())
        for each in values:
            if not _is_plain(each):
                plain = "texts, numbers of 64 bits, true, false or null"
                return f"has {shown(key)} with {shown(each)}: give {plain}"
    return None


def _is_plain(value: Any) -> bool:
    if value is None or value is True or value is False or isinstance(value, float):
        return True
    if isinstance(value, str):
        return name(value, ServerFacts(0)) is None
    return isinstance(value, int) and -INT64 <= value <= INT64


def logit_processor(value: Any, server: ServerFacts) -> str | None:
    """A serialized ``CustomLogitProcessor``, read as the scheduler will read it.

    It is code: whoever may send one may do in the scheduler whatever it does.
    """
    if not isinstance(value, str):
        return f"must be the text of CustomLogitProcessor.to_str, not {shown(value)}"
    if not value:
        return None
    try:
        json.loads(value)["callable"]
        from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

        if not callable(CustomLogitProcessor.from_str(value)):
            return "is no CustomLogitProcessor: give the text of its to_str"
    except Exception as error:
        return f"cannot be read ({shown(type(error).__name__)}): give the text of CustomLogitProcessor.to_str"
    return None

"""Rules for what constrains an answer: sglang's scheduler compiles it, in C++ and without a limit."""

from __future__ import annotations

import json
import re
from typing import Any

from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.text_rules import is_utf8

MAX_CHARACTERS = 100_000
MAX_DEPTH = 64
MAX_REPEAT = 1000
MAX_COUNTED_PROPERTIES = 4096
"""Properties of an object times how many of them it may have: beyond, compiling takes seconds to hours."""

_REPEAT = re.compile(r"\{\s*(\d+)?\s*(?:,\s*(\d+)?\s*)?\}")
_OPENING, _CLOSING = "([{", ")]}"
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def grammar(value: Any, server: ServerFacts) -> str | None:
    """A regular expression, or a grammar in EBNF."""
    if problem := _text(value):
        return problem
    if _depth(value) > MAX_DEPTH:
        return f"has brackets more than {MAX_DEPTH} deep: give a flatter one"
    counts = [int(number) for match in _REPEAT.finditer(value) for number in match.groups() if number]
    if any(count > MAX_REPEAT for count in counts):
        return f"repeats {shown(max(counts))} times: give at most {MAX_REPEAT}"
    return None


def json_grammar(value: Any, server: ServerFacts) -> str | None:
    """A JSON schema or structural tag, as a text."""
    if problem := _text(value):
        return problem
    if _depth(value) > MAX_DEPTH:
        return f"is more than {MAX_DEPTH} levels deep: give a flatter one"
    try:
        document = json.loads(value)
    except (ValueError, RecursionError) as error:
        # Not JSON: some backends have names for built-in schemas.
        return None if value == "$$ANY$$" else f"must be JSON in a text: {shown(str(error))}"
    if not isinstance(document, dict | bool):
        return f"must be a JSON object in a text, not {shown(document)}"
    return _schema_problem(document)


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"must be a text, not {shown(value)}"
    if len(value) > MAX_CHARACTERS:
        return f"has {len(value)} characters: give at most {MAX_CHARACTERS}"
    if "\x00" in value:
        return "holds a null character"
    return None if is_utf8(value) else "holds half a surrogate pair, which is no character: send proper UTF-8"


def _depth(value: str) -> int:
    """Of brackets, escaped and quoted ones too: at least as deep as any reader takes them for."""
    deepest = depth = 0
    for character in value:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING and depth:
            depth -= 1
    return deepest


def _schema_problem(node: Any) -> str | None:
    if isinstance(node, dict):
        for name in _COUNTS:
            count: Any = node.get(name)
            if type(count) in (int, float) and count > MAX_REPEAT:
                return f"has {name} {shown(count)}: give at most {MAX_REPEAT}"
        named = node.get("properties")
        if isinstance(named, dict) and {"minProperties", "maxProperties"} & node.keys():
            most: Any = node.get("maxProperties")
            most = most if type(most) is int and 0 < most < len(named) else len(named)
            if len(named) * most > MAX_COUNTED_PROPERTIES:
                return f"counts {len(named)} properties (minProperties, maxProperties): name fewer"
        pattern = node.get("pattern")
        if isinstance(pattern, str) and (problem := grammar(pattern, ServerFacts(0))):
            return f"has a pattern that {problem}"
        node = list(node.values())
    if isinstance(node, list):
        return next((problem for each in node if (problem := _schema_problem(each))), None)
    return None

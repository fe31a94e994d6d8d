"""Rules for token ids: sglang looks them up in tables of the vocabulary's size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.number_rules import INT64
from sglang_importance.http.requests.fields.server_facts import ServerFacts

MAX_STOP_TOKENS = 65_536


def unknown_token(ids: Sequence[Any], vocabulary: int) -> str | None:
    """The problem with the ids of a prompt, not empty; None where all are right, or are no numbers."""
    if not isinstance(ids[0], int):
        return None
    try:
        lowest, highest = min(ids), max(ids)
        if lowest >= 0 and highest < vocabulary:
            return None
    except TypeError:
        return None
    wrong = lowest if lowest < 0 else highest
    return f"token id {shown(wrong)} is beyond the model's vocabulary of {vocabulary}"


def prompt_ids(value: Any, server: ServerFacts) -> str | None:
    """The token ids of one prompt."""
    if not isinstance(value, list | tuple):
        return f"must be a list of token ids, not {shown(value)}"
    if not value:
        return "a prompt without tokens"
    if not hasattr(value[0], "__index__") or isinstance(value[0], bool):
        return f"must be a list of token ids, not of {shown(value[0])}"
    try:
        array("q", value)  # as sglang will do
    except TypeError:
        return "must be a list of token ids, which are whole numbers"
    except OverflowError:
        return f"has a token id beyond the model's vocabulary of {server.vocabulary}"
    lowest, highest = min(value), max(value)
    if lowest >= 0 and highest < server.vocabulary:
        return None
    wrong = lowest if lowest < 0 else highest
    return f"token id {shown(wrong)} is beyond the model's vocabulary of {server.vocabulary}"


def token_id(value: Any, server: ServerFacts) -> str | None:
    """One token id."""
    if type(value) is not int:
        return f"must be a token id, not {shown(value)}"
    return unknown_token([value], server.vocabulary)


def token_list(value: Any, server: ServerFacts) -> str | None:
    """Some token ids, or none; each once at most in the mean."""
    if not isinstance(value, list | tuple):
        return f"must be a list of token ids, not {shown(value)}"
    if len(value) > server.vocabulary:
        return f"is a list of {len(value)}, more than the vocabulary has tokens: give each once"
    if wrong := next((each for each in value if type(each) is not int), None):
        return f"must be a list of token ids, not of {shown(wrong)}"
    if not all(type(each) is int for each in value):
        return "must be a list of token ids, which are whole numbers"
    return unknown_token(value, server.vocabulary) if value else None


def stop_tokens(value: Any, server: ServerFacts) -> str | None:
    """sglang compares them only, and any number of 64 bits will do, null too."""
    if not isinstance(value, list | tuple | set):
        return f"must be a list of token ids, not {shown(value)}"
    if len(value) > MAX_STOP_TOKENS:
        return f"is a list of {len(value)}: give at most {MAX_STOP_TOKENS}"
    for each in value:
        if each is not None and (type(each) is not int or not -INT64 <= each <= INT64):
            return f"must be a list of token ids, not of {shown(each)}"
    return None


def biases(value: Any, server: ServerFacts) -> str | None:
    """What is added to the logits of some tokens."""
    if not isinstance(value, dict):
        return f"must be an object of token ids and numbers, not {shown(value)}"
    for key, number in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 12):
            return f"has the key {shown(key)}: keys are token ids in quotes"
        if int(key) >= server.vocabulary:
            return f"token id {key} is beyond the model's vocabulary of {server.vocabulary}"
        if type(number) not in (int, float) or not -MAX_BIAS <= number <= MAX_BIAS:
            return f"token {key} has {shown(number)}: give a number from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    return None


MAX_BIAS = 1e6


def positions(value: Any, server: ServerFacts) -> str | None:
    """Places in a prompt, which the scheduler reads out."""
    if not isinstance(value, list | tuple):
        return f"must be a list of positions, not {shown(value)}"
    if not all(type(each) is int and 0 <= each < server.context_length for each in value):
        return "must be a list of positions in the prompt"
    return None

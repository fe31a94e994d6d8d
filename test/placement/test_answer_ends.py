"""Markers of tool calls, found by sglang's own parsers in the tokens of a model."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from sgl_importance.reuse.answer_end import AnswerMarkers
from sglang_importance.placement.answer_ends import answer_markers

DEEPSEEK_BEGIN, DEEPSEEK_END = (
    f"<\N{FULLWIDTH VERTICAL LINE}tool\u2581calls\u2581{which}\N{FULLWIDTH VERTICAL LINE}>"
    for which in ("begin", "end")
)
# Added tokens of released tokenizers, by name; ids are ours.
ADDED = {
    "<|im_end|>": 1,
    "<tool_call>": 2,
    "</tool_call>": 3,
    DEEPSEEK_BEGIN: 4,
    DEEPSEEK_END: 5,
    "[TOOL_CALLS]": 6,
    "<|python_tag|>": 7,
    "<|tool_calls_section_begin|>": 8,
    "<|call|>": 9,
    "<|start|>": 10,
    "<think>": 11,
    "<|action_start|>": 12,
    "<|action_end|>": 13,
}


TOKENIZER = SimpleNamespace(get_added_vocab=lambda: ADDED)


def markers_of(parser: str | None, tokenizer: Any = TOKENIZER) -> AnswerMarkers | None:
    return answer_markers(parser, tokenizer)


@pytest.mark.parametrize(
    ("parser", "markers"),
    [
        ("hermes", {"<tool_call>"}),
        ("qwen25", {"<tool_call>"}),
        ("qwen3_coder", {"<tool_call>"}),
        ("glm45", {"<tool_call>"}),
        ("deepseekv3", {DEEPSEEK_BEGIN}),
        ("mistral", {"[TOOL_CALLS]"}),
        ("kimi_k2", {"<|tool_calls_section_begin|>"}),
        ("gpt-oss", {"<|call|>"}),
        ("interns1", {"<|action_end|>"}),
    ],
)
def test_formats_with_a_token_of_their_own(parser: str, markers: set[str]) -> None:
    found = markers_of(parser)
    assert found == AnswerMarkers(frozenset(ADDED[each] for each in markers), mark_every_call=True)


def test_calls_in_json_or_python_may_have_none() -> None:
    assert markers_of("llama3") == AnswerMarkers(frozenset({ADDED["<|python_tag|>"]}), mark_every_call=False)
    assert markers_of("pythonic") == AnswerMarkers(frozenset(), mark_every_call=False)


@pytest.mark.parametrize("parser", list(FunctionCallParser.ToolCallParserEnum))
def test_no_parser_of_sglang_takes_a_token_of_text_for_a_call(
    parser: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What no parser is asked for is not a marker, and a model without the tokens of a format has none."""
    with caplog.at_level(logging.INFO):
        found = markers_of(parser)
    assert parser in caplog.text
    if parser == "response_template":  # 0.5.23: the tokenizer has to bring a template
        assert found is None
        return
    assert found is not None
    assert not found.tool_call_ids & {ADDED[each] for each in ("<|im_end|>", "</tool_call>", "<think>")}
    without = markers_of(parser, SimpleNamespace())
    assert without == AnswerMarkers(frozenset(), mark_every_call=False)


def test_a_server_without_tools_is_told_nothing() -> None:
    assert markers_of(None) is None
    assert markers_of("hermes", None) is None

"""The body of a request, as a client sends it to sglang, as the prompt that our routes are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_importance.terminal import fail

PROMPT_FIELDS = ("text", "messages", "tools", "input_ids")
NAMESPACE_FIELDS = ("cache_salt", "extra_key")
NAMESPACE_PLACES = ("metadata", "options")
"""Where chat requests may name it as well as at the top: OpenAI's and Anthropic's, Ollama's."""
NOT_TAKEN = (
    *("system", "suffix", "chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "task"),
    *("continue_final_message", "session_params", "lora_path"),
)
"""They change the tokens of a prompt, or which KV it finds."""
TOOL_CHOICES_WITH_ALL_TOOLS = (None, "auto", "required")


def fields_of_body(flag: str, body: dict[str, Any]) -> dict[str, Any]:
    """What our routes take of a body; what they cannot follow ends the command with one line.

    Args:
        flag: that named its file.
        body: what the file holds.
    """
    if (name := _not_taken(body)) is not None:
        fail(
            f"{flag}: {name} changes what the request finds in the cache, and is not followed here: "
            "leave it out, or give the token ids and the extra_key of its pages"
        )
    namespace: dict[str, Any] = {}
    for holder in (*(body.get(place) for place in NAMESPACE_PLACES), body):
        namespace |= _given(holder, NAMESPACE_FIELDS) if isinstance(holder, dict) else {}
    return _given(body, PROMPT_FIELDS) | namespace


def in_namespace(body: dict[str, Any], cache_salt: str | None, extra_key: str | None) -> dict[str, Any]:
    """A body for our routes in the namespace of the flags, where these were given."""
    return body | _given({"cache_salt": cache_salt, "extra_key": extra_key}, NAMESPACE_FIELDS)


def _not_taken(body: dict[str, Any]) -> str | None:
    if body.get("tools") and body.get("tool_choice") not in TOOL_CHOICES_WITH_ALL_TOOLS:
        return "tool_choice"
    model = body.get("model")
    if isinstance(model, str) and model.partition(":")[2].strip():  # as sglang's OpenAI routes read it
        return "the adapter in model"
    return next((name for name in NOT_TAKEN if _says_something(body.get(name))), None)


def _says_something(value: Any) -> bool:
    # An effort of 0.0 does, and equals False.
    return value is not None and value is not False and value not in ("", [], {})


def _given(holder: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: holder[name] for name in names if holder.get(name) is not None}

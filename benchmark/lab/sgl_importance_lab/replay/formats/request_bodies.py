"""Bodies of requests as clients sent them, of every API that sglang serves: their prompts and namespaces.

Chat, completions, responses, Anthropic's messages, Ollama's, Vertex's, scores, and ``/generate``. What a
server takes out of a prompt before it computes it (``cache_control``) does not count, and neither do fields
that change only the answer.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from msgspec import Meta, Struct

Message = dict[str, Any]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Prompt = str | list[int] | list[Message]
Texts = str | list[TokenId | str | list[TokenId]]

BODY_PLACES = ("body", "payload")
"""Fields of a record that hold a body, as in files for the batch API."""
PROMPT_FIELDS = ("messages", "prompt", "text_input", "text", "input_ids", "input", "instances", "query")

SALTS = ("cache_salt", "extra_key", "lora_path")
"""Of a whole request, or a list with one for each of its prompts."""
SALT_PLACES = ("metadata", "options", "parameters")
"""Where a server reads them too."""
OTHERS = ("model", "chat_template", "chat_template_kwargs", "reasoning_effort", "documents", "functions")
"""Bodies that differ in one of these may differ from the first token on, and count as sharing nothing."""
NOT_FOLLOWED = ("previous_response_id", "conversation", "context", "session_params", "input_embeds")
"""They stand for a part of the prompt that is not in the trace."""


class RequestBody(Struct):
    """One body; a record may hold it as ``body``, as in files for the batch API, or as ``payload``."""

    messages: list[Message] | None = None
    prompt: Texts | None = None
    text_input: str | None = None
    text: Any = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    input: str | list[str | Message | TokenId | list[TokenId]] | None = None
    instances: list[dict[str, Any]] | None = None
    query: Texts | None = None
    items: Texts | None = None
    item_first: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    system: Any = None
    instructions: Any = None
    thinking: Any = None
    model: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    lora_path: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    reasoning: Any = None
    output_config: Any = None
    chat_template: Any = None
    documents: Any = None
    functions: Any = None
    metadata: Any = None
    options: Any = None
    parameters: Any = None
    encoding_format: Any = None
    dimensions: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    context: Any = None
    session_params: Any = None
    input_embeds: Any = None

    def prompts(self) -> list[Prompt]:
        """Of which only one field may hold some; none if there is none, or more."""
        text = self.text if isinstance(self.text, str | list) else None  # Responses' is the answer's format
        given = (self.messages, self.prompt, self.text_input, text, self.input_ids, self._input())
        present: list[Any] = [field for field in given if field]
        if self.instances:
            present += [_of_instances(self.instances)]
        if self.query and self.items:
            present += [_with_items(self.query, self.items, is_item_first=bool(self.item_first))]
        if len(present) != 1:
            return []
        (only,) = present
        is_batch = (
            only is not self.messages and isinstance(only, list) and not isinstance(only[0], int | dict)
        )
        return only if is_batch else [only]

    def _input(self) -> Any:
        """To Responses a text is a user's message; what is to be embedded is none."""
        is_embedded = self.encoding_format or self.dimensions
        if not self.input or not isinstance(self.input, str) or is_embedded:
            return self.input
        return [{"role": "user", "content": self.input}]

    def head(self) -> list[Message]:
        """What stands in front of the messages."""
        texts = (self.system, self.instructions)
        return [{"role": "system", "content": text} for text in texts if text]

    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Those that the prompt lists."""
        choice = self.tool_choice.get("type") if isinstance(self.tool_choice, dict) else self.tool_choice
        return None if choice == "none" else self.tools

    def namespace(self, index: int) -> str:
        """Of the prompt at an index; empty where nothing tells it from others."""
        named = {name: value for name in SALTS if (value := self._salt(name, index))}
        named |= {name: value for name in OTHERS if (value := getattr(self, name))}
        for other in (self.reasoning, self.output_config):  # of Responses, and of Anthropic
            if isinstance(other, dict) and (effort := other.get("effort")):
                named["reasoning_effort"] = effort
        if isinstance(self.thinking, dict) and (kind := self.thinking.get("type")) not in (None, "disabled"):
            named["thinking"] = kind
        return json.dumps(named, sort_keys=True) if named else ""

    def _salt(self, name: str, index: int) -> Any:
        places = [self, *(getattr(self, place) for place in SALT_PLACES)]
        values = [each.get(name) if isinstance(each, dict) else getattr(each, name, None) for each in places]
        value = next((each for each in values if each), None)
        if isinstance(value, list):
            return value[index] if index < len(value) else None
        return value

    def not_followed(self) -> list[str]:
        """Names of the fields that stand for text which is not here."""
        return [name for name in NOT_FOLLOWED if getattr(self, name)]


def as_computed(value: Any) -> Any:
    """A message, or a part of one, without ``cache_control``; a single part of text is the text."""
    if isinstance(value, list):
        parts = [as_computed(each) for each in value]
        if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}:
            return parts[0]["text"]
        return parts
    if isinstance(value, dict):
        return {key: as_computed(each) for key, each in value.items() if key != "cache_control"}
    return value


def _of_instances(instances: list[dict[str, Any]]) -> list[Any]:
    return [each.get("text") or each.get("input_ids") or [] for each in instances]


def _with_items(query: Any, items: Any, *, is_item_first: bool) -> list[Any]:
    """Scores compute each item behind the query, or in front of it."""
    several = items if isinstance(items, list) and not isinstance(items[0], int) else [items]
    if any(type(each) is not type(query) for each in several):
        return []
    return [each + query if is_item_first else query + each for each in several]

"""The tokens of a prompt that a caller names as text, as chat messages or as token ids.

Messages and text take the way of ``/v1/chat/completions`` and ``/generate`` up to the point where these would
generate: a prefix that is pinned or warmed must be, token for token, the one that requests will ask for.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.fields.text_rules import MAX_NAME
from sglang_importance.http.requests.fields.token_rules import unknown_token
from sglang_importance.http.requests.long_lists import check_long_lists
from sglang_importance.http.server_state import tokenizer_manager

TokenId = Annotated[int, Field(ge=0, strict=True)]
Name = Annotated[str, Field(max_length=MAX_NAME)]
"""As of requests. Only where its length is limited pydantic refuses half a surrogate pair, too."""

FORMS = ("text", "messages", "input_ids")


class Prompt(BaseModel):
    """A prompt in one of three forms, and the namespace of its requests.

    A chat prompt ends with the template's opening of an answer. Prompts with further turns share it only up
    to the last token that the template writes in both.
    """

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(None, min_length=1, description="As in ``/generate`` and ``/v1/completions``.")
    # The first wrong element of a list is enough: a million of them take seconds.
    messages: list[dict[str, Any]] | None = Field(
        None, min_length=1, fail_fast=True, description="As in ``/v1/chat/completions``."
    )
    tools: list[dict[str, Any]] | None = Field(
        None,
        fail_fast=True,
        description="Definitions that the template writes into the prompt; only with ``messages``.",
    )
    input_ids: list[TokenId] | None = Field(
        None, min_length=1, fail_fast=True, description="Token ids, passed on as they are."
    )
    cache_salt: Name | None = Field(
        None, description="Of the requests that share the prefix; requests of other salts never do."
    )
    extra_key: Name | None = Field(None, description="The same, for requests that carry one.")

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        self.check_form()
        return self

    def check_form(self) -> None:
        """Checks which of the fields are given together.

        Raises:
            ValueError: the prompt has no form or several, or tools without messages.
        """
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of text, messages and input_ids, not {' and '.join(given) or 'none'}"
            )
        if self.tools is not None and self.messages is None:
            raise ValueError("tools need messages")

    @property
    def form(self) -> str:
        """Name of the field that holds the prompt."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    @property
    def namespace(self) -> tuple[str | None, str | None]:
        """Extra key and cache salt as sglang normalises them: empty is none."""
        return self.extra_key or None, self.cache_salt or None


async def prompt_tokens(prompt: Prompt, request: Request) -> list[int]:
    """Token ids that the server would compute for the prompt.

    Args:
        prompt: what the caller sent.
        request: the HTTP request that carried it; its headers may matter to the chat template's options.

    Raises:
        HTTPException: 400 where the prompt cannot be tokenized or does not fit the model; names the field.
    """
    manager = tokenizer_manager()
    if prompt.messages is not None:
        tokens = await _chat_tokens(prompt, request)
    elif prompt.text is not None:
        tokens = await _text_tokens("text", prompt.text)
    else:
        assert prompt.input_ids is not None
        tokens = prompt.input_ids
    if problem := unknown_token(tokens, manager.model_config.vocab_size):
        raise _refused(prompt.form, problem)
    if len(tokens) > (context := manager.model_config.context_len):
        raise _refused(prompt.form, f"{len(tokens)} tokens do not fit the model's context of {context}")
    return tokens


async def _text_tokens(field: str, text: str) -> list[int]:
    manager = tokenizer_manager()
    if manager.tokenizer is None:
        raise _refused(field, "the server runs with --skip-tokenizer-init: give input_ids instead")
    tokens, _ = await manager._tokenize_texts(text)
    return list(tokens)  # type: ignore[arg-type]  # of one text, not of a batch


async def _chat_tokens(prompt: Prompt, request: Request) -> list[int]:
    chat = request.app.state.openai_serving_chat
    given = {"messages": prompt.messages} | ({} if prompt.tools is None else {"tools": prompt.tools})
    try:
        check_long_lists(given, ChatCompletionRequest, tokenizer_manager().model_config.context_len)
        chat_request = ChatCompletionRequest.model_validate(given)
    except BadField as refused:
        raise HTTPException(status_code=400, detail=str(refused)) from None
    except ValidationError as error:
        # Each message is tried as each kind of message: the first complaint is about the likeliest.
        first = error.errors()[0]
        raise _refused(".".join(map(str, first["loc"])), first["msg"]) from None
    if (problem := chat._validate_request(chat_request)) is not None:
        raise _refused("messages", problem)
    try:
        generate, _ = chat._convert_to_internal_request(chat_request, request)
    except ValueError as error:
        raise _refused("messages", " ".join(str(error).split())) from None
    if generate.contains_mm_input():
        raise _refused("messages", "only text can be tokenized here")
    if generate.input_ids is not None:
        return list(generate.input_ids)
    return await _text_tokens("messages", generate.text)


def _refused(field: str, problem: str) -> HTTPException:
    return HTTPException(status_code=400, detail=f"{field}: {problem}")

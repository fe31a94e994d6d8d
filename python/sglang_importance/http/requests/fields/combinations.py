"""Fields that are right each, and wrong together."""

from __future__ import annotations

from typing import Any

from sglang_importance.http.requests.fields.bad_field import BadField
from sglang_importance.http.requests.fields.server_facts import ServerFacts

MAX_LOGPROBS = {"prompts": 1 << 22, "answers": 1 << 24}
"""In one request, with all that it may be answered: each is an object of Python's in three processes."""
DEFAULT_NEW_TOKENS = 128
"""Of sglang's: of an answer whose request says nothing of its length."""
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""Marks sglang's warm-ups (``disaggregation/utils.py``): no KV is kept between chunks of a prompt."""


def check_combinations(obj: Any, prompts: int | None, samples: int, server: ServerFacts) -> None:
    """Looks at what hangs on several fields.

    Args:
        obj: a request whose fields are right each.
        prompts: of a batch; None for a request with a single prompt.
        samples: of each prompt.
        server: what it can do.

    Raises:
        BadField: names one of them, and the others.
    """
    if obj.text is not None and obj.input_ids is not None:
        _check_both(obj.text, obj.input_ids)
    if obj.positional_embed_overrides is not None and prompts is None:
        _check_places(obj)
    if getattr(obj, "session_params", None) and (prompts is not None or samples > 1):
        raise BadField("session_params", "a session takes one prompt at a time, and one sample")
    if getattr(obj, "return_logprob", None):
        _check_logprobs(obj, prompts, samples, server)
    if (host := getattr(obj, "bootstrap_host", None)) is not None:
        _check_host(obj, host, prompts, server)


def _check_both(text: Any, ids: Any) -> None:
    numbers = [len(text) if isinstance(text, list) else None, len(ids) if isinstance(ids[0], list) else None]
    if numbers[0] != numbers[1]:
        raise BadField("input_ids", "are not for the prompts of text: give one of both")


def _check_places(obj: Any) -> None:
    places = getattr(obj.positional_embed_overrides, "positions", ())
    if obj.input_ids is not None and any(place >= len(obj.input_ids) for place in places):
        raise BadField("positional_embed_overrides", "has a position behind the prompt's end")


def _check_logprobs(obj: Any, prompts: int | None, samples: int, server: ServerFacts) -> None:
    if obj.return_text_in_logprobs and not server.has_tokenizer:
        raise BadField(
            "return_text_in_logprobs", "the server has no tokenizer (--skip-tokenizer-init): leave it out"
        )
    starts, numbers = _listed(obj.logprob_start_len, prompts), _listed(obj.top_logprobs_num, prompts)
    params = _listed(obj.sampling_params or {}, prompts)
    named = 0
    if ids := obj.token_ids_logprob:
        named = max(len(each) for each in ids) if isinstance(ids[0], list) else len(ids)
    asked = dict.fromkeys(MAX_LOGPROBS, 0)
    for index, length in enumerate(_most_tokens(obj, prompts, server)):
        start, number = starts[index % len(starts)], numbers[index % len(numbers)]
        of_token = ((number or 0) + named) * samples
        if start is not None and start >= 0:
            asked["prompts"] += max(0, length - start) * of_token
        most = params[index % len(params)].get("max_new_tokens", DEFAULT_NEW_TOKENS)
        asked["answers"] += (
            min(server.context_length if most is None else most, server.context_length) * of_token
        )
    for part, field in (("prompts", "logprob_start_len"), ("answers", "top_logprobs_num")):
        if asked[part] > MAX_LOGPROBS[part]:
            raise BadField(
                field,
                f"asks for up to {asked[part]} log probabilities of {part} beside top_logprobs_num, "
                f"token_ids_logprob and max_new_tokens: ask for at most {MAX_LOGPROBS[part]}",
            )


def _listed(value: Any, prompts: int | None) -> list[Any]:
    return value if isinstance(value, list) and prompts is not None else [value]


def _most_tokens(obj: Any, prompts: int | None, server: ServerFacts) -> list[int]:
    """Of each prompt, an upper bound of its tokens: a text has no more than bytes, a session any number."""
    if getattr(obj, "session_params", None):
        return [server.context_length]
    given: list[Any] = [obj.input_ids, obj.text, obj.input_embeds, []]
    values = next(value for value in given if value is not None)
    of_prompts: list[Any] = values if prompts is not None else [values]
    return [
        min(_bytes(one) if isinstance(one, str) else len(one), server.context_length) for one in of_prompts
    ]


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _check_host(obj: Any, host: Any, prompts: int | None, server: ServerFacts) -> None:
    hosts = host if isinstance(host, list) else [host]
    if server.chunk_tokens is None or FAKE_BOOTSTRAP_HOST not in hosts:
        return
    if max(_most_tokens(obj, prompts, server)) >= server.chunk_tokens:
        raise BadField(
            "bootstrap_host",
            f"{FAKE_BOOTSTRAP_HOST} marks a warm-up, whose prompt must be shorter than "
            f"{server.chunk_tokens} tokens (--chunked-prefill-size): give the prefill server's",
        )

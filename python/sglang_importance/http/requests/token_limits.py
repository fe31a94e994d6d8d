"""Requests that end sglang's scheduler, and the server: of tokens that the model has not, or of none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BadTokens(ValueError):
    """Token ids that the model does not have, more than it has, or, in a batch, a prompt without any.

    The message says where.

    sglang itself refuses a single prompt without any.
    """


def check_request(input_ids: Any, sampling_params: Any, top_logprobs_num: Any, vocabulary: int) -> None:
    """Looks at what a request to ``/generate`` or an engine says in these fields.

    Raises:
        BadTokens: one of them would end the scheduler.
    """
    check_token_ids("input_ids", input_ids, vocabulary)
    check_stop_tokens(sampling_params, vocabulary)
    check_top_logprobs("top_logprobs_num", top_logprobs_num, vocabulary)


def check_token_ids(field: str, ids: Any, vocabulary: int) -> None:
    """Looks at the ids of a prompt, or of each prompt of a batch.

    What is no list of ids is left to sglang, which says so.

    Args:
        field: where the ids stand in the request.
        ids: what stands there.
        vocabulary: number of token ids that the model has.

    Raises:
        BadTokens: an id is not in the vocabulary, or a prompt of a batch has no ids.
    """
    if not _is_list(ids):
        return
    is_batch = isinstance(ids[0], list | tuple)
    for index, prompt in enumerate(ids if is_batch else [ids]):
        if isinstance(prompt, list | tuple) and not prompt:
            raise BadTokens(f"{field}.{index}: a prompt without tokens")
        if _is_list(prompt) and (problem := unknown_token(prompt, vocabulary)):
            raise BadTokens(f"{field}.{index}: {problem}" if is_batch else f"{field}: {problem}")


def check_stop_tokens(sampling_params: Any, vocabulary: int) -> None:
    """Looks at the stop tokens of a request, or of each of a batch, where sglang masks them in the logits.

    It does so until ``min_new_tokens`` are generated; else they are only compared, and any will do.

    Raises:
        BadTokens: a stop token is not in the vocabulary.
    """
    is_batch = _is_list(sampling_params)
    for index, params in enumerate(sampling_params if is_batch else [sampling_params]):
        if not isinstance(params, dict) or not params.get("min_new_tokens"):
            continue
        try:
            ids = [
                int(token) for token in params.get("stop_token_ids") or () if token is not None
            ]  # as sglang does
        except (TypeError, ValueError, OverflowError):
            continue
        place = f"sampling_params.{index}" if is_batch else "sampling_params"
        check_token_ids(f"{place}.stop_token_ids", ids, vocabulary)


def check_top_logprobs(field: str, number: Any, vocabulary: int) -> None:
    """Looks at the number of likeliest tokens that an answer is to name, or at those of a batch.

    Args:
        field: where it stands in the request.
        number: what stands there.
        vocabulary: number of token ids that the model has.

    Raises:
        BadTokens: the model has fewer tokens.
    """
    is_batch = _is_list(number)
    for index, each in enumerate(number if is_batch else [number]):
        if isinstance(each, int) and each > vocabulary:
            place = f"{field}.{index}" if is_batch else field
            raise BadTokens(f"{place}: {each} is more than the model's vocabulary of {vocabulary}")


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
    return f"token id {wrong} is beyond the model's vocabulary of {vocabulary}"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0

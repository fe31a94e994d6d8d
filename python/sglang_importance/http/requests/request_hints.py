"""Checks and hints of every request to a server or engine, and the reports in its answer.

sglang carries ``kv_hints`` of ``/generate`` and ``Engine.generate`` as an envelope; what it drops of other
routes' bodies, the HTTP request carries (``http/requests/carried_fields.py``).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput
from transformers import BatchEncoding

from sgl_importance.placement.hints.block_places import locate_messages
from sgl_importance.placement.hints.hints import FIELD, BadHint, Hints
from sglang_importance.http.adapter_namespaces import name_adapters
from sglang_importance.http.requests.carried_fields import CarriedFields, carried_by
from sglang_importance.http.requests.fields.body_check import check_ids_of_clients
from sglang_importance.http.requests.fields.request_check import check_request
from sglang_importance.http.requests.fields.server_facts import facts_of
from sglang_importance.http.requests.unreadable import UNREADABLE, unreadable
from sglang_importance.http.requests.user_requests import is_of_user, noting
from sglang_importance.placement.hint_reports import REPORT_KEY
from sglang_importance.upstream.differences import release_requests
from sglang_importance.upstream.hooks import Hook, HookType
from sglang_importance.upstream.server_options import importance_options

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.managers.io_struct import EmbeddingReqInput
    from sglang.srt.managers.kv_hints import KvHintsEnvelope
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

GENERATE_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
HEALTH_ROUTES = ("/health", "/health_generate")
"""Of sglang's own requests that come with one of HTTP."""


def _around_generate_request(
    generate: Callable[..., AsyncGenerator[Any, None]],
    manager: TokenizerManager,
    obj: GenerateReqInput | EmbeddingReqInput,
    request: Request | None = None,
) -> AsyncGenerator[Any, None]:
    options = importance_options(manager.server_args)
    if options is None:
        return generate(manager, obj, request)
    if isinstance(obj.input_ids, BatchEncoding):  # of Ollama's chats, before sglang 0.5.23
        obj.input_ids = obj.input_ids["input_ids"]
    try:
        if request is not None and not request.url.path.endswith(HEALTH_ROUTES):
            check_ids_of_clients(obj.rid)
        check_request(obj, facts_of(manager), manager.rid_to_state)
    except ValueError:
        _nothing_to_abort(obj)
        raise
    generate = partial(_refuse_unreadable, generate)
    carried = carried_by(request)
    if carried is not None:
        carried.put_namespace(obj)
    if options.prewarm.at == "idle" and is_of_user(obj.rid):
        generate = partial(noting, generate)
    if getattr(obj, "stream", False) and _num_samples(obj) > 1:
        generate = partial(_generate_and_forget, generate)
    if not isinstance(obj, GenerateReqInput):
        return generate(manager, obj, request)
    name_adapters(obj)
    hinted = carried if carried is not None and carried.says_something else None
    if hinted is None and not obj.kv_hints:
        obj.kv_hints = None  # sglang takes an empty object for none, but not beside a batch
        return generate(manager, obj, request)
    return _generate_with_hints(generate, manager, obj, request, hinted)


async def _refuse_unreadable(
    generate: Callable[..., AsyncGenerator[Any, None]], manager: TokenizerManager, obj: Any, request: Any
) -> AsyncGenerator[Any, None]:
    """What the check missed and sglang stumbles over before it answers is still the client's error."""
    began = False
    try:
        async with aclosing(generate(manager, obj, request)) as outputs:
            async for output in outputs:
                began = True
                yield output
    except UNREADABLE as error:
        _nothing_to_abort(obj)
        if began:
            raise
        raise ValueError(unreadable(error)) from error
    except ValueError:
        _nothing_to_abort(obj)
        raise


def _nothing_to_abort(obj: GenerateReqInput | EmbeddingReqInput) -> None:
    """Behind a stream sglang aborts what is left of its request, also of one that it never took apart."""
    if not hasattr(obj, "is_single"):
        obj.is_single, obj.rid = True, None


async def _generate_and_forget(
    generate: Callable[..., AsyncGenerator[Any, None]], manager: TokenizerManager, obj: Any, request: Any
) -> AsyncGenerator[Any, None]:
    """sglang enters prompts that are sampled several times, and removes them only if the request breaks off.

    One that is left would keep a server that is told to stop from stopping.
    """
    async with aclosing(generate(manager, obj, request)) as outputs:
        async for output in outputs:
            yield output
    release_requests(manager, obj.rid)


def _num_samples(obj: Any) -> int:
    params = obj.sampling_params
    first = params[0] if isinstance(params, list) and params else params
    samples = first.get("n", 1) if isinstance(first, dict) else 1
    return samples if isinstance(samples, int) else 1


async def _generate_with_hints(
    generate: Callable[..., AsyncGenerator[Any, None]],
    manager: TokenizerManager,
    obj: GenerateReqInput,
    request: Request | None,
    hinted: CarriedFields | None,
) -> AsyncGenerator[Any, None]:
    reports: dict[int, dict[str, Any]] = {}
    if hinted is None:
        _attach_native(obj)
    else:
        hinted.rounds.append(reports)
        _attach_carried(obj, hinted)
    async with aclosing(generate(manager, obj, request)) as outputs:
        async for output in outputs:
            for position, each in enumerate(output if isinstance(output, list) else [output]):
                report = _take_report(each["meta_info"])
                if report is not None:
                    reports[each.get("index", position)] = report
            yield output


def _attach_carried(obj: GenerateReqInput, carried: CarriedFields) -> None:
    prompt = obj.input_ids if carried.messages.count else []
    hints = carried.hints_for(prompt)  # type: ignore[arg-type]  # a chat has one prompt, as token ids
    obj.kv_hints = hints.envelope(carried.fields.hints_value)
    if hints.prefetch:
        _generate_nothing(obj)


def _attach_native(obj: GenerateReqInput) -> None:
    values = [_plain(value) for value in _as_list(obj.kv_hints)]
    hints = _read(values)
    envelopes: list[dict[str, Any] | KvHintsEnvelope | None] = [
        each.envelope(value) if value else None for each, value in zip(hints, values, strict=True)
    ]
    obj.kv_hints = envelopes if isinstance(obj.kv_hints, list) else envelopes[0]
    if any(each.prefetch for each in hints):
        _generate_nothing(obj)


def read_native_hints(value: Any, num_prompts: int | None) -> list[Hints]:
    """The hints of each prompt of a ``/generate`` request, or of all where they have one object in common.

    Args:
        value: the field as the client sent it.
        num_prompts: of a batch; None for a request with a single prompt.

    Raises:
        BadHint: a hint cannot be followed; names the field.
    """
    if isinstance(value, list) and len(value) != num_prompts:
        prompts = "a single prompt" if num_prompts is None else f"{num_prompts} prompts"
        raise BadHint(
            FIELD, f"is a list of {len(value)} for {prompts}: give one object, or one for each of a batch"
        )
    return _read(_as_list(value))


def _read(values: list[Any]) -> list[Hints]:
    hints = [Hints.parse(value) if value else Hints() for value in values]
    hints = [locate_messages(each, 0, lambda messages: 0) for each in hints]
    if len({each.prefetch for each in hints}) > 1:
        raise BadHint(f"{FIELD}.prefetch", "give it to every prompt of the batch or to none")
    return hints


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _plain(value: Any) -> Any:
    """sglang's envelope, which FastAPI or a caller has made, as the JSON that stands for it."""
    if not isinstance(value, msgspec.Struct):
        return value
    document = msgspec.structs.asdict(value)
    return {**document, "actions": [msgspec.structs.asdict(action) for action in document["actions"]]}


def _generate_nothing(obj: GenerateReqInput) -> None:
    """Ends the request with its prefill, as sglang does to cache a prompt that it will sample in parallel."""
    nothing = {"max_new_tokens": 0, "min_new_tokens": 0}
    if isinstance(obj.sampling_params, list):
        obj.sampling_params = [{**params, **nothing} for params in obj.sampling_params]
    else:
        obj.sampling_params = {**(obj.sampling_params or {}), **nothing}


def _take_report(meta_info: dict[str, Any]) -> dict[str, Any] | None:
    """Moves the report out of sglang's details, which are then what they are without us."""
    details = meta_info.get("cached_tokens_details")
    if not details or REPORT_KEY not in details:
        return None
    stock = {key: value for key, value in details.items() if key != REPORT_KEY}
    meta_info["cached_tokens_details"] = stock or None
    report: dict[str, Any] = json.loads(details[REPORT_KEY])
    meta_info[REPORT_KEY] = report
    return report


HOOKS: dict[str, Hook] = {GENERATE_TARGET: (_around_generate_request, HookType.AROUND)}
"""The hook in the launcher through which the tokenizer manager takes hints and refuses what is wrong."""

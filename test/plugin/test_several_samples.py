"""A streamed request for several samples leaves nothing in sglang's table of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.http.requests.request_hints import _around_generate_request
from sglang_importance.upstream.server_options import attach_options


class Manager:
    """As sglang's: enters the prompts, samples them under other ids, and forgets those when they are done."""

    _release_req_states_on_failure = TokenizerManager._release_req_states_on_failure

    def __init__(self) -> None:
        self.server_args = SimpleNamespace()
        attach_options(self.server_args, ImportanceOptions(policy="observe"))
        self.model_config = SimpleNamespace(vocab_size=100)
        self.encoder_dispatch_ready: dict[str, Any] = {}
        self.rid_to_state: dict[str, Any] = {"another": SimpleNamespace(dispatched=False)}

    def _release_lora_once(self, state: object) -> None:
        """Of later releases; no adapter is held."""

    async def generate(self, _: object, obj: Any, request: object) -> AsyncGenerator[dict[str, Any], None]:
        obj.rid = ["prompt", "never used"]
        for rid in obj.rid:
            self.rid_to_state[rid] = SimpleNamespace(dispatched=False)
        for sample in range(2):
            yield {"index": sample}


@pytest.mark.parametrize(("ids", "params"), [([1, 2], {"n": 2}), ([[1, 2]], [{"n": 2}])])
def test_what_was_never_sent_is_forgotten_when_the_stream_ends(ids: Any, params: Any):
    manager = Manager()
    obj = GenerateReqInput(stream=True, sampling_params=params, input_ids=ids)

    async def stream() -> list[Any]:
        return [each async for each in _around_generate_request(manager.generate, manager, obj)]

    assert asyncio.run(stream()) == [{"index": 0}, {"index": 1}]
    assert set(manager.rid_to_state) == {"another"}

"""Messages between the HTTP process and the schedulers.

sglang's control plane fans a message out to every scheduler and collects one answer from each. Both
processes must know the types (``hook_custom_types``); the tokenizer manager makes a communicator for each
entry of ``_COMMUNICATOR_SPECS``. The handlers are apart (``handlers``): what they import would take the HTTP
process a second to load.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sglang.srt.managers import io_struct, tokenizer_control_mixin
from sglang.srt.managers.io_struct import BaseReq

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


COMMUNICATOR = "kv_importance"


class KvImportanceReq(BaseReq, kw_only=True):
    """Asks every scheduler for an operation with arguments (JSON), or to go on with the job that it began.

    Attributes:
        jobs: to go on with, by data-parallel rank; None begins an operation.
    """

    operation: str = ""
    arguments: str = "{}"
    jobs: dict[int, int] | None = None


class KvImportanceReqOutput(BaseReq, kw_only=True):
    """One scheduler's answer; the fields of ``runner.Reply``, and the data-parallel rank."""

    document: str = ""
    error: str | None = None
    status: int = 200
    job: int | None = None
    dp_rank: int = 0


def register_messages() -> None:
    """Makes the types known to this process; call it once, before the tokenizer manager is built."""
    io_struct.hook_custom_types(KvImportanceReq, KvImportanceReqOutput)
    spec = (COMMUNICATOR, KvImportanceReqOutput)
    if spec not in tokenizer_control_mixin._COMMUNICATOR_SPECS:
        tokenizer_control_mixin._COMMUNICATOR_SPECS.append(spec)


async def ask_schedulers(
    manager: TokenizerManager, operation: str, arguments: dict[str, Any]
) -> list[KvImportanceReqOutput]:
    """What each data-parallel rank answers to an operation of ``handlers.OPERATIONS``, in order.

    Slice by slice, until the last one is done. No more than ``runner.MAX_JOBS`` questions at a time.
    """
    manager.auto_create_handle_loop()
    communicate = getattr(manager, f"{COMMUNICATOR}_communicator")
    answers: dict[int, KvImportanceReqOutput] = {}
    question = KvImportanceReq(operation=operation, arguments=json.dumps(arguments))
    while True:
        replies: list[KvImportanceReqOutput] = await communicate(question)
        going_on = [reply for reply in replies if reply.dp_rank not in answers]
        answers |= {reply.dp_rank: reply for reply in going_on if reply.job is None}
        jobs = {reply.dp_rank: reply.job for reply in going_on if reply.job is not None}
        if not jobs:
            return [answers[rank] for rank in sorted(answers)]
        question = KvImportanceReq(jobs=jobs)

"""From the process that holds a tokenizer manager to its schedulers, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sglang_importance.operations.messages import COMMUNICATOR, KvImportanceReq, KvImportanceReqOutput

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


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

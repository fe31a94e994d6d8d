"""Messages between the HTTP process and the schedulers.

sglang's control plane fans a message out to every scheduler and collects one answer from each. Both
processes must know the types (``hook_custom_types``); the tokenizer manager makes a communicator for each
entry of ``_COMMUNICATOR_SPECS``. The handlers are apart (``handlers``): what they import would take the HTTP
process a second to load.
"""

from __future__ import annotations

from sglang.srt.managers import io_struct, tokenizer_control_mixin
from sglang.srt.managers.io_struct import BaseReq

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

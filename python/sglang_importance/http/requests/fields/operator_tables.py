"""What an operator's requests may hold: sglang's classes of its control messages (``managers/io_struct.py``).

They reach the scheduler as they are, and it believes them as it believes prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile

from sglang.srt.configs.load_config import LoadFormat

from sglang_importance.http.requests.fields.bad_field import shown
from sglang_importance.http.requests.fields.field import (
    Field,
    Table,
    anything,
    one_of,
    only_default,
    rows,
    yes_or_no,
)
from sglang_importance.http.requests.fields.number_rules import INT32, INT64, integer, real
from sglang_importance.http.requests.fields.object_rules import fields_of
from sglang_importance.http.requests.fields.server_facts import ServerFacts
from sglang_importance.http.requests.fields.text_rules import name, text, texts

LONGEST_SLEEP = 60.0
MAX_SECONDS = 1e9

_passed_on = Field(anything)
_internal = Field(only_default("sglang sets it itself"))
_MESSAGE: Table = {"rid": _internal, "http_worker_ipc": _internal}
_named = Field(text(4096, least=1))


def _writable_folder(value: object, server: ServerFacts) -> str | None:
    """sglang makes the folder when a profile is over, in the middle of a step."""
    if problem := name(value, server):
        return problem
    try:
        Path(str(value)).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=str(value)):
            return None
    except (OSError, ValueError) as error:
        return f"{shown(value)} cannot be written to ({error}): give another folder"


OPEN_SESSION: Table = {
    **_MESSAGE,
    "capacity_of_str_len": Field(integer(0, INT64)),
    "session_id": _named,
    "streaming": Field(yes_or_no),
    "timeout": Field(real(0, MAX_SECONDS)),
}
CLOSE_SESSION: Table = {**_MESSAGE, "session_id": _named}
ABORT: Table = {
    **_MESSAGE,
    "rid": Field(name),
    "abort_all": Field(yes_or_no),
    **rows(_internal, "finished_reason abort_message weight_versions"),
}
SLOW_DOWN: Table = {**_MESSAGE, "forward_sleep_time": Field(real(0, LONGEST_SLEEP))}
INTERNAL_STATE: Table = {
    **_MESSAGE,
    "server_args": Field(
        fields_of(
            {
                "pp_max_micro_batch_size": Field(integer(1, INT32)),
                "speculative_accept_threshold_single": Field(real(0, 1)),
                "speculative_accept_threshold_acc": Field(real(0, 1)),
                "dspark_force_budget_frac": Field(real(0, 1)),
                "dspark_clear_info_records": Field(real(0, 1)),
            }
        )
    ),
}
LOGGING: Table = {
    **_MESSAGE,
    "log_requests": Field(yes_or_no),
    "log_requests_level": Field(integer(0, 3)),
    "log_requests_format": Field(one_of("text", "json")),
    "log_level": Field(one_of("debug", "info", "warning", "error", "critical")),
    "dump_requests_folder": Field(name),
    "dump_requests_threshold": Field(integer(1, INT32)),
    "crash_dump_folder": Field(name),
    "dump_requests_exclude_meta_keys": Field(texts(64, 4096)),
}
PROFILE: Table = {
    **_MESSAGE,
    "req_type": _internal,
    "output_dir": Field(_writable_folder),
    "start_step": Field(integer(0, INT64)),
    "num_steps": Field(integer(1, INT64)),
    "activities": Field(texts(8, 64)),
    **rows(Field(yes_or_no), "profile_by_stage with_stack record_shapes merge_profiles detailed_annotations"),
    "profile_id": Field(name),
    "profile_prefix": Field(name),
    "profile_stages": Field(texts(8, 64)),
}
WEIGHT_VERSION: Table = {
    **_MESSAGE,
    "new_version": Field(name),
    "abort_all_requests": Field(yes_or_no),
}
WEIGHTS_FROM_DISK: Table = {
    **_MESSAGE,
    "model_path": _named,
    "load_format": Field(one_of(*(each.value for each in LoadFormat))),
    **rows(
        Field(yes_or_no),
        "abort_all_requests is_async torch_empty_cache keep_pause recapture_cuda_graph flush_cache",
    ),
    "weight_version": Field(name),
    "token_step": Field(integer(0, INT64)),
    "manifest": _passed_on,
}
FUNCTION_CALL: Table = {
    **_MESSAGE,
    "text": _passed_on,
    "tools": _passed_on,
    "tool_call_parser": _named,
}
REASONING: Table = {
    **_MESSAGE,
    "text": _passed_on,
    "reasoning_parser": _named,
    "return_blocks": Field(yes_or_no),
}

OPERATOR_TABLES: Mapping[str, Table] = {
    "OpenSessionReqInput": OPEN_SESSION,
    "CloseSessionReqInput": CLOSE_SESSION,
    "AbortReq": ABORT,
    "SlowDownReqInput": SLOW_DOWN,
    "SetInternalStateReq": INTERNAL_STATE,
    "ConfigureLoggingReq": LOGGING,
    "ProfileReq": PROFILE,
    "UpdateWeightVersionReqInput": WEIGHT_VERSION,
    "UpdateWeightFromDiskReqInput": WEIGHTS_FROM_DISK,
    "ParseFunctionCallReq": FUNCTION_CALL,
    "SeparateReasoningReqInput": REASONING,
}
"""By the name of sglang's class. Tensors and adapters are read by sglang where they are loaded."""

_NO_RECORDER = "the server records no experts (--expert-distribution-recorder-mode)"


def _records_experts(server: ServerFacts) -> bool:
    return server.records_experts


def _has_accelerator(server: ServerFacts) -> bool:
    return server.has_accelerator


NEEDS: Mapping[str, tuple[Callable[[ServerFacts], bool], str]] = {
    **dict.fromkeys(
        (
            "start_expert_distribution_record_async",
            "stop_expert_distribution_record_async",
            "dump_expert_distribution_record_async",
        ),
        (_records_experts, _NO_RECORDER),
    ),
    **dict.fromkeys(
        ("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance"),
        (_has_accelerator, "sglang sends weights between GPUs or NPUs, and this server has none"),
    ),
}
"""Routes that end or hold a server that lacks something, by their functions' names: whether it has it, and
what to say."""

"""Pages of models with linear attention: of one token, where sglang keeps states at ends of requests only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_importance.upstream.hooks import Hook, HookType
from sglang_importance.upstream.refusal import LaunchRefused, exit_refused

VALIDATION_TARGET = "sglang.srt.arg_groups.mamba_hook.validate_mamba_no_buffer"


def _before_validation(validate: Callable[..., None], view: Any, *args: Any, **kwargs: Any) -> None:
    if view.page_size in (None, 1):
        validate(view, *args, **kwargs)
        return
    refused = LaunchRefused(
        [
            f"linear attention has no pages of {view.page_size} tokens with --mamba-radix-cache-strategy "
            "no_buffer, the only one on a CPU: use --page-size 1"
        ]
    )
    # A command line ends in one line; a program that embeds an engine gets the exception.
    if getattr(view, "launch_command", None) is None:
        raise refused
    exit_refused(refused)


HOOKS: dict[str, Hook] = {VALIDATION_TARGET: (_before_validation, HookType.AROUND)}

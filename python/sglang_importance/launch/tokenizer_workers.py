"""Tokenizer workers (``--tokenizer-worker-num``): processes that answer HTTP; sglang loads no plugin in them.

A worker gets nothing but sglang's arguments, and asks them for the class of its tokenizer manager before it
serves. That question brings us into it, so a worker either has our parts or does not start.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sglang_importance.launch.installers import install_in_worker
from sglang_importance.upstream.refusal import LaunchRefused, report

if TYPE_CHECKING:
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

logger = logging.getLogger(__name__)

QUESTION = "get_tokenizer_worker_class"
"""The method of ServerArgs that a worker calls."""


def has_workers(server_args: Any) -> bool:
    """Whether processes of their own answer HTTP, and the launcher does not."""
    return bool(server_args.tokenizer_worker_num > 1)


def reach_workers(server_args: Any, options: ImportanceOptions) -> None:
    """Makes every worker of the server install our parts before it serves."""
    # Not by setattr: sglang seals its arguments once it has resolved them. What lies here is pickled too.
    vars(server_args)[QUESTION] = partial(worker_class, options)
    if options.policy == "importance" and options.prewarm.at != "off" and options.ledger_place:
        logger.warning(
            "KV importance: %s %s does nothing beside several tokenizer workers: none of them sees "
            "what the others serve",
            name_of("prewarm.at"),
            options.prewarm.at,
        )


def worker_class(options: ImportanceOptions) -> type[TokenizerWorker]:
    """sglang's own class, once our parts are installed in this worker; else the server ends."""
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
    from uvicorn.config import STARTUP_FAILURE

    try:
        install_in_worker(options)
    except LaunchRefused as refused:
        report(refused)
        os._exit(STARTUP_FAILURE)  # at any other code uvicorn would start the worker anew, for ever
    return TokenizerWorker

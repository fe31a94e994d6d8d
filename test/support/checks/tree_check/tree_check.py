"""A plugin that checks the whole tree whenever a scheduler is idle; upstream does so with hybrid models only.

A tree that is not sound ends the server. Found by sglang through the folder's dist-info, where PYTHONPATH
names the folder; no part of the package.
"""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

CHECKED = "tree_check: sound with"

logger = logging.getLogger(__name__)


def _check(checker: Any) -> None:
    cache = checker.tree_cache
    cache.sanity_check()
    logger.info("%s %d tokens", CHECKED, cache.total_size()[0])


def register() -> None:
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker

    SchedulerInvariantChecker._check_tree_cache = _check

"""A plugin that makes a callback or an operation of ours raise in a running server: which one says a file.

The file is read whenever the cache is flushed. A flush also undoes a fallback, which only a restart does on a
server without this plugin: so one server stands in for one per callback. When it is idle, the whole tree is
checked; upstream asks for that with other kinds of models only.

Found by sglang through the folder's dist-info, where PYTHONPATH names the folder; no part of the package.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

PLAN_FILE = "KV_CALLBACK_FAULT_FILE"
"""Names the file: JSON with the name of a ``target``, and the ``call`` to fail at, counted from the flush; 0
is every call. Once the target has raised and the tree was found whole after that, its name is in the file
``.checked`` beside this one."""


class Planned(Exception):
    """What the targets raise."""


@dataclass
class Plan:
    target: str = ""
    call: int = 0
    calls: int = 0
    has_raised: bool = False

    def called(self, target: str) -> None:
        if target != self.target:
            return
        self.calls += 1
        if self.call in (0, self.calls):
            self.has_raised = True
            raise Planned(target)


_plan = Plan()


def _file() -> Path:
    return Path(os.environ[PLAN_FILE])


def _breakable(target: str, work: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        _plan.called(target)
        return work(*args, **kwargs)

    return call


def _begin_anew(component: Any) -> None:
    global _plan
    _plan = Plan(**json.loads(_file().read_text()))
    component.state.faults.fallback = None
    rows = component.requests._folding.rows
    if rows is not None:
        rows._is_closed, rows._failure = False, None


def _check(tree_cache: Any) -> None:
    tree_cache.sanity_check()
    if _plan.has_raised:
        _file().with_suffix(".checked").write_text(_plan.target)


def register() -> None:
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker

    from sglang_importance.cache.component import ImportanceComponent
    from sglang_importance.operations.handlers import OPERATIONS

    from support.callbacks import BESIDE, LEARNING, ON_FLUSH, RECORDING, WITH_STORAGE, name_of

    for owner, method, _ in (*LEARNING, *WITH_STORAGE, *ON_FLUSH, *RECORDING, *BESIDE):
        setattr(owner, method, _breakable(name_of(owner, method), getattr(owner, method)))
    for name, operation in OPERATIONS.items():
        OPERATIONS[name] = _breakable(f"operation {name}", operation)

    watch_tree = ImportanceComponent.watch_tree

    def watch_tree_anew(component: ImportanceComponent) -> None:
        _begin_anew(component)
        watch_tree(component)

    ImportanceComponent.watch_tree = watch_tree_anew
    SchedulerInvariantChecker._check_tree_cache = lambda checker: _check(checker.tree_cache)

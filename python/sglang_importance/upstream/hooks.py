"""The one way to hook a function of sglang, and the proof that sglang has applied the hook.

sglang applies the hooks of a target once and only logs where it cannot, so ``install_hooks``
checks that it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_importance.upstream.refusal import WITHOUT_POLICY, LaunchRefused, cure

__all__ = ["Hook", "HookType", "dead_hooks", "declare", "install_hooks", "is_applied"]

Hook = tuple[Callable[..., Any], HookType]
"""A function of ours, and whether it runs after or around upstream's."""

PACKAGE = "sglang_importance"


def declare(hooks: Mapping[str, Hook]) -> None:
    """Leaves hooks, by target, for sglang to apply once its plugins are loaded; check with ``is_applied``."""
    for target, (function, kind) in hooks.items():
        HookRegistry.register(target, function, kind)


def install_hooks(hooks: Mapping[str, Hook], *, otherwise: str = WITHOUT_POLICY) -> None:
    """Hooks functions of sglang now; those that are hooked already stay as they are.

    Args:
        hooks: by the function's full name.
        otherwise: what an operator can do without them.

    Raises:
        LaunchRefused: sglang could not hook one of them.
    """
    for target, (function, kind) in hooks.items():
        if any(registered is function for _, registered, _ in HookRegistry._hooks.get(target, ())):
            continue
        if target in HookRegistry._patched:
            # Hooks of a target are applied once: ours would be left out without a word.
            raise LaunchRefused([f"another plugin has hooked {target}: drop that plugin or {otherwise}"])
        HookRegistry.register(target, function, kind)
    HookRegistry.apply_hooks()
    if dead := [target for target in hooks if not is_applied(target)]:
        raise LaunchRefused([f"sglang could not hook {target}: {cure(otherwise)}" for target in dead])


def is_applied(target: str) -> bool:
    """Whether sglang has applied the hooks on ``target``."""
    return target in HookRegistry._patched


def dead_hooks() -> list[str]:
    """Targets of ours that sglang could not hook in this process."""
    return sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        if not is_applied(target) and any(function.__module__.startswith(PACKAGE) for _, function, _ in hooks)
    )

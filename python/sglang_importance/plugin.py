"""Entry point of the sglang plugin.

sglang calls ``register`` in the launcher, before it parses its arguments, and at the first line of each
scheduler process. It logs and swallows whatever a plugin or the application of a hook raises, so each stage
proves that the stage before it took effect:

===========================================  =============================================================
what failed to install                       what stops the launch
===========================================  =============================================================
``register`` or the hook that adds flags     argparse: ``--kv-policy`` is unknown
the hook that reads the flags                the flag itself: it allows nothing but ``default``
the hook around the launch                   the hook that reads the flags, which applies it and looks
``register`` in a scheduler                  sglang: nobody registered the radix cache backend
anything inside a scheduler                  the scheduler's proof (``liveness``), before it reports ready
the proof itself                             the launcher: the scheduler's report carries no proof
===========================================  =============================================================

Under ``--kv-policy default`` a launcher gets the flags and a scheduler two calls that pass through at start,
nothing else. What the other policies install is listed in ``installers``, by process. A scheduler learns its
policy from the arguments that it is given, not from the environment: one process may launch several engines
with different policies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

from sglang_importance.cpu import install as install_cpu_support
from sglang_importance.launch.flags import add_flags, options_of
from sglang_importance.upstream.hooks import HookType, declare, is_applied
from sglang_importance.upstream.refusal import LaunchRefused, cure, exit_refused
from sglang_importance.upstream.server_options import attach_options

CONFIG_TARGET = "sglang.srt.utils.server_args_config_parser.ConfigArgumentMerger.merge_config_with_args"
FLAGS_TARGET = "sglang.srt.server_args.ServerArgs.add_cli_args"
SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
OPTIONS_TARGET = "sglang.srt.server_args.ServerArgs.from_cli_args"


def register() -> None:
    """Called by sglang in each of its processes."""
    try:
        install_cpu_support()
    except ValueError as error:
        exit_refused(LaunchRefused([str(error)]))
    if multiprocessing.parent_process() is None:
        declare(
            {
                CONFIG_TARGET: (_around_merge_config, HookType.AROUND),
                FLAGS_TARGET: (_after_add_cli_args, HookType.AFTER),
                OPTIONS_TARGET: (_around_from_cli_args, HookType.AROUND),
            }
        )
    elif SCHEDULER_MODULE in sys.modules:  # sglang's detokenizer would import it for the sake of our hooks
        from sglang_importance.launch.scheduler_launch import HOOKS

        declare(HOOKS)


def _around_merge_config(merge: Callable[..., list[str]], merger: Any, argv: list[str]) -> list[str]:
    """Says in one line what is wrong with a file of flags, where one of ours is in it or beside it."""
    try:
        return merge(merger, argv)
    except Exception as error:
        from sglang_importance.launch.preflight import config_problem, may_name_our_flags

        path = next(iter(argv[argv.index("--config") + 1 :]), "")
        on_the_line = any(word.startswith(("--kv-policy", "--kv-importance")) for word in argv)
        if not (on_the_line or may_name_our_flags(path)):
            raise
        exit_refused(LaunchRefused([config_problem(path, error)]))


def _after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    unusable = None
    if not is_applied(OPTIONS_TARGET):
        unusable = f"cannot take effect: sglang could not hook {OPTIONS_TARGET}; {cure()}"
    add_flags(parser, unusable=unusable)


def _around_from_cli_args(
    from_cli_args: Callable[..., Any], server_args_class: type, args: argparse.Namespace
) -> Any:
    if not hasattr(args, "kv_policy"):
        return from_cli_args(server_args_class, args)
    from sglang_importance.launch.launcher import prepare_launch
    from sglang_importance.launch.preflight import check_config_is_read

    try:
        options = options_of(args)
        check_config_is_read(args, options)
        prepare_launch(args, options)
    except ValueError as error:
        exit_refused(LaunchRefused([str(error)]))
    except LaunchRefused as refused:
        exit_refused(refused)
    server_args = from_cli_args(server_args_class, args)
    attach_options(server_args, options)
    return server_args

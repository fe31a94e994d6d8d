"""``sglang.Engine`` with a KV policy, for programs that start no server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sgl_importance.options import ImportanceOptions
from sgl_importance.settings import SETTINGS, keyword
from sglang_importance.upstream.server_options import attach_options

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

__all__ = ["importance_engine"]


def importance_engine(**arguments: Any) -> Engine:
    """Starts an engine whose KV cache follows importance.

    Like ``sglang.Engine``, it spawns processes: call it below ``if __name__ == "__main__":``.

    Args:
        **arguments: those of ``sglang.Engine``, and beside them ``kv_policy`` ("importance" where absent),
            ``kv_importance_interval`` and the other options, named as their flags.

    Raises:
        ValueError: an option has a value that cannot be used.
        sglang_importance.upstream.refusal.LaunchRefused: the policy cannot run with these arguments, this
            model or this sglang. Its message has one line per reason.
    """
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from sglang_importance.launch.launcher import prepare_launch

    load_plugins()
    options = take_options(arguments)
    args = argparse.Namespace(**{"log_level": "error", **arguments})
    args._radix_eviction_policy_explicitly_set = "radix_eviction_policy" in arguments
    prepare_launch(args, options, serves_http=False)
    server_args = ServerArgs(**vars(args))
    attach_options(server_args, options)
    engine: Engine = sglang.Engine(server_args=server_args)
    return engine


def take_options(arguments: dict[str, Any]) -> ImportanceOptions:
    """Moves our options out of an engine's arguments.

    Raises:
        ValueError: a value cannot be used.
    """
    chosen = {name: arguments.pop(keyword(name)) for name in SETTINGS if keyword(name) in arguments}
    if "layers" in chosen:
        chosen["layers"] = () if chosen["layers"] == "auto" else tuple(chosen["layers"])
    return ImportanceOptions(**{"policy": "importance", **chosen})

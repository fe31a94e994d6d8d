"""``sglang.Engine`` with a KV policy, for programs that start no server."""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgl_importance.ledger.steady_time import steady_time
from sgl_importance.options import ImportanceOptions
from sgl_importance.settings import SETTINGS, keyword
from sglang_importance.upstream.server_options import attach_options

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

__all__ = ["KvImportance", "OperationRefused", "importance_engine"]


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


class OperationRefused(ValueError):
    """The schedulers cannot do what was asked; the message says why."""


class KvImportance:
    """What a server answers below ``/kv_importance``, of an engine in this program.

    Hints go with a request: ``engine.generate(..., kv_hints=...)``, as in the body of ``/generate``. Like
    ``Engine.generate``, the methods block, and are no use within a running event loop.

    Args:
        engine: of ``importance_engine``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def snapshot(
        self, *, limit: int = 200, cursor: str | None = None, min_tokens: int = 0, dp_rank: int = 0
    ) -> dict[str, Any]:
        """The document of ``GET /kv_importance``, of one data-parallel rank.

        Raises:
            OperationRefused: the cursor is none of a snapshot.
        """
        arguments = {"limit": limit, "cursor": cursor, "min_tokens": min_tokens}
        return self._ask("snapshot", arguments)[dp_rank]

    def pins(self, *, dp_rank: int = 0) -> dict[str, Any]:
        """The document of ``GET /kv_importance/pins``, of one data-parallel rank.

        Raises:
            OperationRefused: under ``observe``, where a pin would move nothing.
        """
        return self._ask("pins", {})[dp_rank]

    def pin(
        self,
        input_ids: Sequence[int],
        *,
        ttl_seconds: float | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """Pins a prefix on every rank, so that it is evicted last.

        Args:
            input_ids: its tokens.
            ttl_seconds: how long the pin counts; None until it is unpinned, or nobody uses it any more.
            extra_key: of the requests that share the prefix.
            cache_salt: of the requests that share the prefix.

        Returns:
            What ``POST /kv_importance/pin`` answers for the first data-parallel rank.

        Raises:
            OperationRefused: the prefix fills no page, there is no room for one more pin, the policy is
                ``observe``, or the pin would have no such time.
        """
        from sglang_importance.http.pins_route import MAX_TTL_SECONDS

        if ttl_seconds is not None and not 0 < ttl_seconds <= MAX_TTL_SECONDS:
            raise OperationRefused(
                f"ttl_seconds must be above 0 and at most {MAX_TTL_SECONDS:.0f}, not {ttl_seconds}"
            )
        pin = {
            "pin_id": uuid.uuid4().hex,
            "tokens": list(input_ids),
            "extra_key": extra_key or None,  # as sglang has it: an empty one is none
            "cache_salt": cache_salt or None,
            "expires_at": None if ttl_seconds is None else steady_time() + ttl_seconds,
        }
        return self._ask("pin", pin)[0]

    def unpin(self, pin_id: str) -> None:
        """Ends a pin.

        Raises:
            OperationRefused: there is none of that name.
        """
        self._ask("unpin", {"pin_id": pin_id})

    def _ask(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        from sglang_importance.operations.questions import ask_schedulers

        manager = self._engine.tokenizer_manager
        assert manager is not None, "only the first of several nodes has one"
        question = ask_schedulers(manager, operation, arguments)
        replies = self._engine.loop.run_until_complete(question)
        for reply in replies:
            if reply.error is not None:
                raise OperationRefused(reply.error)
        return [json.loads(reply.document) for reply in replies]

"""``sglang.Engine`` with a KV policy, for programs that start no server."""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from sgl_importance.errors import ImportanceError
from sgl_importance.options.importance_options import SETTINGS, ImportanceOptions, keyword_of
from sgl_importance.options.moved_flags import MOVED_FLAGS
from sgl_importance.options.options_file import config_values, read_config
from sgl_importance.placement.ledger.steady_time import steady_time
from sglang_importance.upstream.server_options import attach_options

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

__all__ = ["KvImportance", "OperationRefused", "importance_engine"]


def importance_engine(**arguments: Any) -> Engine:
    """Starts an engine whose KV cache follows importance.

    Like ``sglang.Engine``, it spawns processes: call it below ``if __name__ == "__main__":``.

    Args:
        **arguments: those of ``sglang.Engine``, and beside them ``kv_policy`` ("importance" where absent),
            ``kv_importance_store`` and the other options, named as their flags; ``kv_importance_config`` is
            the path of a file, or its content: ``{"signal": {"interval": 4}}``.

    Raises:
        TypeError: there is no ``model_path``.
        ValueError: an option has a value that cannot be used.
        sglang_importance.upstream.refusal.LaunchRefused: the policy cannot run with these arguments, this
            model or this sglang. Its message has one line per reason.
    """
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from sglang_importance.launch.launcher import prepare_launch

    if "model_path" not in arguments:
        raise TypeError("model_path is missing: sglang's ServerArgs are given as arguments one by one")
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
    from sglang_importance.launch.flags import CONFIG_KEYWORD

    for flag, line in MOVED_FLAGS.items():
        if (keyword := flag.removeprefix("--").replace("-", "_")) in arguments:
            raise ValueError(f"{keyword} {line}")
    config = arguments.pop(CONFIG_KEYWORD, None) or {}
    chosen = config_values(config) if isinstance(config, Mapping) else read_config(config)
    for place, setting in SETTINGS.items():
        if setting.flag and keyword_of(place) in arguments:
            chosen[place] = arguments.pop(keyword_of(place))
    return ImportanceOptions.of({"policy": "importance", **chosen})


class OperationRefused(ImportanceError, ValueError):
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
            OperationRefused: the cursor is none of a snapshot, or an argument is not in its range.
        """
        from sglang_importance.operations.snapshot import MAX_LIMIT

        if not 1 <= limit <= MAX_LIMIT:
            raise OperationRefused(f"limit must be from 1 to {MAX_LIMIT}, not {limit}")
        arguments = {"limit": limit, "cursor": cursor, "min_tokens": min_tokens}
        return self._ask_rank("snapshot", arguments, dp_rank)

    def pins(self, *, dp_rank: int = 0) -> dict[str, Any]:
        """The document of ``GET /kv_importance/pins``, of one data-parallel rank.

        Raises:
            OperationRefused: under ``observe``, where a pin would move nothing; there is no such rank.
        """
        return self._ask_rank("pins", {}, dp_rank)

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
            OperationRefused: the prefix fills no page or has a token that the model does not have, the pin
                would have no such time, there is no room for one more, or the policy is ``observe``.
        """
        from sglang_importance.http.pins_route import MAX_TTL_SECONDS
        from sglang_importance.http.requests.fields.text_rules import name_problem
        from sglang_importance.http.requests.fields.token_rules import unknown_token

        tokens = [index(token) for token in input_ids]  # numpy's and torch's too
        if tokens and (problem := unknown_token(tokens, self._manager.model_config.vocab_size)):
            raise OperationRefused(f"input_ids: {problem}")
        for field, name in (("extra_key", extra_key), ("cache_salt", cache_salt)):
            if name is not None and (problem := name_problem(name)):
                raise OperationRefused(f"{field}: {problem}")
        if ttl_seconds is not None and not 0 < ttl_seconds <= MAX_TTL_SECONDS:
            raise OperationRefused(
                f"ttl_seconds must be above 0 and at most {MAX_TTL_SECONDS:.0f}, not {ttl_seconds}"
            )
        pin = {
            "pin_id": uuid.uuid4().hex,
            "tokens": tokens,
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

    @property
    def _manager(self) -> TokenizerManager:
        manager: TokenizerManager | None = self._engine.tokenizer_manager
        assert manager is not None, "only the first of several nodes has one"
        return manager

    def _ask_rank(self, operation: str, arguments: dict[str, Any], dp_rank: int) -> dict[str, Any]:
        answers = self._ask(operation, arguments)
        if not 0 <= dp_rank < len(answers):
            raise OperationRefused(f"dp_rank: there is no rank {dp_rank}, the last one is {len(answers) - 1}")
        return answers[dp_rank]

    def _ask(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        from sglang_importance.operations.messages import ask_schedulers

        question = ask_schedulers(self._manager, operation, arguments)
        replies = self._engine.loop.run_until_complete(question)
        for reply in replies:
            if reply.error is not None:
                raise OperationRefused(reply.error)
        return [json.loads(reply.document) for reply in replies]

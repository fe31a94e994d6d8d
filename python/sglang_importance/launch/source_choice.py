"""Which producer of page scores a server uses, once sglang has chosen its attention backends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sglang_importance.attention.score_sources import NONE, UNPROVEN, automatic_source
from sglang_importance.launch.modes.rule import unscored_modes
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import attention_backends

logger = logging.getLogger(__name__)


def settle_source(args: Any, options: ImportanceOptions) -> ImportanceOptions:
    """Puts the producer in the place of ``auto``, and says so where that is none.

    Args:
        args: sglang's arguments as resolved.
        options: what the operator chose.

    Raises:
        LaunchRefused: there is no producer, and another option needs one.
    """
    if options.is_stock or options.source != "auto":
        return options
    backends = attention_backends(args)
    if unscored := " and ".join(unscored_modes(args)):
        _demand_no_scores(options, unscored, cure="drop it")
        logger.warning(_no_scores(unscored))
        return replace(options, source=NONE)
    source = automatic_source(args.device, backends)
    if source == NONE:
        beside = f"attention backend {' and '.join(sorted(backends))} on {args.device}"
        _demand_no_scores(options, beside)
        logger.warning(_no_scores(beside) + _trials(backends))
    return replace(options, source=source)


def _demand_no_scores(
    options: ImportanceOptions,
    beside: str,
    cure: str = f"drop it, or name an untried producer with {name_of('source')}",
) -> None:
    if options.needing_scores:
        raise LaunchRefused(
            f"{need} needs page scores, and no producer of them has run beside {beside}: {cure}"
            for need in options.needing_scores
        )


def _no_scores(beside: str) -> str:
    return (
        f"KV importance: no page scores ({name_of('source')} {NONE}): no producer of them has run beside "
        f"{beside}; reuse is predicted all the same"
    )


def _trials(backends: set[str]) -> str:
    untried = ", ".join(_untried(backends))
    return f". Hardly run on a GPU, for trials: {name_of('source')} {untried}" if untried else ""


def _untried(backends: set[str]) -> Iterator[str]:
    return (source for source, fitting in UNPROVEN.items() if backends and backends <= set(fitting))

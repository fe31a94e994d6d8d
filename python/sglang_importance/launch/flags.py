"""The flags, and what they change in sglang's own arguments."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sgl_importance.options.importance_options import (
    CONFIG_FLAG,
    DEFAULTS,
    SETTINGS,
    ImportanceOptions,
    in_use,
    keyword_of,
)
from sgl_importance.options.moved_flags import MOVED_FLAGS
from sgl_importance.options.options_file import read_config
from sgl_importance.options.setting import Setting
from sglang_importance.attention.score_sources import SOURCES
from sglang_importance.upstream.server_options import RADIX_CACHE_BACKEND

logger = logging.getLogger(__name__)

CONFIG_KEYWORD = CONFIG_FLAG.removeprefix("--").replace("-", "_")
DEFAULT_PAGE_SIZE = 16  # tokens; sglang's own default of 1 would score single tokens


def select_cache(args: argparse.Namespace, options: ImportanceOptions) -> None:
    """Selects our radix cache where a policy needs it, and pages of 16 tokens where none are named."""
    if not options.is_stock:
        args.radix_cache_backend = RADIX_CACHE_BACKEND
    if _wants_single_tokens(args):
        return
    if (options.store.directory or not options.is_stock) and getattr(args, "page_size", None) is None:
        args.page_size = DEFAULT_PAGE_SIZE
        logger.warning(
            "KV importance: pages of %d tokens, since none were named: --page-size chooses others",
            DEFAULT_PAGE_SIZE,
        )


def _wants_single_tokens(args: argparse.Namespace) -> bool:
    """Whether sglang verifies trees of drafts, which it does over larger pages beside FlashInfer alone.

    See ``_handle_ngram`` in arg_groups/speculative_hook.py. On a CPU drafts are chains (cpu/speculation.py).
    """
    return (
        getattr(args, "speculative_algorithm", None) == "NGRAM"
        and getattr(args, "speculative_ngram_max_bfs_breadth", None) != 1
        and getattr(args, "attention_backend", None) != "flashinfer"
        and getattr(args, "device", None) != "cpu"
        and torch.cuda.is_available()
    )


def add_flags(parser: argparse.ArgumentParser, *, unusable: str | None = None) -> None:
    """Adds the flags as one group, and those of an earlier release, which say where their option is now.

    Args:
        parser: of sglang's own arguments.
        unusable: why no policy but ``default`` can be chosen; None where all can.
    """
    group = parser.add_argument_group(
        "importance",
        "KV cache tiering by predicted reuse (sgl-importance); at --kv-policy default only the store acts",
    )
    for place, setting in SETTINGS.items():
        if setting.flag:
            _add_flag(group, place, setting, unusable)
    group.add_argument(
        CONFIG_FLAG,
        default="",
        metavar="FILE.toml",
        help="the options that have no flag, in groups (python scripts/render_docs.py lists them: "
        "docs/generated/flags.md)",
    )
    for flag in MOVED_FLAGS:
        group.add_argument(flag, nargs="*", action=_Moved, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_flag(group: Any, place: str, setting: Setting, unusable: str | None) -> None:
    default = DEFAULTS[place]
    unit = f" {setting.unit}" if setting.unit else ""
    group.add_argument(
        setting.flag,
        dest=keyword_of(place),
        default=default,
        type=_parser_of(place, setting, default, unusable),
        choices=SOURCES if place == "source" else setting.choices or None,
        metavar={int: "N", float: "X"}[type(default)] if setting.unit else None,
        help=f"{setting.help.replace('%', '%%')} (default: {'none' if default == '' else default}{unit})",
    )


class _Moved(argparse._StoreAction):
    """Ends the launch with the line of a flag that an earlier release had.

    Of this class, since sglang's reader of YAML knows no other that takes values.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        (flag,) = self.option_strings
        parser.error(f"{flag} {MOVED_FLAGS[flag]}")


def _parser_of(place: str, setting: Setting, default: object, unusable: str | None) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if place == "policy" and unusable and text != "default":
            raise argparse.ArgumentTypeError(unusable)
        value = in_use(place, _convert(text, default, setting))
        if setting.unit and (problem := setting.problem(value)):
            raise argparse.ArgumentTypeError(problem)
        return value

    return parse


def _convert(text: str, default: object, setting: Setting) -> Any:
    """The value that ``text`` stands for; ``text`` itself where it stands for none."""
    if text == "None":  # YAML's null
        return default
    try:
        if isinstance(default, int | float):
            return type(default)(text)
    except ValueError:
        return text
    # YAML reads an unquoted off as false.
    word = "off" if text == "false" else text
    return "" if word == "off" and setting.is_path and default == "" else word


def options_of(args: argparse.Namespace) -> ImportanceOptions:
    """The options that the operator chose, by flags and in the file of ``--kv-importance-config``.

    Raises:
        ValueError: a value cannot be used, or the file cannot be read.
    """
    chosen = {place: getattr(args, keyword_of(place)) for place, setting in SETTINGS.items() if setting.flag}
    if path := getattr(args, CONFIG_KEYWORD):
        chosen |= read_config(path)
    return ImportanceOptions.of(chosen)

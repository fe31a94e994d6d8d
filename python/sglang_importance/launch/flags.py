"""The flags, and what they change in sglang's own arguments."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from sgl_importance.gone_options import GONE, gone_flag, refusal
from sgl_importance.options import ImportanceOptions
from sgl_importance.settings import SETTINGS, Setting, flag, keyword
from sglang_importance.attention.score_sources import SOURCES
from sglang_importance.upstream.server_options import RADIX_CACHE_BACKEND

logger = logging.getLogger(__name__)

NO_LAYERS = {"layers": "auto"}
"""Words for an empty list of layers."""

DEFAULT_PAGE_SIZE = 16  # tokens; sglang's own default of 1 would score single tokens


def select_cache(args: argparse.Namespace, options: ImportanceOptions) -> None:
    """Selects our radix cache where a policy needs it, and pages of 16 tokens where none are named."""
    if not options.is_stock:
        args.radix_cache_backend = RADIX_CACHE_BACKEND
    if (options.store or not options.is_stock) and getattr(args, "page_size", None) is None:
        args.page_size = DEFAULT_PAGE_SIZE
        logger.warning(
            "KV importance: pages of %d tokens, since none were named: --page-size chooses others",
            DEFAULT_PAGE_SIZE,
        )


def add_flags(parser: argparse.ArgumentParser, *, unusable: str | None = None) -> None:
    """Adds the flags as one group.

    Args:
        parser: of sglang's own arguments.
        unusable: why no policy but ``default`` can be chosen; None where all can.
    """
    defaults = ImportanceOptions()
    group = parser.add_argument_group(
        "importance",
        "KV cache tiering guided by attention (sgl-importance); at --kv-policy default only the store acts",
    )
    for name, setting in SETTINGS.items():
        default = getattr(defaults, name)
        shown = {(): NO_LAYERS.get(name), "": "none"}.get(default, default)
        unit = f" {setting.unit}" if setting.unit and shown not in NO_LAYERS.values() else ""
        group.add_argument(
            flag(name),
            dest=keyword(name),
            default=default,
            type=_parser_of(name, setting, default, unusable),
            choices=SOURCES if name == "source" else setting.choices or None,
            # YAML lists arrive as several words.
            nargs="+" if isinstance(default, tuple) else None,
            metavar=_metavar(default) if setting.unit else None,
            help=f"{setting.help.replace('%', '%%')} (default: {shown}{unit})",
        )
    for name in GONE:
        parser.add_argument(
            gone_flag(name), dest=argparse.SUPPRESS, action=_Gone, option=name, help=argparse.SUPPRESS
        )


class _Gone(argparse.Action):
    """A flag that earlier versions had."""

    def __init__(self, option_strings: Sequence[str], dest: str, option: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs="*", default=argparse.SUPPRESS, **kwargs)
        self._option = option

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        parser.error(refusal(self._option))


def _metavar(default: object) -> str:
    return {tuple: "INDEX", int: "N", float: "X"}[type(default)]


def _parser_of(name: str, setting: Setting, default: object, unusable: str | None) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if name == "policy" and unusable and text != "default":
            raise argparse.ArgumentTypeError(unusable)
        value = _convert(text, default)
        if setting.unit and (problem := setting.problem(value)):
            raise argparse.ArgumentTypeError(problem)
        return value

    return parse


def _convert(text: str, default: object) -> Any:
    """The value that ``text`` stands for; ``text`` itself where it stands for none."""
    try:
        if isinstance(default, tuple):
            return () if text in NO_LAYERS.values() else tuple(int(index) for index in text.split(","))
        if isinstance(default, int | float):
            return type(default)(text)
    except ValueError:
        return text
    # YAML reads an unquoted off as false.
    return "off" if text == "false" else text


def options_of(args: argparse.Namespace) -> ImportanceOptions:
    """The options that the operator chose on the command line.

    Raises:
        ValueError: a value cannot be used.
    """
    chosen: dict[str, Any] = {}
    for option in fields(ImportanceOptions):
        value = getattr(args, keyword(option.name))
        chosen[option.name] = _flat(value) if option.name in NO_LAYERS else value
    return ImportanceOptions(**chosen)


def _flat(layers: Any) -> tuple[int, ...]:
    words = [word if isinstance(word, tuple) else (word,) for word in layers]
    return tuple(sorted({index for word in words for index in word}))

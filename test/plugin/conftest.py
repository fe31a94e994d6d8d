"""A parser of the real sglang with our flags, and a model so small that it needs no weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.models import write_tiny_llama
from support.servers import free_port


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def plugin() -> None:
    """Loads the plugin as sglang's launcher does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(scope="session")
def parser(plugin: None) -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang serve", usage="...")
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture
def parse(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """ServerArgs from flags, as the launcher makes them."""
    from sglang.srt.server_args import ServerArgs

    def parse_flags(*flags: str) -> ServerArgs:
        args = parser.parse_args(["--model-path", "dummy", "--port", str(free_port()), *flags])
        args._radix_eviction_policy_explicitly_set = "--radix-eviction-policy" in flags
        return ServerArgs.from_cli_args(args)

    return parse_flags

"""Flags, YAML, and what they change in sglang's own arguments."""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sgl_importance.options import ImportanceOptions
from sgl_importance.settings import SETTINGS, flag
from sglang_importance.launch.flags import add_flags
from sglang_importance.upstream.server_options import importance_options

from support.servers import free_port

Parse = Callable[..., ServerArgs]


def _options(server_args: ServerArgs) -> ImportanceOptions:
    options = importance_options(server_args)
    assert options is not None
    return options


def test_every_option_has_a_setting_and_every_setting_an_option() -> None:
    assert list(SETTINGS) == list(ImportanceOptions.__slots__)


def test_help_is_one_group_with_units_and_defaults(plugin: None) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    (group,) = (group for group in parser._action_groups if group.title == "importance")
    assert [action.option_strings for action in group._group_actions] == [[flag(name)] for name in SETTINGS]
    text = " ".join(parser.format_help().split())
    for expected in ("(default: 8 decode steps)", "(default: 32 tokens)", "(default: 32.0 queries)"):
        assert expected in text


@pytest.mark.parametrize("flags", [(), ("--kv-policy", "default"), ("--kv-importance-interval", "3")])
def test_without_a_policy_the_arguments_are_stock(parse: Parse, flags: tuple[str, ...]) -> None:
    server_args = parse("--max-total-tokens", "512", *flags)
    assert importance_options(server_args) is None
    stock = ServerArgs(model_path="dummy", max_total_tokens=512, port=server_args.port)
    assert server_args.resolved_dict() == stock.resolved_dict()


def test_arguments_made_without_us_are_stock(plugin: None) -> None:
    assert importance_options(ServerArgs(model_path="dummy")) is None


@pytest.mark.parametrize("policy", ["observe", "importance"])
def test_a_policy_selects_our_cache_and_pages_of_16(parse: Parse, policy: str) -> None:
    server_args = parse("--kv-policy", policy)
    assert _options(server_args).policy == policy
    assert server_args.radix_cache_backend == "importance"
    assert server_args.page_size == 16


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_operators_page_size_wins(parse: Parse, page_size: int) -> None:
    assert parse("--kv-policy", "importance", "--page-size", str(page_size)).page_size == page_size


def test_every_flag_reaches_the_options(parse: Parse) -> None:
    server_args = parse(
        *("--kv-policy", "observe", "--kv-importance-source", "torch_native"),
        *("--kv-importance-interval", "3", "--kv-importance-layers", "2,0"),
        *("--kv-importance-window", "9", "--kv-importance-sink-tokens", "0"),
        *("--kv-importance-local-tokens", "5", "--kv-importance-half-life-queries", "1.5"),
        *("--kv-importance-g", "on", "--kv-importance-auto-pins", "on", "--kv-importance-pin-budget", "0.1"),
    )
    assert _options(server_args) == ImportanceOptions(
        policy="observe",
        source="torch_native",
        interval=3,
        layers=(0, 2),
        window=9,
        sink_tokens=0,
        local_tokens=5,
        half_life_queries=1.5,
        g="on",
        auto_pins="on",
        pin_budget=0.1,
    )


def test_options_survive_the_way_to_the_scheduler(parse: Parse) -> None:
    server_args = parse("--kv-policy", "importance", "--kv-importance-window", "7")
    assert _options(pickle.loads(pickle.dumps(server_args))).window == 7


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(("auto",), ()), (("1",), (1,)), (("1,0", "1"), (0, 1)), (("0", "3"), (0, 3))],
)
def test_layers(parse: Parse, layers: tuple[str, ...], expected: tuple[int, ...]) -> None:
    server_args = parse("--kv-policy", "importance", "--kv-importance-layers", *layers)
    assert _options(server_args).layers == expected


@pytest.mark.parametrize(
    ("yaml", "name", "expected"),
    [
        ("kv-importance-interval: 5", "interval", 5),
        ("kv-importance-layers: auto", "layers", ()),
        ("kv-importance-layers: 1", "layers", (1,)),
        ("kv-importance-layers: 0,1", "layers", (0, 1)),
        ("kv-importance-layers: [0, 1]", "layers", (0, 1)),
        ("kv-importance-half-life-queries: 0.5", "half_life_queries", 0.5),
        ("kv-importance-g: off", "g", "off"),
    ],
)
def test_config_file(plugin: None, tmp_path: Path, yaml: str, name: str, expected: Any) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"model-path: dummy\nkv-policy: importance\n{yaml}\n")
    options = _options(prepare_server_args(["--config", str(config), "--port", str(free_port())]))
    assert getattr(options, name) == expected
    assert options.policy == "importance"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("nope", None, "there is no such file"),
        ("nope.yaml", None, "there is no such file"),
        ("server.json", "{}", "give a YAML file of flags, named .yaml or .yml"),
        ("list.yaml", "- a\n- b", "must contain a dictionary at root level: give a YAML file of flags"),
        ("broken.yaml", "a: [", "while parsing a flow node"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_one_line(
    plugin: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | None,
    problem: str,
) -> None:
    config = tmp_path / name
    if content is not None:
        config.write_text(content)
    with pytest.raises(SystemExit) as stop:
        prepare_server_args(["--kv-policy", "importance", "--config", str(config)])
    assert stop.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    assert line.startswith(f"sgl-importance: error: --config {config}: ")
    assert problem in line
    # Without a flag of ours, sglang says it in its own way.
    with pytest.raises(Exception, match=r".") as stock:
        prepare_server_args(["--config", str(config)])
    assert not isinstance(stock.value, SystemExit)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--kv-policy lru", "argument --kv-policy: invalid choice: 'lru'"),
        ("--kv-importance-source magic", "argument --kv-importance-source: invalid choice: 'magic'"),
        ("--kv-importance-interval 0", "must be a whole number of at least 1 (decode steps), not 0"),
        ("--kv-importance-interval 2.5", "must be a whole number of at least 1 (decode steps), not '2.5'"),
        ("--kv-importance-layers 0,x", "must be a whole number of at least 0 (layer index), not '0,x'"),
        ("--kv-importance-layers=-1", "must be a whole number of at least 0 (layer index), not (-1,)"),
        ("--kv-importance-window 0", "must be a whole number of at least 1 (tokens), not 0"),
        ("--kv-importance-sink-tokens=-1", "must be a whole number of at least 0 (tokens), not -1"),
        ("--kv-importance-local-tokens many", "must be a whole number of at least 0 (tokens), not 'many'"),
        ("--kv-importance-half-life-queries 0", "must be a number above 0 (queries), not 0.0"),
        ("--kv-importance-half-life-queries nan", "must be a number above 0 (queries), not nan"),
        ("--kv-importance-pin-budget 1.5", "must be a number of at least 0 and at most 1 (share), not 1.5"),
        ("--kv-importance-pin-budget all", "must be a number of at least 0 and at most 1 (share), not 'all'"),
        ("--kv-importance-gate on", "--kv-importance-gate is gone: leave it out"),
        (
            "--kv-importance-gate-payback 0.2",
            "--kv-importance-gate-payback is gone: leave it out, as --kv-importance-gate",
        ),
        (
            "--kv-sparse-audit-confidence 0.5",
            "--kv-sparse-audit-confidence is gone: use ",
        ),
        ("--kv-sparse-dense-layers 0,1", "--kv-sparse-dense-layers is gone: leave it out"),
        ("--kv-importance-half-life-queries inf", "must be a number above 0 (queries), not inf"),
        ("--kv-importance-store ~nobody-here/kv", "is in the home of no user here: write the whole path"),
        ("--kv-importance-trace ~nobody-here", "kv_importance_trace '~nobody-here' is in the home of no"),
        ("--kv-importance-ledger ~nobody-here", "kv_importance_ledger '~nobody-here' is in the home of no"),
        ("--kv-importance-g maybe", "argument --kv-importance-g: invalid choice: 'maybe'"),
    ],
)
def test_a_bad_value_is_one_error(
    parse: Parse, capsys: pytest.CaptureFixture[str], flags: str, error: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--kv-policy", "importance", *flags.split())
    assert stop.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    assert error in line


def test_options_name_every_bad_value_at_once() -> None:
    with pytest.raises(ValueError, match=re.escape("kv_importance_interval must be")) as error:
        ImportanceOptions(interval=True, window=-3, g="x", source=None)  # type: ignore[arg-type]
    for name in ("interval", "window", "g", "source"):
        assert f"kv_importance_{name} must be" in str(error.value)


def test_a_policy_is_refused_where_sglang_could_not_hook_what_reads_the_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser(usage="...")
    add_flags(parser, unusable="cannot take effect: no hook")
    assert parser.parse_args(["--kv-policy", "default"]).kv_policy == "default"
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-policy", "importance"])
    assert "argument --kv-policy: cannot take effect: no hook" in capsys.readouterr().err

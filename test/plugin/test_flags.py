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

from sgl_importance.options.importance_options import CONFIG_FLAG, SETTINGS, ImportanceOptions
from sgl_importance.options.moved_flags import MOVED_FLAGS
from sgl_importance.options.observation_options import SignalOptions
from sgl_importance.options.placement_options import PinOptions
from sglang_importance.launch.flags import add_flags
from sglang_importance.upstream.server_options import importance_options

from support.config_file import config_flags
from support.servers import free_port

Parse = Callable[..., ServerArgs]


def _options(server_args: ServerArgs) -> ImportanceOptions:
    options = importance_options(server_args)
    assert options is not None
    return options


def test_help_is_one_group_with_units_and_defaults(plugin: None) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    (group,) = (group for group in parser._action_groups if group.title == "importance")
    shown = [action.option_strings for action in group._group_actions if action.help != argparse.SUPPRESS]
    assert shown == [*([setting.flag] for setting in SETTINGS.values() if setting.flag), [CONFIG_FLAG]]
    assert len(shown) <= 20, "an operator reads them all"
    text = " ".join(parser.format_help().split())
    for expected in ("(default: 2048.0 tokens or share)", "(default: 0 tokens)", "(default: 0.2 share)"):
        assert expected in text


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--kv-policy", "default"),
        ("--kv-importance-prewarm", "off"),
        ("--kv-importance-ledger-token-ids", "off"),
        ("--kv-importance-source", "none", "--kv-importance-pin-budget", "0"),
    ],
    ids=" ".join,
)
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


def test_flags_and_file_reach_the_options(parse: Parse) -> None:
    server_args = parse(
        *("--kv-policy", "observe", "--kv-importance-source", "torch_native"),
        *("--kv-importance-pin-budget", "0.1"),
        *config_flags(signal={"g": "on", "interval": 3, "layers": [2, 0], "half_life_queries": 1.5}),
    )
    assert _options(server_args) == ImportanceOptions(
        policy="observe",
        source="torch_native",
        signal=SignalOptions(g="on", interval=3, layers=(0, 2), half_life_queries=1.5),
        pins=PinOptions(budget=0.1),
    )


def test_options_survive_the_way_to_the_scheduler(parse: Parse) -> None:
    server_args = parse("--kv-policy", "importance", *config_flags(signal={"window": 7}))
    assert _options(pickle.loads(pickle.dumps(server_args))).signal.window == 7


@pytest.mark.parametrize(("flag", "line"), MOVED_FLAGS.items())
@pytest.mark.parametrize("values", [(), ("1",), ("0", "1")])
def test_a_flag_of_an_earlier_release_says_where_its_option_is(
    parse: Parse, capsys: pytest.CaptureFixture[str], flag: str, line: str, values: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(flag, *values)
    assert stop.value.code == 2
    (error,) = (line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    assert error.endswith(f"{flag} {line}")


@pytest.mark.parametrize(
    ("yaml", "name", "expected"),
    [
        ("kv-importance-pin-budget: 0.5", "pins.budget", 0.5),
        ("kv-importance-pin-budget: null", "pins.budget", 0.2),
        ("kv-importance-store: off", "store.directory", ""),
        ("kv-importance-store: null", "store.directory", ""),
        ("kv-importance-trace: false", "trace.directory", ""),
        ("kv-importance-ledger: off", "ledger.place", "off"),
        ("kv-importance-ledger: null", "ledger.place", "auto"),
    ],
)
def test_config_file(plugin: None, tmp_path: Path, yaml: str, name: str, expected: Any) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"model-path: dummy\nkv-policy: importance\n{yaml}\n")
    options = _options(prepare_server_args(["--config", str(config), "--port", str(free_port())]))
    assert options.at(name) == expected
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
    assert_one_line(
        capsys, ["--kv-policy", "importance", "--config", str(config)], f"--config {config}: ", problem
    )
    if content is None:  # and may have named a policy
        assert_one_line(capsys, ["--config", str(config)], f"--config {config}: ", problem)
        return
    # Without a flag of ours, sglang says it in its own way.
    with pytest.raises(Exception, match=r".") as stock:
        prepare_server_args(["--config", str(config)])
    assert not isinstance(stock.value, SystemExit)


def assert_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], begins: str, problem: str = ""
) -> None:
    with pytest.raises(SystemExit) as stop:
        prepare_server_args(words)
    assert stop.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    assert line.startswith(f"sgl-importance: error: {begins}")
    assert problem in line


@pytest.mark.parametrize("name", ["kv-policy", "kv_policy", "'kv-policy'", '"kv-importance-store"'])
def test_a_broken_config_file_with_a_flag_of_ours_is_one_line(
    plugin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"model-path: dummy\n{name}: importance\na: [")
    assert_one_line(capsys, ["--config", str(config)], f"--config {config}: while parsing a flow node")


def test_a_config_file_in_the_form_that_sglang_drops_is_refused(
    plugin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "server.yaml"
    words = ["--model-path", "dummy", "--port", str(free_port())]
    line = f"--config={config} is not read by sglang: write --config {config}, in two words"
    config.write_text("page-size: 32\n")
    assert_one_line(capsys, [*words, f"--config={config}", "--kv-policy", "observe"], line)
    stock = prepare_server_args([*words, f"--config={config}"])
    assert (importance_options(stock), stock.page_size) == (None, None), "as sglang does it"
    config.write_text("page-size: 32\nkv-policy: importance\n")
    assert_one_line(capsys, [*words, f"--config={config}"], line)
    assert prepare_server_args([*words, "--config", str(config)]).page_size == 32


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--kv-policy lru", "argument --kv-policy: invalid choice: 'lru'"),
        ("--kv-importance-source magic", "argument --kv-importance-source: invalid choice: 'magic'"),
        ("--kv-sparse-min-context 2.5", "must be a whole number of at least 0 (tokens), not '2.5'"),
        ("--kv-sparse-budget nan", "must be a number above 0 (tokens or share), not nan"),
        ("--kv-sparse-budget 0", "must be a number above 0 (tokens or share), not 0.0"),
        ("--kv-importance-config absent.toml", "--kv-importance-config absent.toml: no such file"),
        ("--page-size 0", "--page-size 0: a page has at least one token"),
        ("--page-size -1 --kv-importance-store /s", "--page-size -1: a page has at least one token"),
        ("--kv-importance-pin-budget 1.5", "must be a number of at least 0 and at most 1 (share), not 1.5"),
        ("--kv-importance-pin-budget all", "must be a number of at least 0 and at most 1 (share), not 'all'"),
        ("--kv-importance-store ~nobody-here/kv", "is in the home of no user here: write the whole path"),
        ("--kv-importance-trace ~nobody-here", "--kv-importance-trace '~nobody-here' is in the home of no"),
        ("--kv-importance-ledger ~nobody-here", "--kv-importance-ledger '~nobody-here' is in the home of no"),
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


def test_a_flag_that_moved_says_so_in_a_file_of_flags(
    plugin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("model-path: dummy\nkv-importance-interval: 8\n")
    with pytest.raises(SystemExit):
        prepare_server_args(["--config", str(config)])
    line = f"--kv-importance-interval {MOVED_FLAGS['--kv-importance-interval']}"
    assert capsys.readouterr().err.strip().endswith(line)


@pytest.mark.parametrize(
    ("chosen", "needs"),
    [
        ({"sparse.budget": 0.05}, "--kv-sparse-budget needs --kv-sparse-selector to be a selector"),
        ({"tiered.device_tokens": 0.5}, "--kv-device-tokens needs --kv-residency to be 'tiered'"),
        ({"trace.detail": "steps"}, "trace.detail of --kv-importance-config needs --kv-importance-trace to"),
        ({"store.max_bytes": 1 << 30}, "--kv-importance-store-bytes needs --kv-importance-store to name a"),
        (
            {"store.directory": "/s", "store.tiers": "/t.toml", "store.max_bytes": 1 << 30},
            "--kv-importance-store-bytes has no effect beside --kv-importance-tiers: drop it",
        ),
        ({"prewarm.at": "idle"}, "--kv-importance-prewarm 'idle' needs --kv-importance-ledger or"),
        ({"prewarm.at": "idle", "store.directory": "/s", "ledger.place": "off"}, "'idle' needs"),
        ({"ledger.megabytes": 1024}, "ledger.megabytes of --kv-importance-config needs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_of_what_is_off_is_refused(chosen: dict[str, Any], needs: str) -> None:
    """It would do nothing, and nobody would know."""
    with pytest.raises(ValueError, match=re.escape(needs)):
        ImportanceOptions.of({"policy": "importance", **chosen})


@pytest.mark.parametrize(
    "flags",
    [
        ("--kv-importance-pin-budget", "0.1"),
        ("--kv-importance-source", "torch_native"),
        ("--kv-importance-prewarm", "idle"),
        config_flags(signal={"window": 7}),
        config_flags(misses={"memory": 2}),
        config_flags(ledger={"megabytes": 7}),
    ],
    ids=lambda flags: flags[0],
)
def test_an_option_of_a_policy_is_refused_without_one(
    parse: Parse, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    store = ("--kv-importance-store", "/nowhere")
    with pytest.raises(SystemExit) as stop:
        parse(*store, *flags)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no effect under --kv-policy default: drop it, or use importance" in line
    assert flags[0] in line


def test_options_name_every_bad_value_at_once() -> None:
    with pytest.raises(ValueError, match=re.escape("signal.g of --kv-importance-config must be")) as error:
        ImportanceOptions(
            signal=SignalOptions(g="x", interval=True, window=-3),  # type: ignore[arg-type]
            source=None,  # type: ignore[arg-type]
        )
    for name in ("signal.interval of --kv-importance-config", "--kv-importance-source"):
        assert f"{name} must be" in str(error.value)


def test_a_policy_is_refused_where_sglang_could_not_hook_what_reads_the_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser(usage="...")
    add_flags(parser, unusable="cannot take effect: no hook")
    assert parser.parse_args(["--kv-policy", "default"]).kv_policy == "default"
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-policy", "importance"])
    assert "argument --kv-policy: cannot take effect: no hook" in capsys.readouterr().err

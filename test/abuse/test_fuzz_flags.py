"""Garbage for every flag of every command and of the server: refused with one line, or taken."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sgl_importance.options.importance_options import SETTINGS
from sglang_importance.launch.flags import add_flags, options_of

from support.fuzz import check_message, check_one_line, command, examples, word

BLOCKS = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}\n'
NOBODY = ("--url", "http://127.0.0.1:9")  # the discard port, where nobody answers
# What makes a command do little; a word of garbage comes behind, and the last one of a flag counts.
LITTLE: dict[str, tuple[str, ...]] = {
    "replay": ("ok.jsonl", "--capacity-blocks", "5", "--policies", "lru", "--jobs", "1"),
    "size": ("ok.jsonl", "--hours", "1", "--jobs", "1"),
    "kv-size": ("llama-2-7b",),
    "trace info": ("folder",),
    "trace convert": ("folder", "out.jsonl"),
    "trace merge": ("folder", "folder", "out"),
    "store stat": ("folder",),
    "store verify": ("folder",),
    "store gc": ("folder",),
    "store tiers": ("tiers.toml",),
    "workload make": ("out.jsonl", "--count", "2"),
    "workload text": ("out.jsonl", "--model", "folder", "--count", "2"),
    "workload run": ("requests.jsonl", *NOBODY),
    "probe eval": ("--n", "1", "--lengths", "64", *NOBODY),
    "probe prompt": ("--length", "64"),
    "reason eval": ("--n", "1", "--lengths", "128", *NOBODY),
    "reason prompt": ("--length", "128"),
    "study h1": ("folder",),
    "study h2": ("folder",),
    "study h3": ("folder",),
    "study g": ("folder",),
    "study sensitivity": ("folder",),
    "study thinking": ("folder",),
    "study reuse": ("ok.jsonl",),
    "bench": ("aime", *NOBODY, "--data", "requests.jsonl"),
    "layers": ("folder",),
    "agree": ("requests.jsonl", *NOBODY, "--compare", NOBODY[1]),
    "conformance producer": ("os:getcwd",),
    "conformance consumer": ("os:getcwd",),
    "pin add": ("--text", "a", *NOBODY),
    "pin list": NOBODY,
    "pin rm": ("some", *NOBODY),
    "prewarm": ("--text", "a", *NOBODY),
    "snapshot": NOBODY,
    "fleet show": (NOBODY[1],),
    "fleet pin": ("--text", "a", NOBODY[1]),
    "fleet unpin": ("some", NOBODY[1]),
    "fleet pins": (NOBODY[1],),
    "observe": NOBODY,
    "why": NOBODY,
    "doctor": NOBODY,
}
# Commands that are tried elsewhere, with the reason.
ELSEWHERE = {
    "fleet page": "serves until Ctrl-C; test/cli sends it garbage",
    "kernels build": "compiles for minutes",
}
# Numbers of these decide how much is made: a large one is meant, and takes as long as it takes.
AMOUNTS = {
    "--count",
    "--sessions",
    "--document-tokens",
    "--turns",
    "--answer-tokens",
    "--n",
    "--lengths",
    "--length",
}


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Name and command of all that can be called."""
    for name, each in getattr(group, "commands", {}).items():
        if getattr(each, "commands", None):
            yield from leaves(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


COMMANDS = dict(leaves(command()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ok.jsonl").write_text(BLOCKS)
    (tmp_path / "requests.jsonl").write_text(
        '{"id": "a", "kind": "chat", "session": "s", "seconds": 0, "max_tokens": 1, "prompt": "a"}\n'
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "tiers.toml").write_text('[[tier]]\nkind = "dram"\ncapacity = "1MB"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_is_tried() -> None:
    assert set(COMMANDS) == set(LITTLE) | set(ELSEWHERE)


def is_large(text: str) -> bool:
    """Whether a part of it is a number that would keep a command busy."""
    for part in text.split(","):
        try:
            if abs(int(part)) > 1000:
                return True
        except ValueError:
            continue
    return False


@pytest.mark.parametrize("name", LITTLE)
@examples(14, 400)
def test_garbage_for_a_command(folder: Path, name: str, count: int) -> None:
    rng = random.Random(name)
    options = [param for param in COMMANDS[name].params if param.opts[0].startswith("-")]
    codes = Counter[int]()
    for _ in range(count):
        words = [*name.split(), *LITTLE[name]]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            kind = rng.random()
            if kind < 0.8 and options:
                option = rng.choice(options)
                given = word(rng)
                if option.opts[0] in AMOUNTS and is_large(given):
                    continue
                words += [option.opts[0]] if option.is_flag else [option.opts[0], given]
            else:
                words.insert(rng.randint(len(name.split()), len(words)), word(rng))
        codes[check_one_line(words)] += 1
    assert codes[2] > 0, codes


@examples(25, 5000)
def test_garbage_in_place_of_a_command(folder: Path, count: int) -> None:
    rng = random.Random(1)
    for _ in range(count):
        check_one_line([word(rng) for _ in range(rng.randint(1, 4))])


# ---- the server ----


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="sglang serve", usage="...", allow_abbrev=False)
    ServerArgs.add_cli_args(made)
    if not any("--kv-policy" in action.option_strings for action in made._actions):
        add_flags(made)  # else the plugin is active in this process
    return made


@pytest.mark.parametrize("name", [setting.flag for setting in SETTINGS.values() if setting.flag])
@examples(10, 3000)
def test_garbage_for_a_flag_of_the_server(
    parser: argparse.ArgumentParser, name: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(name)
    for _ in range(count):
        given = word(rng)
        words = ["--model-path", "m", "--kv-policy", "importance", name, given]
        code = 0
        try:
            options_of(parser.parse_args(words))
        except SystemExit as ended:
            code = ended.code
        except ValueError as error:
            check_message(error)  # as the plugin shows it
        said = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        assert len(said) == (code == 2), (given, code, said)

"""Whatever is wrong with what a user gives: one line that says so and names the cure, never a traceback."""

from __future__ import annotations

import errno
import json
import shlex
import sys
from pathlib import Path

import pytest

from sgl_importance.cli import main as cli
from sgl_importance_lab.workload import cli as workload_cli

NOBODY = "--url http://127.0.0.1:9"  # the discard port, where nobody answers
DOTS = "http://gpu1..local:30000"
SIZE = "--capacity-blocks 5"
BLOCKS = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}
FILES = {
    "ok.jsonl": json.dumps(BLOCKS),
    "short.jsonl": json.dumps(BLOCKS) + "\n" + json.dumps(BLOCKS | {"hash_ids": [0]}),
    "empty.jsonl": "",
    "odd.jsonl": '{"a": 1}',
    "broken.json": "[1, 2",
    "object.json": "{}",
    "nan.json": "[NaN]",
}

# What is given, and the words that name the cure.
WRONG = [
    ("bogus", "see sgl-importance --help"),
    ("replay", "see sgl-importance replay --help"),
    ("replay ok.jsonl --bogus", "see sgl-importance replay --help"),
    ("replay missing.jsonl --capacity-blocks 5", "no such file"),
    (f"replay empty.jsonl {SIZE}", "an empty file: name a trace"),
    (f"replay folder {SIZE}", "an empty folder: name a trace"),
    (f"replay odd.jsonl {SIZE}", "name it with --format"),
    (f"replay short.jsonl {SIZE}", "short.jsonl:2: 1 hash_ids, but 1024 tokens make 2 blocks"),
    ("replay ok.jsonl", "one of --capacity-blocks, --capacity-fraction and --device-blocks"),
    ("replay ok.jsonl --capacity-blocks x", "takes numbers such as 1827,3655"),
    ("replay ok.jsonl --capacity-blocks 0", "takes numbers above 0"),
    ("replay ok.jsonl --capacity-fraction nan", "takes numbers above 0"),
    (f"replay ok.jsonl {SIZE} --policies best", "known: random, fifo, lru"),
    (f"replay ok.jsonl {SIZE} --policies ''", "name at least one, such as lru"),
    (f"replay ok.jsonl {SIZE} --format tar", "known: recorded, mooncake"),
    (f"replay ok.jsonl {SIZE} --tokenizer gpt2", "mooncake holds no text: leave out --tokenizer"),
    (f"replay ok.jsonl {SIZE} --json missing/rows.json", "create it first"),
    (f"replay ok.jsonl {SIZE} --json folder", "is a directory: name a file in it"),
    (f"replay ok.jsonl {SIZE} --plot rates.xyz", "end the name in .png"),
    (f"replay /proc/self/mem {SIZE}", "Input/output error"),
    ("study sensitivity folder --workload /proc/self/mem", "name a file that can be read"),
    ("replay missing.jsonl", "no such file"),
    ("replay ''", "is empty: name a file or a directory"),
    ("size missing", "no such file"),
    ("size ''", "is empty: name a file or a directory"),
    ("trace info ''", "is empty: name a file or a directory"),
    ("store verify ''", "is empty: name a file or a directory"),
    ("study g ''", "is empty: name a file or a directory"),
    ("study h1 folder --out ''", "is empty: name a file or a directory"),
    ("workload make ''", "is empty: name a file or a directory"),
    ("workload run ''", "is empty: name a file or a directory"),
    ("workload run folder", "is a directory: name a file in it"),
    ("pin add --text-file ''", "is empty: name a file or a directory"),
    ("replay ok.jsonl --json ''", "is empty: name a file or a directory"),
    ("size ok.jsonl", "say with --hours"),
    ("size ok.jsonl --hours 1 --jobs 1", "record more traffic"),
    ("size ok.jsonl --hours 1 --policy lru,fifo", "--policy takes one policy"),
    ("trace info missing", "the directory that a server wrote with --kv-importance-trace"),
    ("trace convert folder out.jsonl", "the directory that a server wrote with --kv-importance-trace"),
    ("store stat folder", "name what --kv-importance-store named"),
    ("store verify missing", "name what --kv-importance-store named"),
    ("store gc missing", "name what --kv-importance-store named"),
    ("probe prompt --task haystack", "choose from single-needle"),
    ("probe prompt --length 3", "at least 64 tokens"),
    (f"probe eval {NOBODY} --n 1", "start one, or correct --url"),
    ("probe eval --url nonsense --n 1", "give --url one like http://"),
    ("probe eval --lengths many", "such as 512,2048"),
    ("workload make missing/requests.jsonl", "create it first"),
    ("workload make requests.jsonl --kinds poems", "choose from chat"),
    ("workload make requests.jsonl --rate 0", "raise --rate"),
    ("workload run missing.jsonl", "does not exist"),
    (f"workload run empty.jsonl {NOBODY}", "write it with 'sgl-importance workload make'"),
    (f"workload run odd.jsonl {NOBODY}", "write it with 'sgl-importance workload make'"),
    ("study h1 folder", "the directory that a server wrote with --kv-importance-trace"),
    ("study h2 folder --out missing", "create it or give --out"),
    ("study reuse ok.jsonl", "record more"),
    ("conformance producer nonsense", "give MODULE:FACTORY"),
    ("conformance consumer missing_module:factory", "install it, or start where it lies"),
    (f"snapshot {NOBODY}", "start one, or give --url"),
    (f"observe {NOBODY}", "start one, or give --url"),
    (f"doctor {NOBODY}", "start one, or give --url"),
    ("doctor --url nonsense", "is no address: give --url such as http://"),
    (f"prewarm {NOBODY}", "start one, or give --url"),
    (f"pin list {NOBODY}", "start one, or give --url"),
    (f"pin rm some {NOBODY}", "start one, or give --url"),
    ("snapshot --url ''", "give --url such as http://"),
    ("observe --watch inf", "see sgl-importance observe --help"),
    ("snapshot --limit 0", "see sgl-importance snapshot --help"),
    ("observe http://127.0.0.1:30000", "give an address by --url"),
    ("pin add", "exactly one of --text, --text-file, --messages, --input-ids"),
    ("pins", "is now sgl-importance pin list"),
    ("unpin some", "is now sgl-importance pin rm"),
    ("pin --text x", "pin add, which takes --text"),
    ("pin add --text-file missing", "cannot read missing"),
    ("pin add --messages object.json", "must hold a list"),
    ("pin add --input-ids broken.json", "broken.json is not JSON"),
    (f"pin add --text x --ttl inf {NOBODY}", "give finite numbers"),
    (f"pin add --messages nan.json {NOBODY}", "give finite numbers"),
    ("pin list --url http://gpu1..local:30000", "is no address: give --url such as http://"),
    (f"fleet http://127.0.0.1:9 {DOTS}", "none of 2 servers did it"),
    (f"fleet {DOTS}", "is no address: give another URL such as http://"),
    ("fleet http://127.0.0.1:9", "start one, or give another URL"),
    (f"fleet pin --text x --ttl inf {DOTS}", "give finite numbers"),
    (f"probe eval --url {DOTS} --n 1", "start one, or correct --url"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """Its exit code."""
    monkeypatch.setattr(sys, "argv", [cli.PROGRAM, *shlex.split(command)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(("command", "cure"), WRONG, ids=[command for command, _ in WRONG])
def test_one_line_names_the_cure(
    command: str,
    cure: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(command, monkeypatch) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert cure in line
    assert out == ""


@pytest.mark.parametrize("command", ["pin add --text-file -", "prewarm --messages -", "why --prompt -"])
def test_a_closed_standard_input_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it after ``<&-``
    assert run(command, monkeypatch) == 2
    flag = command.split()[-2]
    assert capsys.readouterr().err == f"error: {flag}: standard input is closed: name a file\n"


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1080", "nonsense://x", "http://x:port"])
@pytest.mark.parametrize(
    "command", ["pin list", "doctor --url http://x", "fleet http://x", "probe eval --n 1"]
)
def test_a_proxy_that_cannot_be_used_is_one_line(
    command: str, proxy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)  # as where it is not installed
    assert run(command, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the proxy of the environment cannot be used")
    assert line.endswith("unset ALL_PROXY")


def test_a_full_disk_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(workload_cli, "write_requests", full)
    assert run("workload make requests.jsonl --count 1", monkeypatch) == 2
    assert capsys.readouterr().err == "error: writing a result: no space left on device\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise OSError("bad file descriptor of ours")

    monkeypatch.setattr(cli, "build_app", lambda: wrong)
    with pytest.raises(OSError, match="of ours"):
        cli.main()


@pytest.mark.parametrize("command", ["", "trace"])
def test_nothing_said_shows_the_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, monkeypatch)
    out, err = capsys.readouterr()
    assert "Usage: sgl-importance" in out + err
    assert "error:" not in out + err


def test_a_command_that_works_ends_with_0(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run(f"replay ok.jsonl {SIZE} --policies lru --jobs 1", monkeypatch)
    assert "lru" in capsys.readouterr().out

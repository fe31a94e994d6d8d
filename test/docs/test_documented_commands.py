"""Every command in README and docs: run where it is cheap, else held against what it would be parsed by."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from sglang.srt.server_args import ServerArgs

from sglang_importance.launch.flags import add_flags

from support.page_commands import DEFAULT_URL, PAGES, ROOT, PageCommand, all_commands
from support.servers import ServerProcess
from support.tree_command import tree_command

COMMANDS = all_commands()
PLACEHOLDER = re.compile(r"^<.*>$")
STORE, RECORDINGS = "/path/on/a/fast/disk", ("recordings/mine", "recording")

# Commands that are not run here, by how they begin, with the reason. What they would be parsed by is asked
# all the same. A command that is neither here nor run fails the test.
NOT_RUN = {
    "bash scripts/serve.sh": "test/scripts runs it; the server here has its flags",
    "kubectl apply": "needs a cluster; test/scripts/test_deploy.py builds and checks what it would send",
    "bash scripts/gpu.sh": "needs a GPU; test/kernels and test/scripts have its refusals and its parts",
    "bash scripts/nightly.sh": "takes two hours; test/scripts has its parts",
    "bash scripts/versions.sh": "installs another release of sglang, which takes minutes and the network",
    "bash scripts/test.sh": "it is what runs this test",
    "bash scripts/docs.sh": "test_site.py builds the site where its generator is installed",
    "pip install": "it would change the environment",
    "python -m sglang.launch_server": "test/plugin and test/storage launch servers with these flags",
    "python -m pytest": "tests of their own",
    "python benchmark/": "takes minutes to hours",
    "python scripts/fleet.py": "serves until Ctrl-C; test/scripts prints its commands",
    "python scripts/reproduce_findings.py": "takes 15 to 20 minutes",
    "python scripts/screenshots.py": "needs a browser; test/serve drives one",
    "python scripts/render_docs.py": "test_rendered_pages.py asks it, and it would change the pages",
    "sgl-importance bench": "installs 0.9 GB and takes minutes; the lab's test/bench asks servers",
    "sgl-importance fleet": "needs several servers; test/fleet asks two",
    "sgl-importance observe": "needs a server under observe; test/observe/shadow asks one",
    "sgl-importance why --rid": "needs the id of a request; test/serve asks for one",
    "sgl-importance why --prompt": "needs a file of the reader's; test/serve sends one",
    "sgl-importance probe eval --lengths 16384": "prompts of 16k tokens; test/sparse has shorter ones",
    "sgl-importance reason eval": "needs a model that thinks; the lab's test/reasoner grades a stand-in",
    "sgl-importance size recording --bytes": "takes 10 s; the other one runs",
    "sgl-importance replay recording --pages": "needs recorded page lists; the lab's test/replay has them",
    "sgl-importance study h2": "needs hundreds of recorded questions; the lab's test/study has them",
    "sgl-importance study thinking": "needs recorded page lists; the lab's test/study has them",
}


def ids(command: PageCommand) -> str:
    return str(command)


def is_run(command: PageCommand) -> bool:
    line = " ".join(command.words)
    return not any(line.startswith(start) for start in NOT_RUN)


# ---- what would parse them ----


def check_script(arguments: list[str]) -> None:
    script = ROOT / arguments[0]
    assert script.is_file(), arguments[0]
    subprocess.run(["bash", "-n", script], check=True)
    if script.name == "serve.sh":
        check_server_flags(arguments[1:])
    if script.name == "test.sh" and arguments[1:]:
        check_pytest(arguments[1:])


def check_pytest(arguments: list[str]) -> None:
    with_values = {"-m", "-k"}
    previous = ""
    for word in arguments:
        if not word.startswith("-") and previous not in with_values:
            assert (ROOT / word).exists(), word
        previous = word
    marks = " ".join(after for word, after in pairwise(arguments) if word == "-m")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    known = {mark.partition(":")[0] for mark in listed}
    assert set(re.findall(r"\w+", marks)) - {"not", "and", "or"} <= known, marks


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    for word in arguments[1:]:
        found = re.fullmatch(r"(\.|\./benchmark/lab)(?:\[([\w,]+)\])?", word)
        assert found, word
        project = tomllib.loads((ROOT / found[1] / "pyproject.toml").read_text())["project"]
        assert not found[2] or set(found[2].split(",")) <= set(project["optional-dependencies"]), word


@cache
def server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if not any("--kv-policy" in action.option_strings for action in parser._actions):
        add_flags(parser)  # else the plugin is active in this process
    return parser


def check_server_flags(arguments: list[str]) -> None:
    given = ["model" if PLACEHOLDER.match(word) else word for word in arguments]
    server_parser().parse_args([*given, "--model-path", "model"])


def check_program(arguments: list[str]) -> None:
    """Of a script of ours: that it is there, and knows the flags."""
    script = ROOT / arguments[0]
    assert script.is_file(), arguments[0]
    flags = [word for word in arguments[1:] if word.startswith("-")]
    source = script.read_text()
    for flag in flags:
        assert re.search(rf"\b{flag.strip('-').replace('-', '[-_]')}\b", source), f"{script.name}: {flag}"
    if "--only" in flags:  # parts are words of a tuple or the names of functions
        assert re.search(rf"\b{arguments[arguments.index('--only') + 1]}\b", source)


def check_python(arguments: list[str]) -> None:
    if arguments[:2] == ["-m", "sglang.launch_server"]:
        check_server_flags(arguments[2:])
    elif arguments[:2] == ["-m", "pytest"]:
        check_pytest(arguments[2:])
    else:
        check_program(arguments)


def check_ours(arguments: list[str]) -> None:
    command, name, parent = tree_command(arguments[0]), "sgl-importance", None
    while arguments:
        context = command.make_context(name, list(arguments), parent=parent)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, arguments = command.resolve_command(context, rest)
        parent = context


def check_kubectl(arguments: list[str]) -> None:
    assert arguments[:2] == ["apply", "--kustomize"]
    assert (ROOT / arguments[2] / "kustomization.yaml").is_file()


def check_nothing(_: list[str]) -> None:
    """For what bash brings along, and curl: they are run."""


PARSERS: dict[str, Callable[[list[str]], None]] = {
    "bash": check_script,
    "pip": check_pip,
    "python": check_python,
    "sgl-importance": check_ours,
    "curl": check_nothing,
    "kubectl": check_kubectl,
    "for": check_nothing,
}


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_it_can_be_parsed(command: PageCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiers.toml").touch()
    monkeypatch.chdir(tmp_path)
    program, *arguments = command.words
    assert program in PARSERS, f"test_commands.py does not know what {program} is"
    PARSERS[program](arguments)


def test_every_exception_is_used() -> None:
    lines = [" ".join(command.words) for command in COMMANDS]
    coming = {"python scripts/screenshots.py", "bash scripts/docs.sh"}
    unused = {start for start in NOT_RUN if not any(line.startswith(start) for line in lines)}
    assert unused <= coming


# ---- what is run ----


@dataclass(frozen=True, slots=True)
class Reader:
    """Somebody who types what the pages say, in a folder with the files that they speak of.

    Attributes:
        server: one with the flags of scripts/serve.sh, a store and a recording.
        folder: where commands run.
        path: of programs: ours first.
    """

    server: ServerProcess
    folder: Path
    path: str

    def run(self, command: PageCommand) -> str:
        text = command.text.replace(".venv/bin/", "").replace(DEFAULT_URL, self.server.base_url)
        text = text.replace('"model": "default"', f'"model": "{self.server.name}"')
        text = text.replace(STORE, str(self.server.store / "verified"))
        text = text.replace("PIN_ID", self.pin_id) if "PIN_ID" in text else text
        words = command.words
        if words[0] == "sgl-importance" and "--url" not in words and self.takes_url(words[1:3]):
            text = text.partition("#")[0].rstrip() + f" --url {self.server.base_url}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env={**os.environ, "PATH": self.path},
            capture_output=True,
            text=True,
            timeout=600,  # numba compiles what a checkout replays for the first time
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @staticmethod
    def takes_url(words: Sequence[str]) -> bool:
        command = tree_command(words[0]).commands[words[0]]
        command = getattr(command, "commands", {}).get(words[-1], command)
        return any("--url" in option.opts for option in command.params)

    @property
    def pin_id(self) -> str:
        answer = httpx.post(f"{self.server.base_url}/kv_importance/pin", json={"text": "Alice copper. " * 20})
        return str(answer.raise_for_status().json()["pin_id"])


@pytest.fixture(scope="module")
def reader(probe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    text = " ".join(f"Name{number} copper." for number in range(200))
    (folder / "system.txt").write_text(text)
    (folder / "system.json").write_text(json.dumps([{"role": "system", "content": text}]))
    requests = [
        {
            "timestamp": 1000 * n,
            "input_length": 2048,
            "output_length": 8,
            "hash_ids": [n % 7, 9, 100 + n, n % 3],
        }
        for n in range(60)
    ]
    for request in requests:  # an id names a block and everything before it
        first, *_ = request["hash_ids"]  # type: ignore[misc]
        request["hash_ids"] = [first, 10 + first, 100 + 2 * first, 1000 + request["timestamp"]]  # type: ignore[operator]
    (folder / "mooncake_conversation.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))

    (folder / "tiers.toml").write_text(
        '[[tier]]\nkind = "dram"\ncapacity = "8GB"\n[[tier]]\nkind = "fs"\ncapacity = "8GB"\nfolder = "kv"\n'
    )
    programs = folder / "bin"
    programs.mkdir()
    command = programs / "sgl-importance"
    command.write_text(
        f'#!/bin/sh\nexec {sys.executable} -W ignore {ROOT / "test/support/tree_command.py"} "$@"\n'
    )
    command.chmod(0o755)

    flags = serve_flags()
    flags += ["--kv-importance-trace", str(folder / "recording")]
    process = ServerProcess(*flags, model=probe_model)
    process.command = [*process.command, "--kv-importance-store", str(process.store / "verified")]
    with process as server:
        for number in range(12):
            server.generate(f"{text} Question: Name{number % 4}", max_new_tokens=4)
        (folder / "recordings").mkdir()
        (folder / "recordings/mine").symlink_to(folder / "recording")
        yield Reader(server, folder, f"{programs}:{os.environ['PATH']}")


def serve_flags() -> list[str]:
    """What scripts/serve.sh adds by itself, without what ServerProcess sets."""
    dry = subprocess.run(
        ["bash", "scripts/serve.sh", "--device", "cpu", "--port", "29999"],
        cwd=ROOT,
        env={**os.environ, "SERVE_DRY_RUN": "1"},
        capture_output=True,
        text=True,
    )
    assert dry.returncode == 0, dry.stderr
    words = dry.stdout.splitlines()
    words = words[words.index("sglang.launch_server") + 1 :]
    for flag in ("--host", "--port", "--device", "--model-path", "--served-model-name"):
        at = words.index(flag)
        del words[at : at + 2]
    return words


PRINTED = {
    "curl -s http://127.0.0.1:30000/v1/chat": "lantern",
    "for i in": "lantern",
    "curl -s http://127.0.0.1:30000/kv_importance?limit=5": "cross_mass",
    "curl -s http://127.0.0.1:30000/metrics": "sglang:kv_importance_",
    "sgl-importance replay mooncake": "belady",
    "sgl-importance pin add --": "tokens pinned",
    "sgl-importance trace info": "requests",
}


LABORATORY = {"conformance", "probe", "reason", "replay", "size", "study", "workload"}


def run_commands() -> list[Any]:
    """Parameters of a test: of the laboratory's commands, which tests of its own run, the first by day."""
    run = [command for command in COMMANDS if is_run(command)]
    of_laboratory = [command for command in run if command.words[1:2] and command.words[1] in LABORATORY]
    return [
        pytest.param(command, marks=pytest.mark.nightly) if command in of_laboratory[1:] else command
        for command in run
    ]


@pytest.mark.server
@pytest.mark.parametrize("command", run_commands(), ids=ids)
def test_it_runs(reader: Reader, command: PageCommand) -> None:
    printed = reader.run(command)
    assert printed.strip(), "it says nothing"
    line = " ".join(command.words)
    for start, word in PRINTED.items():
        if line.startswith(start):
            assert word in printed


def python_blocks() -> list[tuple[str, str]]:
    """Programs of a client; others are for test_examples.py, an engine's for test_engine.py."""
    found = []
    for page in PAGES:
        if page.name != "extend.md":
            blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
            clients = [block for block in blocks if "importance_engine" not in block]
            found += [(f"{page.name}: {number}", block) for number, block in enumerate(clients)]
    return found


@pytest.mark.server
def test_python_blocks(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other: a later block goes on with the names of an earlier one."""
    client = reader.server.openai_client()
    question = [{"role": "user", "content": "Alice copper. Bruno lantern. Question: Bruno"}]
    names: dict[str, object] = {"client": client, "messages": question}
    blocks = python_blocks()
    assert blocks
    for name, block in blocks:
        code = block.replace(DEFAULT_URL, reader.server.base_url)
        code = code.replace('model="default"', f'model="{reader.server.name}"')
        exec(compile(code, name, "exec"), names)
        printed = capsys.readouterr().out
        assert "lantern" in printed or "hit_tokens" in printed, name


def test_splitting_of_blocks() -> None:
    """A command over several lines, quotes and loops is one; comments are none."""
    lines = {shlex.split(command.text, comments=True)[0] for command in COMMANDS}
    assert lines <= {*PARSERS, ".venv/bin/python", ".venv/bin/sgl-importance"} | {
        word for word in lines if "=" in word
    }
    assert any("\n" in command.text and command.words[0] == "for" for command in COMMANDS)

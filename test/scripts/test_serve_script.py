"""scripts/serve.sh: a busy port stops at once, and the user's flags win."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.servers import free_port


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("form", ["--port {}", "--port={}"])
def test_a_busy_port_is_one_line_before_anything_is_installed(
    scripts: Any, tmp_path: Path, busy_port: int, form: str
) -> None:
    checkout = tmp_path / "checkout"  # without .venv: the next step would make one
    shutil.copytree(scripts.root / "scripts", checkout / "scripts")
    scripts.root = checkout
    ended = scripts.run("serve.sh", *form.format(busy_port).split())
    assert not (scripts.root / ".venv").exists()
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert f"127.0.0.1:{busy_port}" in ended.stderr
    assert "--port" in ended.stderr


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_a_port_that_is_none(scripts: Any, port: str) -> None:
    ended = scripts.run("serve.sh", "--port", port)
    assert ended.returncode != 0
    assert ended.stderr == f"serve.sh: --port must be a number from 1 to 65535, not '{port}'\n"


@pytest.mark.parametrize("host", ["999.1.1.1", "192.0.2.1"])
def test_a_host_that_is_none(scripts: Any, host: str) -> None:
    ended = scripts.run("serve.sh", "--host", host, "--port", str(free_port()))
    assert ended.returncode != 0
    (line,) = ended.stderr.splitlines()
    assert line.endswith("--host must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nope", "there is no such file"), ("server.json", "its name must end in .yaml or .yml")],
)
def test_a_config_file_that_cannot_be_read(scripts: Any, tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "server.json").write_text("{}")
    ended = scripts.run("serve.sh", "--config", str(tmp_path / name))
    assert ended.returncode != 0
    assert ended.stderr == f"serve.sh: --config {tmp_path / name}: {problem}\n"


def words(scripts: Any, *arguments: str) -> list[str]:
    """Command line that the script would run; a free port unless the arguments name one."""
    if not any(word.startswith(("--port", "--config")) for word in arguments):
        arguments = (*arguments, "--port", str(free_port()))
    ended = scripts.run("serve.sh", *arguments, env={"SERVE_DRY_RUN": "1"})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def value(command: list[str], flag: str) -> str:
    """The only value of a flag on a command line."""
    found = [command[i + 1] for i, word in enumerate(command) if word == flag]
    found += [word.partition("=")[2] for word in command if word.startswith(f"{flag}=")]
    assert len(found) == 1, (flag, command)
    return found[0]


def test_defaults(scripts: Any, probe_model: Path) -> None:
    command = words(scripts, "--device", "cpu")
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert Path(value(command, "--model-path")) == probe_model
    assert value(command, "--host") == "127.0.0.1"
    assert value(command, "--kv-policy") == "importance"
    assert "--enable-hierarchical-cache" in command
    assert "--sleep-on-idle" in command
    assert value(command, "--dtype") == "float32", "sglang would cast the embedded model down"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a driver that lists a GPU."""
    driver = tmp_path / "drivers" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A100'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{driver.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_the_choice_of_attention_is_left_to_sglang(scripts: Any, tmp_path: Path) -> None:
    command = words(scripts, "--model-path", str(tmp_path))
    assert value(command, "--kv-policy") == "importance"
    for flag in ("--device", "--dtype", "--attention-backend", "--kv-importance-source"):
        assert flag not in command


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_heads_of_32_get_a_backend_that_takes_them(scripts: Any, probe_model: Path) -> None:
    assert json.loads((probe_model / "config.json").read_text())["head_dim"] < 64
    assert value(words(scripts), "--attention-backend") == "triton"
    assert value(words(scripts, "--attention-backend", "fa3"), "--attention-backend") == "fa3"


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--kv-policy", "observe"),
        ("--page-size", "1"),
        ("--max-total-tokens", "4096"),
        ("--served-model-name", "mine"),
        ("--host", "localhost"),
        ("--dtype", "bfloat16"),
    ],
)
@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_flags_of_the_user_win(scripts: Any, flag: str, given: str, form: str) -> None:
    assert value(words(scripts, *form.format(flag, given).split()), flag) == given


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes `lscpu` name the given flags, beside ordinary ones."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def has(flags: str) -> None:
        program = folder / "lscpu"
        program.write_text(f"#!/bin/sh\necho 'Flags: fpu avx2 {flags} fma'\n")
        program.chmod(0o755)

    return has


@pytest.mark.parametrize("flags", ["", "avx512_bf16", "amx_bf16"])
def test_float32_where_the_processor_has_no_bfloat16(
    scripts: Any, tmp_path: Path, processor: Callable[[str], None], flags: str
) -> None:
    processor(flags)
    command = words(scripts, "--device", "cpu", "--model-path", str(tmp_path))
    assert ("--dtype" in command) == (not flags)
    assert value(words(scripts, "--dtype", "bfloat16"), "--dtype") == "bfloat16", "the user's wins"
    assert value(words(scripts), "--dtype") == "float32", "as the embedded models were trained"


def test_a_model_of_the_user_brings_no_defaults_of_ours(
    scripts: Any, tmp_path: Path, processor: Callable[[str], None]
) -> None:
    processor("avx512_bf16")
    command = words(scripts, "--model-path", str(tmp_path))
    assert value(command, "--model-path") == str(tmp_path)
    assert "--max-total-tokens" not in command
    assert "--served-model-name" not in command
    assert "--dtype" not in command


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_a_trained_model_by_its_name(scripts: Any, name: str) -> None:
    command = words(scripts, "--device", "cpu", "--model", name)
    assert command[-2:] == ["--model-path", str(scripts.root / ".cache" / "models" / name)]
    assert value(command, "--served-model-name") == name
    assert "--kv-importance-layers" not in command, "measured for the retrieval model alone"


@pytest.mark.parametrize("flag", ["--model", "--model-path"])
def test_a_name_that_no_model_has_ends_before_anything_is_installed(
    scripts: Any, checkout: Path, flag: str
) -> None:
    ended = scripts.run("serve.sh", flag, "smolm2", "--port", str(free_port()))
    assert ended.returncode == 1
    assert not (checkout / ".venv").exists()
    (line,) = ended.stderr.splitlines()
    assert line.startswith("serve.sh: --model smolm2: there is no such folder")
    assert "smollm2" in line
    assert value(words(scripts, flag, "owner/name"), flag) == "owner/name"


def test_a_trained_model_that_cannot_be_had_is_one_line_and_no_server(scripts: Any, checkout: Path) -> None:
    (checkout / "scripts" / "setup.sh").write_text("")
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    no_index = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    ended = scripts.run("serve.sh", "--model", "smollm2", "--port", str(free_port()), env=no_index)
    assert ended.returncode != 0
    first, last = ended.stderr.splitlines()[0], ended.stderr.splitlines()[-1]
    assert "SmolLM2-135M-Instruct" in first
    assert "Apache" in first
    assert "PIP_INDEX_URL" in last
    assert not list((checkout / ".cache" / "models").glob("smollm2*/*"))


@pytest.fixture
def checkout(scripts: Any, tmp_path: Path) -> Path:
    """A checkout with nothing but the scripts; `scripts` runs them there."""
    scripts.root = tmp_path / "checkout"
    shutil.copytree(Path(__file__).parents[2] / "scripts", scripts.root / "scripts")
    return scripts.root


@pytest.mark.parametrize(("name", "folder"), [("reasoner", "checkpoint"), ("reasoner-control", "control")])
@pytest.mark.parametrize("form", ["--model {}", "--model={}", "--model-path {}"])
def test_an_embedded_model_by_its_name(
    scripts: Any, checkout: Path, name: str, folder: str, form: str
) -> None:
    path = checkout / "benchmark/lab/sgl_importance_lab/reasoner" / folder
    path.mkdir(parents=True)
    (path / "model.safetensors").touch()
    command = words(scripts, "--device", "cpu", *form.format(name).split())
    assert command[-2:] == ["--model-path", str(path)], "sglang takes the last one"
    assert value(command, "--dtype") == "float32"
    assert value(command, "--served-model-name") == "default"
    assert ("--reasoning-parser" in command) == (name == "reasoner")
    assert "--kv-importance-config" not in command, "measured for the retrieval model alone"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_to_be_had_while_a_server_runs(
    scripts: Any, checkout: Path, probe_model: Path, flag: str
) -> None:
    (checkout / "sgl_importance" / "embedded_model").mkdir(parents=True)
    (checkout / "sgl_importance" / "embedded_model" / "checkpoint").symlink_to(probe_model)
    (checkout / "scripts" / "setup.sh").write_text("")
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    (checkout / ".cache").mkdir()
    with (checkout / ".cache" / "port-30000.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = scripts.run("serve.sh", flag)
        refused = scripts.run("serve.sh")
    assert ended.returncode == 0, ended.stderr
    assert flag in ended.stdout.split()
    assert "another serve.sh" in refused.stderr, "the lock is the one that a server holds"


def test_an_embedded_model_that_is_not_there_is_one_line(scripts: Any, checkout: Path) -> None:
    ended = scripts.run(
        "serve.sh", "--model", "reasoner", "--port", str(free_port()), env={"SERVE_DRY_RUN": "1"}
    )
    assert ended.returncode != 0
    (line,) = ended.stderr.splitlines()
    assert str(checkout / "benchmark/lab/sgl_importance_lab/reasoner/checkpoint") in line
    assert "train_reasoner.py" in line


def test_no_host_tier_without_a_radix_cache(scripts: Any) -> None:
    command = words(scripts, "--disable-radix-cache", "--kv-policy", "default")
    assert "--enable-hierarchical-cache" not in command
    assert "--kv-importance-config" not in command, "options of a policy would be refused"


@pytest.mark.parametrize(
    "form", ["{}", "{}  # all", '{}\t# it\'s "all"', '"{}"', "'{}' # all", '"{}"  # "all"', "{} \r"]
)
def test_a_config_file_counts_as_given(scripts: Any, tmp_path: Path, form: str) -> None:
    config = tmp_path / "server.yaml"
    given = {"kv-policy": "observe", "page_size": 64, "kv-residency": "tiered", "port": free_port()}
    lines = [f"{name}: {form.format(each)}\n" for name, each in given.items()]
    config.write_text("".join(["# port: http\n", *lines]))
    command = words(scripts, "--config", str(config))
    assert words(scripts, f"--config={config}") == command, "in the form that sglang reads"
    assert "--kv-policy" not in command
    assert "--page-size" not in command
    assert "--port" not in command
    assert "--enable-hierarchical-cache" not in command, "tiered pages are on the host already"


@pytest.mark.parametrize("form", ["{}  # second server", "'{}' # second server", '"{}"'])
def test_a_value_of_a_config_file_is_read_without_its_comment(
    scripts: Any, tmp_path: Path, busy_port: int, form: str
) -> None:
    config = tmp_path / "server.yml"
    config.write_text(f"port: {form.format(busy_port)}\n")
    ended = scripts.run("serve.sh", "--config", str(config))
    assert f"cannot listen on 127.0.0.1:{busy_port}" in ended.stderr
    config.write_text(f"port: {form.format('1#2')}\n")
    ended = scripts.run("serve.sh", "--config", str(config))
    assert ended.stderr == "serve.sh: --port must be a number from 1 to 65535, not '1#2'\n"


def test_unknown_words_are_passed_on_as_they_are(scripts: Any) -> None:
    command = words(scripts, "--log-requests", "--json-model-override-args", '{"a": "b c"}')
    at = command.index("--log-requests")
    assert command[at : at + 3] == ["--log-requests", "--json-model-override-args", '{"a": "b c"}']

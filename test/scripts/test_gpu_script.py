"""scripts/gpu.sh: what travels to a machine without network, and what is there when it runs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import Distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts/gpu"


def pinned(file: Path) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    parts = (line.partition("==") for line in lines if line)
    return {name.lower(): version for name, _, version in parts}


@pytest.mark.parametrize("command", ["kernels", "serve"])
def test_the_version_of_all_that_travels_is_fixed(command: str) -> None:
    everywhere = pinned(ROOT / "scripts/pins-cpu.txt")
    for name, version in pinned(GPU / f"{command}.txt").items():
        assert bool(version) != (name in everywhere), f"{name}: one version, in one place"


def test_a_slim_wheel_installs_and_lacks_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(GPU)
    import carry

    rust = ("sglang/srt/rust_extensions", "sglang/srt/mem_cache/rust_tree_core")
    kept = [f"{folder}/__init__.py" for folder in rust]
    left_out = [f"{rust[0]}/_server.so", f"{rust[1]}/mem_cache.cpython-312-x86_64-linux-gnu.so"]
    information = "sglang-0.0.0.dist-info"
    files = {
        **dict.fromkeys(kept, "VALUE = 1\n"),
        **dict.fromkeys(left_out, "VALUE = 2\n"),
        f"{information}/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 0.0.0\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{information}/RECORD"] = "".join(f"{name},,\n" for name in files) + f"{information}/RECORD,,\n"
    wheel = tmp_path / "sglang-0.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    carry.slim(wheel)
    target = tmp_path / "installed"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--target",
        target,
        wheel,
    ]
    subprocess.run(install, check=True)
    assert all((target / name).read_text() == files[name] for name in kept)
    assert not any((target / name).exists() for name in left_out)


def test_all_that_is_left_out_is_in_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GPU)
    import carry

    files = [str(file) for file in Distribution.from_name("sglang").files or ()]
    for start in (each for each in carry.LEFT_OUT if each.startswith("sglang/")):
        assert any(file.startswith(start) for file in files), start


def test_what_was_carried_for_one_command_is_not_mixed_with_the_other_s(tmp_path: Path) -> None:
    (tmp_path / "one.whl").touch()
    for words, message in (
        (["serve", tmp_path], "is not empty"),
        (["all", tmp_path / "new"], "say for which command and whereto"),
    ):
        command = [sys.executable, GPU / "carry.py", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert message in done.stderr


def test_the_plugin_is_announced_as_an_installed_package_announces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(GPU)
    import announce

    announce.announce(tmp_path)
    (ours,) = Distribution.discover(name="sgl-importance", path=[str(tmp_path)])
    installed = Distribution.from_name("sgl-importance")

    def entries(distribution: Distribution) -> set[tuple[str, str, str]]:
        return {
            (entry.group, entry.name, entry.value)
            for entry in distribution.entry_points
            if entry.group != "console_scripts"
        }

    assert entries(ours) == entries(installed)
    assert ours.version == installed.version


def test_folders_are_named_from_where_it_is_called(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >>"$CALLS"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": "./python", "CALLS": str(tmp_path / "calls")}
    words = ["bash", ROOT / "scripts/gpu.sh", "carry", "serve", "my wheels"]
    subprocess.run(words, env=environment, cwd=tmp_path, check=True)
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call == f"scripts/gpu/carry.py serve {tmp_path / 'my wheels'}"


@pytest.mark.parametrize("words", [["train"], ["serve", "--fast"], ["--dry-run", "serve"]])
def test_words_that_it_does_not_know_are_refused(words: list[str]) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", ROOT / "scripts/gpu.sh", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: unknown argument '{words[-1]}': give kernels, serve or carry")


STAND_INS = """
import json, torch
import sgl_kernel, flashinfer.anything.at_all
from flashinfer.sampling import top_p
from sgl_kernel import some_kernel
from sgl_kernel.kvcacheio import transfer
try:
    from sgl_kernel.scalar_type import ScalarType
    scalar = "found"
except ImportError:
    scalar = "missing"
said = []
for name in (top_p, some_kernel, transfer):
    try:
        name(1)
    except NotImplementedError as refused:
        said.append(str(refused))
torch.manual_seed(0)
x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
total = x + residual
expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
sgl_kernel.fused_add_rmsnorm(x, residual, weight)
gated = torch.randn(3, 8)
out = torch.empty(3, 4)
sgl_kernel.silu_and_mul(gated, out)
print(json.dumps({
    "scalar": scalar,
    "said": said,
    "norm": bool(torch.allclose(x, expected, atol=1e-6) and torch.equal(residual, total)),
    "gate": bool(torch.allclose(out, gated[:, :4] * torch.sigmoid(gated[:, :4]) * gated[:, 4:])),
}))
"""


def test_stand_ins_compute_what_they_stand_for_and_name_what_they_do_not() -> None:
    environment = {**os.environ, "PYTHONPATH": str(GPU / "stand_ins")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STAND_INS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert seen.pop("said") == [
        f"{name} is not in the stand-ins of scripts/gpu" for name in ("top_p", "some_kernel", "transfer")
    ]
    assert seen == {"scalar": "missing", "norm": True, "gate": True}


# ---- steps of a served model ----


@pytest.fixture
def served_steps(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(ROOT / "benchmark/kernels")
    import served_steps

    return served_steps


def test_a_step_is_the_time_of_a_token_while_all_decode(served_steps: SimpleNamespace) -> None:
    early = [(float(at), 1 + at) for at in range(41)]  # a token a second
    late = [(20.0 + at, 1 + at // 2) for at in range(0, 61, 2)]  # every other second, from the 20th on
    row = served_steps.steps_of([early, late])
    assert row["steps"] == (20 + 10) // 2
    assert row["tokens_per_s"] == (20 + 10) / 20
    assert (row["step_ms_5"], row["step_ms"], row["step_ms_95"]) == (1000, 1000, 2000)
    in_pairs = [(2.0 * at, 1 + 2 * at) for at in range(30)]
    assert served_steps.steps_of([in_pairs])["step_ms"] == 1000
    with pytest.raises(RuntimeError, match="did not decode together"):
        served_steps.steps_of([early, [(50.0, 1), (51.0, 2)]])


@pytest.fixture
def streaming_server() -> Iterator[str]:
    """Streams as many tokens as its prompt's first one says, and more than one at a time."""

    class Streaming(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            for count in range(1, body["input_ids"][0] + 1, 2):
                chunk = {"output_ids": [7] * count, "meta_info": {"completion_tokens": count}}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_answer_is_whole_or_an_error(served_steps: SimpleNamespace, streaming_server: str) -> None:
    whole = served_steps.STEPS + 1
    came = served_steps.arrivals(streaming_server, [whole], time.monotonic() + 60)
    assert [count for _, count in came] == list(range(1, whole + 1, 2))
    with pytest.raises(RuntimeError, match=re.escape(f"59 of {whole} tokens in time")):
        served_steps.arrivals(streaming_server, [59], time.monotonic() + 60)


def test_an_arm_that_fails_is_written_and_the_next_goes_on(
    served_steps: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def started(name: str, setting: Any, *_: Any) -> tuple[Any, dict[str, Any]]:
        if name == "importance":
            return None, {"arm": name, "failed": "the server ended: out of memory"}
        shapes = frozenset(setting.shapes if name == "default" else setting.shapes[:1])
        return served_steps.Arm(name, "http://nowhere", 2000, shapes), {"arm": name, "started_s": 1.0}

    def measured(url: str, prompts: list[list[int]], ends: float) -> dict[str, Any]:
        return {"step_ms": 1.0}

    monkeypatch.setattr(served_steps, "started", started)
    monkeypatch.setattr(served_steps, "measured", measured)
    monkeypatch.setattr(served_steps.time, "sleep", lambda _: None)
    out = tmp_path / "steps.jsonl"
    with pytest.raises(SystemExit, match=r"failed: importance$"):
        served_steps.main(out=out, logs=tmp_path, dry_run=True, minutes=1, only=None)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines.pop(0)["torch"] == torch.__version__
    by_arm = {name: [line for line in lines if line["arm"] == name] for name in served_steps.CPU.arms}
    assert by_arm["importance"] == [
        {"dry_run": True, "arm": "importance", "failed": "the server ended: out of memory"}
    ]
    assert [line.get("step_ms") for line in by_arm["tiered"]] == [None, 1.0]
    # A pool of 2,000 tokens holds one request of 1,024.
    assert [line.get("left_out") for line in by_arm["default"]] == [None, None, "does not fit"]
    assert all(line["dry_run"] for line in lines)


def test_a_shape_that_fails_does_not_keep_the_next(
    served_steps: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(url: str, prompts: list[list[int]], ends: float) -> dict[str, Any]:
        raise RuntimeError("3 of 65 tokens in time")

    monkeypatch.setattr(served_steps, "measured", measured)
    arm = served_steps.Arm("tiered", "http://nowhere", 4000, frozenset([(1024, 1)]))
    row = arm.row(1024, 1, 1000, time.monotonic() + 60)
    assert row["failed"] == "3 of 65 tokens in time"
    assert arm.row(256, 1, 1000, time.monotonic() + 60) is None


@pytest.fixture
def launched_server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(ROOT / "benchmark/kernels")
    import launched_server

    return launched_server


def test_a_server_that_ends_says_its_last_words(
    launched_server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho loading\necho "no such flag: $5"\nexit 2\n')
    python.chmod(0o755)
    monkeypatch.setattr(launched_server.sys, "executable", str(python))
    with (
        pytest.raises(RuntimeError, match=re.escape("the server ended: loading | no such flag: --fast")),
        launched_server.server(["--fast"], tmp_path / "log", time.monotonic() + 60),
    ):
        pytest.fail("it serves")


def test_a_server_that_hangs_up_does_not_answer_yet(launched_server: SimpleNamespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            for _ in range(2):  # whether it listens, and whether it is well
                listening.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert not launched_server.answers(listening.getsockname()[1])
        thread.join()


def test_what_is_asked_of_a_gpu_is_the_shape_that_it_is_compared_with(
    served_steps: SimpleNamespace,
) -> None:
    config = served_steps.GPU.config
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    kv_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2
    import roofline

    assert kv_bytes == roofline.LLAMA_8B.kv_token_bytes
    assert torch.finfo(getattr(torch, config["torch_dtype"])).bits == 16

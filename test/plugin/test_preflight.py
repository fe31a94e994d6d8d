"""Bad input is refused before anything is loaded: one line with its cure."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sglang_importance.launch.preflight import checkpoint_problems, port_problems


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": np.zeros(1000, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_busy_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (line,) = port_problems("127.0.0.1", port)
        assert f"127.0.0.1:{port}" in line
        assert "another --port" in line
    assert list(port_problems("127.0.0.1", port)) == []


@pytest.mark.parametrize(
    ("host", "port", "cure"),
    [
        ("999.1.1.1", 30000, "--host must be an address of this machine"),
        ("\u00fc..de", 30000, "--host must be an address of this machine"),
        ("no.such.host.invalid", 30000, "--host must be an address of this machine"),
        ("::zz", 30000, "--host must be an address of this machine"),
        ("192.0.2.1", 30000, "--host must be an address of this machine"),
        ("127.0.0.1", 65536, "--port must be a number up to 65535"),
    ],
)
def test_a_host_or_a_port_that_is_none(host: str, port: int, cure: str):
    (line,) = port_problems(host, port)
    assert line.startswith(f"cannot listen on {host}:{port}")
    assert cure in line
    assert "another --port" not in line


def test_a_sound_checkpoint_and_a_hub_name_pass(checkpoint: Path):
    assert list(checkpoint_problems(str(checkpoint))) == []
    assert list(checkpoint_problems("organisation/model")) == []


@pytest.mark.parametrize("size", [0, 4, 100, 2000])
def test_a_truncated_checkpoint_is_named(checkpoint: Path, size: int):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    (line,) = checkpoint_problems(str(checkpoint))
    assert line.startswith(str(file))
    assert "download the checkpoint again" in line


def test_a_missing_shard_and_a_damaged_index_are_named(checkpoint: Path):
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    (line,) = checkpoint_problems(str(checkpoint))
    assert "model-2.safetensors is missing" in line
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "x" * 300}}))
    (line,) = checkpoint_problems(str(checkpoint))
    assert "x is missing" in line, "no disk has room for such a name"
    index.write_text("{")
    (line,) = checkpoint_problems(str(checkpoint))
    assert "index.json is damaged" in line


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path):
    (line,) = checkpoint_problems(str(tmp_path))
    assert "no config.json" in line

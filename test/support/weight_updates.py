"""The ways in which a trainer gives a running server other weights, each from outside the server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import sglang  # noqa: F401  # first: with it come the shims
import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group

from support.servers import ServerProcess, free_port

GROUP = "trainer"


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    try:
        reply = server.post(path, body)
    except httpx.HTTPStatusError as error:
        raise AssertionError(f"{path}: {error.response.text}") from error
    assert reply["success"], reply


def from_disk(server: ServerProcess, model: Path, *, flush_cache: bool) -> None:
    post(server, "/update_weights_from_disk", {"model_path": str(model), "flush_cache": flush_cache})


def from_tensor(server: ServerProcess, model: Path, *, flush_cache: bool) -> None:
    """Through shared memory, by name: the server opens what this process has put there."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensors = list(load_file(model / "model.safetensors").items())
        packed = MultiprocessingSerializer.serialize(tensors, output_str=True)
        post(server, "/begin_weight_update", {})
        body = {"serialized_named_tensors": [packed], "flush_cache": flush_cache}
        post(server, "/update_weights_from_tensor", body)
        post(server, "/end_weight_update", {})
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def from_distributed(server: ServerProcess, model: Path, *, flush_cache: bool) -> None:
    """By broadcasts of a gloo group of two: this process and the scheduler."""
    port = free_port()
    shared = {"world_size": 2, "group_name": GROUP, "backend": "gloo"}
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            post,
            server,
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, **shared},
        )
        group = init_custom_process_group(rank=0, init_method=f"tcp://127.0.0.1:{port}", **shared)
        joining.result(60)
        post(server, "/begin_weight_update", {})
        tensors = load_file(model / "model.safetensors")
        updating = pool.submit(
            post,
            server,
            "/update_weights_from_distributed",
            {
                "names": list(tensors),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
                "group_name": GROUP,
                "flush_cache": flush_cache,
            },
        )
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, src=0, group=group)
        updating.result(60)
        post(server, "/end_weight_update", {})
        leaving = pool.submit(post, server, "/destroy_weights_update_group", {"group_name": GROUP})
        torch.distributed.destroy_process_group(group)
        leaving.result(60)


UPDATES: dict[str, Callable[..., None]] = {
    "disk": from_disk,
    "tensor": from_tensor,
    "distributed": from_distributed,
}

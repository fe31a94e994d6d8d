"""Spoiled checkpoints and configurations are refused before a server loads them."""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path

import numpy as np

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import StoreOptions
from sglang_importance.launch.preflight import checkpoint_problems
from sglang_importance.storage.store_launch import mount
from sglang_importance.upstream.refusal import LaunchRefused

from support.fuzz import check_message, damage, examples, json_lines


@examples(60, 10_000)
def test_a_spoiled_checkpoint_is_refused_before_it_is_loaded(tmp_path: Path, count: int) -> None:
    rng = random.Random(10)
    from safetensors.numpy import save

    weights = save({"a": np.zeros(8, np.float32)})
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    refused = 0
    for _ in range(count):
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_bytes(json_lines(rng, [{"architectures": ["LlamaForCausalLM"]}]))
        (folder / "model-00001-of-00001.safetensors").write_bytes(damage(rng, weights))
        (folder / "model.safetensors.index.json").write_bytes(json_lines(rng, [index]))
        problems = list(checkpoint_problems(str(folder)))
        refused += bool(problems)
        for problem in problems:
            check_message(problem)
        shutil.rmtree(folder)
    assert refused > 0.5 * count


@examples(60, 10_000)
def test_a_spoiled_extra_config_is_refused(tmp_path: Path, count: int) -> None:
    rng = random.Random(11)
    path = tmp_path / "extra.json"
    options = ImportanceOptions(policy="importance", store=StoreOptions(directory=str(tmp_path / "store")))
    for _ in range(count):
        path.write_bytes(json_lines(rng, [{"prefetch_threshold": 16, "backend_name": "x"}]))
        given = f"@{path}" if rng.random() < 0.5 else path.read_bytes().decode(errors="replace")
        args = argparse.Namespace(
            hicache_storage_backend=rng.choice([None, "file", "dynamic"]),
            hicache_storage_backend_extra_config=given,
        )
        try:
            mount(args, options)
        except LaunchRefused as refused:
            for reason in refused.reasons:
                check_message(reason)

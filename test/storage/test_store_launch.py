"""The store, mounted as HiCache's backend: settings that come along, and launches that cannot be."""

from __future__ import annotations

import argparse
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  # first: with it come the shims
from sglang.srt.configs.model_config import ModelConfig

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.placement_options import StoreOptions
from sgl_importance.options.tiered_options import TieredOptions
from sglang_importance.launch.launcher import _model_refusals
from sglang_importance.storage import store_launch
from sglang_importance.upstream.refusal import LaunchRefused

pytestmark = pytest.mark.usefixtures("watch")


def test_mounting_keeps_the_operators_settings(tmp_path: Path) -> None:
    args = argparse.Namespace(hicache_storage_backend_extra_config='{"prefetch_threshold": 32}')
    store_launch.mount(
        args, ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "new"), max_bytes=5))
    )
    config = json.loads(args.hicache_storage_backend_extra_config)
    assert args.enable_hierarchical_cache
    assert args.hicache_storage_backend == "dynamic"
    assert (config["prefetch_threshold"], config["budget_bytes"], config["wrapped"]) == (32, 5, None)
    assert config["directory"] == str(tmp_path / "new")


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ({}, 1),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": False}, 8),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 4),
    ],
)
def test_the_store_knows_how_many_ranks_write(tmp_path: Path, arguments: dict[str, Any], ranks: int) -> None:
    """Each sees what the others wrote only once in a while, and together they keep the bound."""
    args = argparse.Namespace(**arguments)
    store_launch.mount(args, ImportanceOptions(store=StoreOptions(directory=str(tmp_path))))
    assert json.loads(args.hicache_storage_backend_extra_config)["ranks"] == ranks


def test_an_engine_that_names_no_room_has_some_for_pages_on_their_way(tmp_path: Path) -> None:
    """Its arguments are only those that it was given."""
    args = argparse.Namespace()
    store = StoreOptions(directory=str(tmp_path / "new"))
    tiered = TieredOptions(residency="tiered")
    store_launch.mount(args, ImportanceOptions(policy="importance", store=store, tiered=tiered))
    assert args.hicache_ratio == store_launch.TIERED_STAGING_RATIO


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settings.json", '{"prefetch_threshold": 32, "nested": {"since": "2026-11-25"}}'),
        ("settings.TOML", "prefetch_threshold = 32\n[nested]\nsince = 2026-11-25\n"),
        ("settings.yaml", "prefetch_threshold: 32\nnested: {since: 2026-11-25}\n"),
        ("settings.yml", "prefetch_threshold: 32\nnested:\n  since: '2026-11-25'\n"),
    ],
)
def test_settings_come_from_a_file_of_each_kind_that_sglang_reads(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    args = argparse.Namespace(hicache_storage_backend_extra_config=f"@{tmp_path / name}")
    store_launch.mount(args, ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "store"))))
    config = json.loads(args.hicache_storage_backend_extra_config)
    assert (config["prefetch_threshold"], config["nested"]) == (32, {"since": "2026-11-25"})


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "{"), ("a.toml", "x"), ("a.yaml", "{"), ("a.yaml", "[1]"), ("a.ini", "")]
)
def test_a_file_of_settings_that_cannot_be_read_is_one_line(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    args = argparse.Namespace(hicache_storage_backend_extra_config=f"@{tmp_path / name}")
    with pytest.raises(LaunchRefused) as refused:
        store_launch.mount(args, ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "store"))))
    (line,) = refused.value.reasons
    assert "correct it" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"hicache_storage_backend": "mooncake"}, "add --kv-importance-store-backends any"),
        ({"hicache_storage_backend": "sim"}, "keeps names and no bytes"),
        ({"hicache_storage_backend": "shm"}, "stores nothing"),
        ({"hicache_storage_backend": "unheard"}, "drop --hicache-storage-backend"),
        ({"hicache_storage_backend": "dynamic"}, "needs backend_name, module_path, class_name"),
        ({"speculative_algorithm": "EAGLE"}, "drop --speculative-algorithm"),
        ({"pp_size": 2}, "use --pp-size 1"),
        ({"nnodes": 2}, "use --nnodes 1"),
        ({"elastic_ep_backend": "mooncake"}, "drop --elastic-ep-backend"),
        (
            {"enable_dp_attention_local_control_broadcast": True},
            "drop --enable-dp-attention-local-control-broadcast",
        ),
        ({"hicache_storage_backend_extra_config": "[1]"}, "correct it"),
        ({"hicache_storage_backend_extra_config": "{"}, "correct it"),
    ],
)
def test_what_cannot_run_is_one_line(tmp_path: Path, arguments: dict[str, Any], cure: str) -> None:
    with pytest.raises(LaunchRefused) as refused:
        store_launch.mount(
            argparse.Namespace(**arguments), ImportanceOptions(store=StoreOptions(directory=str(tmp_path)))
        )
    (line,) = refused.value.reasons
    assert cure in line


@pytest.mark.parametrize(
    ("facts", "mode"),
    [
        ({}, None),
        ({"is_multimodal": True}, "multimodal models"),
        ({"is_encoder_decoder": True}, "encoder-decoder models"),
        ({"is_generation": False}, "embedding and reward models"),
    ],
)
def test_stock_sglang_with_a_store_refuses_models_that_no_test_has_run(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, bool], mode: str | None
) -> None:
    text = {"is_multimodal": False, "is_encoder_decoder": False, "is_generation": True}
    config = SimpleNamespace(**{**text, **facts})
    monkeypatch.setattr(ModelConfig, "from_server_args", lambda args: config)
    options = ImportanceOptions(policy="default", store=StoreOptions(directory="store"))
    lines = _model_refusals(None, options)
    assert len(lines) == (mode is not None)
    assert all(f"does not support {mode}: serve a text model" in line for line in lines)


def test_a_bound_that_bounds_nothing_is_refused(tmp_path: Path) -> None:
    """Another backend keeps a limit of its own."""
    store = StoreOptions(directory=str(tmp_path), max_bytes=1 << 30)
    with pytest.raises(LaunchRefused) as refused:
        store_launch.mount(argparse.Namespace(hicache_storage_backend="file"), ImportanceOptions(store=store))
    (line,) = refused.value.reasons
    assert line.startswith(
        "--kv-importance-store-bytes has no effect beside --hicache-storage-backend file: "
    )
    assert "in --hicache-storage-backend-extra-config" in line


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchRefused, match="cannot be written"):
        store_launch.mount(
            argparse.Namespace(), ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "file")))
        )
    if os.geteuid() != 0:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(LaunchRefused, match="cannot be written"):
            store_launch.mount(
                argparse.Namespace(), ImportanceOptions(store=StoreOptions(directory=str(tmp_path / "store")))
            )

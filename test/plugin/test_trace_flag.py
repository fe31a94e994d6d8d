"""``--kv-importance-trace``: what reaches the scheduler, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sgl_importance.observe.trace import open_trace
from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.options.observation_options import TraceOptions
from sgl_importance.policy.cost_model import CostModel
from sgl_importance.policy.marginal_loss import ImportancePolicy
from sglang_importance.cache.cache_factory import create_recorder
from sglang_importance.launch.modes.tiered_pages import page_list_refusals
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.server_options import importance_options

from support.config_file import config_flags

Parse = Callable[..., ServerArgs]
COST = CostModel(1e-5, 1e-9, 4096, 1e9, 1e8)


def recorder_for(trace: Path, model: str = "some-model") -> Any:
    allocator = SimpleNamespace(size=640)
    context = SimpleNamespace(
        params=SimpleNamespace(page_size=16, token_to_kv_pool_allocator=allocator),
        server_args=SimpleNamespace(
            model_path=f"models/{model}",
            dp_size=1,
            chunked_prefill_size=512,
            hicache_write_policy="write_through",
        ),
    )
    options = ImportanceOptions(policy="observe", trace=TraceOptions(directory=str(trace), megabytes=3))
    return create_recorder(context, options, ImportancePolicy(COST), rows=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["observe", "importance"])
def test_the_flags_reach_the_options(parse: Parse, policy: str, tmp_path: Path) -> None:
    recordings = str(tmp_path / "recordings")
    server_args = parse(
        *("--kv-policy", policy, "--kv-importance-trace", recordings),
        *config_flags(trace={"detail": "steps", "megabytes": 7}),
    )
    options = importance_options(server_args)
    assert options is not None
    trace = options.trace
    assert (trace.directory, trace.detail, trace.megabytes) == (recordings, "steps", 7)


def test_stock_has_nothing_to_record(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--kv-importance-trace", "recordings")
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "sgl-importance: error: --kv-importance-trace has nothing to record under --kv-policy default: "
        "use observe"
    )


def test_the_header_names_the_model_without_its_folders(tmp_path: Path) -> None:
    recorder_for(tmp_path / "new" / "folder").close()
    header = open_trace(tmp_path / "new" / "folder").header
    assert (header.model, header.page_size, header.capacity_tokens) == ("some-model", 16, {"device": 640})
    assert header.options["trace_megabytes"] == 3


def test_a_directory_may_be_in_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recorder_for(Path("~/recordings")).close()
    assert open_trace(tmp_path / "recordings").header.page_size == 16


def test_a_directory_that_cannot_be_written_stops_the_launch(
    parse: Parse, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchRefused) as refused:
        recorder_for(tmp_path / "file")
    (line,) = refused.value.reasons
    assert line == (
        f"cannot record in {tmp_path / 'file'} (File exists): give --kv-importance-trace a writable directory"
    )
    with pytest.raises(SystemExit) as stop:  # before a model is loaded
        parse("--kv-policy", "observe", "--kv-importance-trace", str(tmp_path / "file"))
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"sgl-importance: error: {line}\n"


def test_a_recording_of_another_model_stops_the_launch(tmp_path: Path) -> None:
    recorder_for(tmp_path).close()
    recorder_for(tmp_path).close()
    with pytest.raises(LaunchRefused) as refused:
        recorder_for(tmp_path, "another")
    (line,) = refused.value.reasons
    assert line == (
        f"--kv-importance-trace: {tmp_path} has a recording of another model, some-model and another: "
        "name a directory of its own"
    )


def test_page_lists_need_a_recording(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--kv-policy", "observe", *config_flags(trace={"pages": 0.4}))
    needs = "trace.pages of --kv-importance-config needs --kv-importance-trace to name a directory"
    assert needs in capsys.readouterr().err
    listed = parse(
        *("--kv-policy", "observe", "--kv-importance-trace", "recordings"),
        *config_flags(trace={"pages": 0.4}),
    )
    options = importance_options(listed)
    assert options is not None
    assert options.trace.pages == 0.4


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"attention_backend": "torch_native"}, None),
        ({"attention_backend": "triton"}, "use --attention-backend torch_native"),
        ({"device": "cuda"}, "use --device cpu"),
    ],
)
def test_page_lists_are_refused_where_nobody_has_taken_them(
    changes: dict[str, Any], cure: str | None
) -> None:
    args = SimpleNamespace(**{"device": "cpu", **changes})
    recording = ImportanceOptions(policy="observe", trace=TraceOptions(directory="recordings", pages=0.4))
    lines = list(page_list_refusals(args, recording))
    assert ["trace.pages" in line and cure in line for line in lines] == [True] * bool(cure)
    assert not list(
        page_list_refusals(
            args, ImportanceOptions(policy="observe", trace=TraceOptions(directory="recordings"))
        )
    )

"""Real launches: a refusal ends them at once, a part that is not live stops them, ``default`` is stock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.config_file import config_flags
from support.launches import (
    CPU_FLAGS,
    LAUNCH_SERVER,
    SGLANG_SERVE,
    Ended,
    launch,
    run_to_end,
    write_plugin,
)
from support.nightly_cases import rest_nightly
from support.servers import free_port
from support.victims import cores_of_ranks

pytestmark = pytest.mark.server


def _assert_stopped(ended: Ended, *refusals: str) -> None:
    assert ended.returncode == 2, ended.stderr
    assert len(ended.refusals) == len(refusals), ended.stderr
    for line, expected in zip(ended.refusals, refusals, strict=True):
        assert expected in line
    assert "Traceback" not in ended.stderr
    assert ended.survivors == []


@pytest.mark.parametrize(
    "command",
    [LAUNCH_SERVER, pytest.param(SGLANG_SERVE, marks=pytest.mark.nightly)],
    ids=["launch_server", "serve"],
)
def test_an_untested_mode_stops_the_command(tiny_model: Path, command: tuple[str, ...]) -> None:
    # sglang's own command starts for real, as a user types it.
    is_typed = command == SGLANG_SERVE
    ended = launch(
        tiny_model, "--kv-policy", "importance", "--pp-size", "2", command=command, imports_anew=is_typed
    )
    _assert_stopped(ended, "does not support pipeline parallelism (--pp-size 2): use --pp-size 1")


@pytest.mark.nightly
def test_what_only_the_model_tells_stops_the_launch(tiny_model: Path) -> None:
    ended = launch(tiny_model, "--kv-policy", "observe", *config_flags(signal={"layers": [0, 7]}))
    _assert_stopped(
        ended, "signal.layers of --kv-importance-config: 7 not among", "a scheduler refused to start"
    )


@pytest.mark.nightly
def test_a_part_that_cannot_be_installed_stops_the_launch(tiny_model: Path, tmp_path: Path) -> None:
    plugin = write_plugin(
        tmp_path,
        """
import sglang_importance.attention as attention
def install(options):
    raise ImportError("no kernels here")
attention.install = install
""",
    )
    ended = launch(tiny_model, "--kv-policy", "importance", plugin_directory=plugin)
    _assert_stopped(
        ended,
        "could not install attention: ImportError: no kernels here; install sglang==0.5.21 or use",
        "a scheduler refused to start",
    )


def test_a_part_that_is_not_live_stops_the_launch(tiny_model: Path, tmp_path: Path) -> None:
    plugin = write_plugin(
        tmp_path,
        """
import sglang_importance.attention as attention
attention.install = lambda options: None
""",
    )
    ended = launch(tiny_model, "--kv-policy", "importance", plugin_directory=plugin)
    _assert_stopped(
        ended, "not live in the scheduler: attention scores; install", "a scheduler refused to start"
    )


@pytest.mark.nightly
def test_a_proof_that_is_missing_stops_the_launch(tiny_model: Path, tmp_path: Path) -> None:
    plugin = write_plugin(
        tmp_path,
        """
import multiprocessing
if multiprocessing.parent_process() is not None:
    import sglang_importance.launch.scheduler_launch as scheduler
    scheduler.HOOKS[scheduler.REPORT_TARGET] = (lambda info, scheduler: None, scheduler.HookType.AFTER)
""",
    )
    ended = launch(tiny_model, "--kv-policy", "importance", plugin_directory=plugin)
    _assert_stopped(ended, "a scheduler reported ready without proof that importance is live in it")


@pytest.mark.nightly
def test_a_scheduler_without_plugin_stops_the_launch(tiny_model: Path, tmp_path: Path) -> None:
    plugin = write_plugin(
        tmp_path,
        """
import multiprocessing
if multiprocessing.parent_process() is not None:
    import sglang_importance.launch.scheduler_launch as scheduler
    class BrokenHooks(dict):
        def items(self):
            raise ImportError("broken package")
    scheduler.HOOKS = BrokenHooks()
""",
    )
    ended = launch(tiny_model, "--kv-policy", "importance", plugin_directory=plugin)
    assert ended.returncode != 0
    assert "--radix-cache-backend='importance' is not registered" in ended.stderr
    assert ended.survivors == []


BREAK_WORKERS = """
import multiprocessing
def worker_class(options):
    import sglang_importance.http.routes as routes
    from sglang_importance.launch.tokenizer_workers import worker_class
    def install_routes(*args, **kwargs):
        raise ImportError("no routes here")
    routes.install_routes = install_routes
    return worker_class(options)
if multiprocessing.parent_process() is None:
    import sglang_importance.launch.tokenizer_workers as workers
    workers.worker_class = worker_class
"""


@pytest.mark.nightly
def test_a_tokenizer_worker_without_our_parts_ends_the_server(tiny_model: Path, tmp_path: Path) -> None:
    plugin = write_plugin(tmp_path, BREAK_WORKERS)
    flags = ("--kv-policy", "importance", "--tokenizer-worker-num", "2")
    ended = launch(tiny_model, *flags, plugin_directory=plugin)
    assert ended.refusals
    expected = "could not install HTTP routes: ImportError: no routes here; install sglang=="
    assert all(line.startswith(expected) for line in ended.refusals), ended.stderr
    assert ended.survivors == []


@pytest.mark.nightly
def test_a_replica_that_refuses_stops_the_launch(tiny_model: Path) -> None:
    # Without --nccl-port: each replica has one of its own.
    model = ("--model-path", str(tiny_model), "--port", str(free_port()), *CPU_FLAGS)
    flags = ("--kv-policy", "observe", "--dp-size", "2", *config_flags(signal={"layers": [7]}))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cores_of_ranks(2).items():
            patch.setenv(name, value)
        ended = run_to_end([*LAUNCH_SERVER, *model, *flags])
    assert ended.refusals, ended.stderr
    assert ended.refusals[-1].startswith("a scheduler refused to start")
    assert all(
        "signal.layers of --kv-importance-config: 7 not among" in line for line in ended.refusals[:-1]
    ), ended.stderr
    assert (ended.returncode, ended.survivors) == (2, [])


LOOK_INTO_SCHEDULER = """
import json, multiprocessing, sys
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
def look(scheduler):
    runner = scheduler.tp_worker.model_runner
    seen = {{
        "cache": type(scheduler.tree_cache).__qualname__,
        "tree core": type(scheduler.tree_cache.tree_core).__module__,
        "attention": type(runner.attn_backend).__module__,
        "page size": scheduler.page_size,
        "ours": [name for name in sys.modules if name.startswith("sglang_importance.")],
        "proof": scheduler.get_init_info().get("sgl_importance"),
    }}
    with open({path!r}, "w") as file:
        json.dump(seen, file)
    raise SystemError("seen enough")
if multiprocessing.parent_process() is not None:
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", look, HookType.BEFORE)
"""


@pytest.mark.parametrize("imports_anew", rest_nightly([False, True]), ids=["forked", "new interpreters"])
def test_default_is_stock(tiny_model: Path, tmp_path: Path, imports_anew: bool) -> None:
    """Without any policy the arguments are the same, as test_flags shows."""
    seen_path = tmp_path / "seen.json"
    plugin = write_plugin(tmp_path, LOOK_INTO_SCHEDULER.format(path=str(seen_path)))
    ended = launch(tiny_model, "--kv-policy", "default", plugin_directory=plugin, imports_anew=imports_anew)
    seen = json.loads(seen_path.read_text())
    assert seen["cache"] == "UnifiedRadixCache"
    assert "rust" in seen["tree core"]
    assert seen["attention"] == "sglang.srt.layers.attention.torch_native_backend"
    assert seen["page size"] == 1
    assert seen["proof"] is None
    # The fork server has loaded what is looked for.
    absent = ("attention.torch_native", "cache", "tree", "placement", "operations", "metrics", "http")
    for part in absent if imports_anew else ():
        assert f"sglang_importance.{part}" not in seen["ours"]
    assert ended.refusals == []
    assert ended.survivors == []

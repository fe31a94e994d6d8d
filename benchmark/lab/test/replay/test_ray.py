"""Sweeps on a real Ray cluster of two nodes, one core each, on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sgl_importance_lab.replay import ray_cluster
from sgl_importance_lab.replay.cli import app
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.policy_registry import UnknownPolicyError
from sgl_importance_lab.replay.ray_cluster import RayCluster
from sgl_importance_lab.replay.replay_runner import Job, ReplayError, Row, run_job, run_jobs

from support.python_path import TEST, python_path
from support.workloads.replay_jobs import die, sleep
from support.workloads.session_trace import write_session_trace

pytest.importorskip("ray", reason="Ray is not installed: pip install './benchmark/lab[ray]'")
POLICIES = ("lru", "lhd", "random", "importance", "belady")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    from ray.cluster_utils import Cluster

    # Workers look for the jobs' module as this process does.
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", python_path(TEST)["PYTHONPATH"])
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_raylet_start_wait_time_s", "120")  # on a busy machine
        nodes = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
        started = Cluster(initialize_head=True, head_node_args=nodes)
        started.add_node(num_cpus=1, object_store_memory=100 << 20)
        yield RayCluster(started.address)
        started.shutdown()


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return write_session_trace(tmp_path / "sessions.jsonl", 60)


def _without_time(row: Row) -> Row:
    return replace(row, seconds=0.0)


def test_rows_are_those_of_one_machine(cluster: RayCluster, trace_file: Path) -> None:
    traces = [read_trace(trace_file)]
    jobs = [Job(0, policy, size, seed=seed) for policy in POLICIES for size in (5, 40) for seed in (0, 1)]
    alone = [row for _, row in run_jobs(run_job, traces, jobs, 1)]
    together = dict(run_jobs(run_job, traces, jobs, cluster))
    assert [_without_time(together[index]) for index in range(len(jobs))] == list(map(_without_time, alone))
    assert len({row.hit_blocks for row in alone}) > 2


def test_the_command_replays_on_the_cluster(cluster: RayCluster, trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sweep = ("--policies", "lru,fifo", "--capacity-blocks", "5,40", "--json", out)
    result = CliRunner().invoke(
        app, [str(each) for each in (trace_file, *sweep, "--jobs", f"ray:{cluster.address}")]
    )
    assert result.exit_code == 0, result.output
    rows = [Row(**row) for row in json.loads(out.read_text())]
    traces = [read_trace(trace_file)]
    expected = [run_job(traces, Job(0, policy, size)) for policy in ("lru", "fifo") for size in (5, 40)]
    assert list(map(_without_time, rows)) == list(map(_without_time, expected))


def test_a_worker_that_dies_twice_is_an_error_and_no_hang(cluster: RayCluster, trace_file: Path) -> None:
    with pytest.raises(ReplayError, match="Ray lost a replay"):
        list(run_jobs(die, [read_trace(trace_file)], [Job(0, "lru", 1)], cluster))


def test_leaving_early_cancels_the_others(cluster: RayCluster, trace_file: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    traces = [read_trace(trace_file)]
    results = run_jobs(sleep, traces, [Job(0, str(done), seconds) for seconds in (0, 60, 60)], cluster)
    assert next(results) == (0, 0)
    results.close()
    # The cluster has its cores back, and not after a minute.
    assert list(run_jobs(sleep, traces, [Job(0, str(done), 0)], cluster)) == [(0, 0)]
    assert done.read_text() == "0\n0\n"


def test_workers_with_other_code_are_refused(
    cluster: RayCluster, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "source_digest", lambda: "of a newer release")
    with pytest.raises(ReplayError, match="another sgl-importance: install the same release on every node"):
        list(run_jobs(run_job, [read_trace(trace_file)], [Job(0, "lru", 4)], cluster))


def test_an_exception_of_a_replay_arrives_as_it_was(cluster: RayCluster, trace_file: Path) -> None:
    with pytest.raises(UnknownPolicyError, match="unknown policy 'none'"):
        list(run_jobs(run_job, [read_trace(trace_file)], [Job(0, "none", 4)], cluster))


def test_a_cluster_that_does_not_answer_is_named(trace_file: Path) -> None:
    with pytest.raises(ReplayError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: correct the address"):
        list(run_jobs(run_job, [read_trace(trace_file)], [Job(0, "lru", 4)], RayCluster("127.0.0.1:1")))

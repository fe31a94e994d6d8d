"""`sgl-importance doctor` says what it found, and names the cure of what is wrong."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sglang_importance.launch import doctor, machine_findings
from sglang_importance.launch.finding import Status
from sglang_importance.launch.server_findings import server_findings

from support.live_page import API_KEY
from support.servers import ServerProcess


def test_reports_every_subject_as_json():
    result = CliRunner().invoke(doctor.app, ["--json"])
    findings = json.loads(result.stdout)
    statuses = {finding["subject"]: finding["status"] for finding in findings}
    assert statuses["sglang"] == "ok"
    assert statuses["upstream symbols"] == "ok"
    assert statuses["CPU shims"] == "ok"
    problems = [finding for finding in findings if finding["status"] == "problem"]
    assert result.exit_code == bool(problems)
    assert all(problem["cure"] for problem in problems)


def test_another_sglang_is_a_problem_with_a_cure(monkeypatch: pytest.MonkeyPatch):
    from sglang_importance.upstream import symbol_check as selfcheck

    monkeypatch.setattr(selfcheck, "version_problem", lambda: "sglang 9.9.9 has not been tested")
    (finding,) = (finding for finding in doctor.examine() if finding.subject == "upstream symbols")
    assert finding.status is Status.PROBLEM
    assert "sglang==" in finding.cure


@pytest.mark.parametrize(
    ("laboratory", "status"), [("0.2.0", Status.OK), ("0.1.0", Status.PROBLEM), (None, Status.NOTE)]
)
def test_the_laboratory_is_of_the_same_release(
    monkeypatch: pytest.MonkeyPatch, laboratory: str | None, status: Status
):
    installed = {"sgl-importance": "0.2.0", "sgl-importance-lab": laboratory}
    monkeypatch.setattr(machine_findings, "_installed", lambda package: installed.get(package, "1.0"))
    (finding,) = (each for each in machine_findings._versions() if each.subject == "laboratory")
    assert finding.status is status
    assert ("benchmark/lab" in finding.cure) == (status is not Status.OK)


def test_a_build_of_torch_for_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (finding,) = (each for each in machine_findings._accelerator() if each.subject == "build of torch")
    assert finding.status is Status.NOTE
    assert "nvidia-smi" in finding.cure


@pytest.mark.parametrize(("flags", "status"), [("avx2 fma", "note"), ("avx2 avx512_bf16", "ok")])
def test_whether_the_processor_knows_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path, flags: str, status: str
):
    monkeypatch.setattr(machine_findings, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n")
    (finding,) = (finding for finding in doctor.examine() if finding.subject == "bfloat16")
    assert finding.status == status
    assert ("--dtype float32" in finding.cure) == (status == "note")


@pytest.mark.parametrize(("mebibytes", "status"), [(64, "note"), (16 * 1024, "ok")])
def test_the_shared_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, mebibytes: int, status: str):
    usage = SimpleNamespace(total=mebibytes * 2**20, free=10**12)
    monkeypatch.setattr(machine_findings.shutil, "disk_usage", lambda _: usage)
    (finding,) = machine_findings._shared_memory()
    assert finding.status == status
    assert ("--shm-size" in finding.cure) == (status == "note")


def test_a_ledger_in_postgresql_needs_its_driver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_findings, "find_spec", lambda name: None)
    (finding,) = machine_findings._postgresql()
    assert finding.status == "note"
    assert "[postgresql]" in finding.cure


def test_a_truncated_checkpoint_is_a_problem_with_a_cure(monkeypatch: pytest.MonkeyPatch, tmp_path):
    from sgl_importance import embedded_model

    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    monkeypatch.setattr(embedded_model, "checkpoint_path", lambda: tmp_path)
    (finding,) = (finding for finding in doctor.examine() if finding.subject == "embedded model")
    assert finding.status is Status.PROBLEM
    assert "train_probe.py" in finding.cure


def test_a_check_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch):
    def explode():
        raise RuntimeError("boom")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (explode, *doctor.CHECKS[:1]))
    findings = doctor.examine()
    assert findings[0].status is Status.PROBLEM
    assert "boom" in findings[0].detail
    assert findings[1].subject == "python"


def test_a_ledger_that_is_not_written_is_a_problem_with_a_cure():
    ledger = {"place": "postgresql://host/db", "is_written": True, "lost_visits": 0}
    *_, good = server_findings(HEALTHY | {"ledger": ledger})
    assert (good.subject, good.status) == ("ledger", Status.OK)
    *_, bad = server_findings(HEALTHY | {"ledger": ledger | {"is_written": False, "lost_visits": 1200}})
    assert (bad.subject, bad.status) == ("ledger", Status.PROBLEM)
    assert "1,200 visits lost" in bad.detail
    assert "KV importance ledger" in bad.cure


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    def wants_torch():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (wants_torch,))
    (finding,) = doctor.examine()
    assert (finding.subject, finding.status) == ("wants torch", Status.PROBLEM)
    assert finding.detail == "not looked at: torch is not installed"
    assert finding.cure == "run scripts/setup.sh"


def test_every_attention_backend_says_how_it_is_scored_and_that_no_gpu_has_run_it():
    from sglang_importance.attention.score_sources import PRODUCERS, UNPROVEN

    scores = {
        finding.subject.removeprefix("scores from "): finding
        for finding in doctor.examine()
        if finding.subject.startswith("scores from ")
    }
    assert scores.keys() == {"fa3", "flashinfer", "torch_native", "triton"}
    for backend in PRODUCERS.values():
        assert scores[backend].status is Status.OK
    for backend in ("flashinfer", "triton"):
        finding = scores[backend]
        assert finding.status is Status.NOTE
        assert f"pending a GPU run: --kv-importance-source qk_probe or {backend}" in finding.detail
    assert scores["fa3"].detail.endswith("qk_probe")
    assert set(UNPROVEN) == {"qk_probe", "flashinfer", "triton"}


# ---- a running server ----

HEALTHY = {"policy": "importance", "clock": 1200, "faults": {"counts": {}, "fallback": None}}
COUNTED = {**HEALTHY, "faults": {"counts": {"operation": 2, "report": 1}, "fallback": None}}
FALLEN_BACK = {
    **HEALTHY,
    "faults": {
        "counts": {"ranking": 1},
        "fallback": {
            "evicts_by": "lru",
            "place": "ranking",
            "error": "TypeError: list[int]",
            "clock": 1200,
            "time": 1_800_000_000.5,
        },
    },
}


def test_a_server_without_faults_is_well():
    assert {finding.status for finding in server_findings(HEALTHY)} == {Status.OK}
    *_, eviction = server_findings(HEALTHY | {"policy": "observe"})
    assert eviction.detail == "by LRU, as stock does"


def test_faults_are_counted_by_their_kind_and_to_be_reported():
    findings = {finding.subject: finding for finding in server_findings(COUNTED)}
    assert findings["faults: operation"].detail.startswith("2, ")
    assert findings["faults: report"].detail.startswith("1, ")
    assert "KV importance: fault in report" in findings["faults: report"].cure
    assert {finding.status for finding in findings.values()} == {Status.OK, Status.NOTE}


def test_a_server_that_has_fallen_back_is_a_problem_with_a_cure():
    (problem,) = (each for each in server_findings(FALLEN_BACK) if each.status is Status.PROBLEM)
    since = "since request 1,200 (2027-01-15 08:00:00 UTC)"
    assert problem.detail == f"evicts by LRU until it is restarted, {since}: TypeError: list[int]"
    assert problem.cure.startswith("restart it, and report the line 'KV importance: fault in ranking'")


def test_a_rank_that_does_not_answer_is_a_problem_and_hides_no_other(monkeypatch: pytest.MonkeyPatch):
    document = {"dp_ranks": [HEALTHY, None]}
    monkeypatch.setattr(
        doctor, "connected", lambda *_: nullcontext(SimpleNamespace(get=lambda *_, **__: document))
    )
    asked = CliRunner().invoke(doctor.app, ["--url", "http://some", "--json"])
    assert asked.exit_code == 1, asked.exception
    *well, refuses = json.loads(asked.stdout)
    assert {finding["subject"].partition(":")[0] for finding in well} == {"data-parallel rank 0"}
    assert (refuses["subject"], refuses["status"]) == ("data-parallel rank 1", "problem")
    assert refuses["detail"] == "it did not answer"
    assert refuses["cure"] == "look into the server's log"


@pytest.mark.server
def test_examines_a_running_server_instead_of_this_machine(server: ServerProcess):
    asked = CliRunner().invoke(doctor.app, ["--url", server.base_url, "--api-key", API_KEY, "--json"])
    found = {finding["subject"]: finding for finding in json.loads(asked.stdout)}
    assert found.keys() == {"policy", "faults", "eviction"}
    assert found["faults"]["detail"] == "none"
    assert found["eviction"]["detail"] == "by the marginal loss"
    assert asked.exit_code == 0


def test_a_table_shows_what_an_error_says_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "examine_server", lambda *_: list(server_findings(FALLEN_BACK)))
    shown = CliRunner().invoke(doctor.app, ["--url", "http://somewhere"])
    assert "TypeError: list[int]" in " ".join(shown.stdout.split())
    assert shown.exit_code == 1

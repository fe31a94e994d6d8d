"""`sgl-importance doctor` says what it found, and names the cure of what is wrong."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sglang_importance.launch import doctor
from sglang_importance.launch.doctor import Status


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
    from sglang_importance.upstream import symbols as selfcheck

    monkeypatch.setattr(selfcheck, "version_problem", lambda: "sglang 9.9.9 has not been tested")
    (finding,) = (finding for finding in doctor.examine() if finding.subject == "upstream symbols")
    assert finding.status is Status.PROBLEM
    assert "sglang==" in finding.cure


def test_a_truncated_checkpoint_is_a_problem_with_a_cure(monkeypatch: pytest.MonkeyPatch, tmp_path):
    from sgl_importance import probe

    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    monkeypatch.setattr(probe, "checkpoint_path", lambda: tmp_path)
    (finding,) = (finding for finding in doctor.examine() if finding.subject == "embedded model")
    assert finding.status is Status.PROBLEM
    assert "train_probe.py" in finding.cure


def test_a_check_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch):
    def explode():
        raise RuntimeError("boom")
        yield

    monkeypatch.setattr(doctor, "_CHECKS", (explode, *doctor._CHECKS[:1]))
    findings = doctor.examine()
    assert findings[0].status is Status.PROBLEM
    assert "boom" in findings[0].detail
    assert findings[1].subject == "python"


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    def wants_torch():
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
        yield

    monkeypatch.setattr(doctor, "_CHECKS", (wants_torch,))
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

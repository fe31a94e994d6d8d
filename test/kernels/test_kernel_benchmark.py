"""The kernel benchmark's own way through build, checks, arms and JSON, on tiny shapes without a GPU."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmark" / "kernels" / "run.py"

pytest.importorskip("triton")


FA3 = """
import torch

def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, softmax_scale, causal):
    outputs = []
    for request, length in enumerate(cache_seqlens.tolist()):
        places = page_table[request, :length].long()
        k, v = (cache[places, 0].float() for cache in (k_cache, v_cache))
        grouped = q[request, 0].float().view(k.shape[1], -1, k.shape[2])
        weights = torch.softmax(softmax_scale * torch.einsum("hgd,khd->hgk", grouped, k), -1)
        outputs.append(torch.einsum("hgk,khd->hgd", weights, v).flatten(0, 1))
    return torch.stack(outputs).to(q.dtype).unsqueeze(1)
"""
"""FA3's contract in plain torch."""


def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **changes}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.nightly
def test_a_dry_run_checks_times_and_writes(tmp_path: Path) -> None:
    """The dry run goes through every arm, check and path that a GPU takes, FA3 included."""
    out = tmp_path / "kernels.json"
    (tmp_path / "flash_attn_interface.py").write_text(FA3)
    done = run("--dry-run", "--out", str(out), PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 0, done.stderr
    facts, *rows = json.loads(out.read_text())["rows"]
    assert facts["device"] == "interpreter"
    assert facts["fa3"] == "timed"
    exact = {"qk-probe", "qk-probe, replays", "reduction", "FA3"}
    assert set(facts["errors"]) == exact | {
        f"{path}{what}" for path in ("CUDA cores", "tensor cores") for what in ("", ", replays")
    }
    assert all(0 <= error < (1e-4 if name in exact else 2e-2) for name, error in facts["errors"].items())
    assert {entry["arm"] for entry in rows} == {
        "stock",
        "gated off",
        "emitting",
        "emitting+reduction",
        "qk-probe alone",
        "FA3",
        *(f"whole step, {how}" for how in ("stock", "unobserved", "together", "in turns")),
        *(f"whole step, qk-probe, {how}" for how in ("unobserved", "together", "in turns")),
    }
    assert all(entry["to_stock"] == 1 for entry in rows if entry["arm"].endswith("stock"))
    steps = [entry for entry in rows if entry["arm"].startswith("whole step")]
    stock = {entry["shape"]: entry["microseconds"] for entry in steps if entry["arm"] == "whole step, stock"}
    for entry in steps:
        added = entry["microseconds"] - stock[entry["shape"]]
        assert entry["added_microseconds"] == pytest.approx(added)
        assert entry["to_model_step"] < 1 + added / stock[entry["shape"]] or added <= 0, "attention is a part"
    assert len({entry["shape"] for entry in rows}) == 2


def test_without_a_gpu_it_says_so_and_needs_neither_sglang_nor_numba() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode != 0
    assert "no CUDA device: run it on a GPU, or with --dry-run" in done.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert {"torch", "triton", "sgl_importance_kernels"} <= imported
    assert not imported & {"sglang", "sglang_importance", "numba", "transformers", "flashinfer"}


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The script's own modules; other benchmarks have some of the same names."""
    stacks = ("decode_stack", "probe_stack", "model_step")
    names = ("run", "arms", "fa3", "decode_shape", *stacks, "timing", "torch_decode", "results")
    for folder in (SCRIPT.parents[1], SCRIPT.parent):
        monkeypatch.syspath_prepend(str(folder))
    before = {name: sys.modules.pop(name, None) for name in names}
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def fa3_of(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(source, names)
    return names["flash_attn_with_kvcache"]


def test_fa3_over_another_cache_is_told_apart(benchmark_modules: SimpleNamespace) -> None:
    modules = benchmark_modules
    inputs = modules.decode_shape.Inputs(modules.decode_shape.TINY[0], "cpu")
    arms = modules.arms.DecodeArms(inputs, tensor_cores=False)
    fine = modules.fa3.Fa3Kernel("x", fa3_of(FA3))
    assert modules.run.check_fa3(fine, arms, inputs) <= 2e-2
    broken = modules.fa3.Fa3Kernel("x", fa3_of(FA3.replace("page_table[request,", "page_table[0,")))
    with pytest.raises(SystemExit, match="FA3 differs from stock"):
        modules.run.check_fa3(broken, arms, inputs)


def test_an_fa3_that_does_not_run_here_is_named(
    benchmark_modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise NotImplementedError("only sm90")

    modules = benchmark_modules
    inputs = modules.decode_shape.Inputs(modules.decode_shape.TINY[1], "cpu")
    module = SimpleNamespace(flash_attn_with_kvcache=refuses)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    assert modules.fa3.usable_kernel(inputs) == (None, "flash_attn_interface does not run: only sm90")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("no", ""),
        ("emit_logits", "emits behind a closed gate"),
        ("output", "changed the output of attention"),
        ("nothing", "some logits were not emitted"),
        ("shifted", "is wrong by"),
    ],
)
def test_broken_variants_are_told_apart(
    benchmark_modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, spoil: str, words: str
) -> None:
    """What the checks on a GPU would say of a kernel that is wrong."""
    modules = benchmark_modules
    right = modules.torch_decode.TorchDecode.run

    def wrong(self: Any, q: Any, cache: Any, *arguments: Any, **settings: Any) -> None:
        right(self, q, cache, *arguments, **settings)
        if not arguments:
            return
        logits, starts = arguments[:2]
        if spoil == "emit_logits":
            logits[0, 0] = 1.0
        elif spoil == "output":
            settings["out"][0, 0] += 0.1
        elif spoil == "nothing" and int(starts[0]) >= 0:
            logits[0, -1] = modules.run.POISON
        elif spoil == "shifted" and int(starts[0]) >= 0:
            logits.copy_(logits.roll(16, dims=1))

    monkeypatch.setattr(modules.torch_decode.TorchDecode, "run", wrong)
    monkeypatch.setattr(modules.arms, "reduce_logits", reduced_by_torch)
    definition = modules.run.expected_rows
    monkeypatch.setattr(modules.run, "expected_rows", lambda inputs: peaks_only(definition(inputs)))
    inputs = modules.decode_shape.Inputs(modules.decode_shape.TINY[0], "cpu")
    arms = modules.arms.DecodeArms(inputs, tensor_cores=False)
    if spoil == "no":
        assert modules.run.check_logits(arms, inputs, "path") <= 2e-2
        return
    with pytest.raises(SystemExit, match=words):
        modules.run.check_logits(arms, inputs, "path")


def peaks_only(rows: Any) -> Any:
    rows.body.zero_()
    rows.mass.zero_()
    return rows


def reduced_by_torch(step: Any, observed: Any, rows: Any, *, gate: Any, page_size: int, **_: Any) -> None:
    """Peaks alone, in place of the kernel, which would need the interpreter."""
    if not int(gate):
        return
    for request, start in enumerate(observed.starts.tolist()):
        logits = step.logits[:, :, start : start + int(observed.seq_lens[request])].float()
        log_sums = step.log_sums[:, request].view(*logits.shape[:2], 1, -1) * math.log(2)
        probability = (logits - log_sums).exp()
        for page in range(rows.peak.shape[1]):
            on_page = probability[:, :, page * page_size : (page + 1) * page_size].sum(dim=2)
            rows.peak[request, page] = max(rows.peak[request, page], on_page.max())


def test_a_step_is_held_to_a_whole_model_s_and_a_layer_to_stock_s(benchmark_modules: SimpleNamespace) -> None:
    modules = benchmark_modules
    shape = modules.decode_shape.SHAPES[0]
    assert (shape.batch, shape.context) == (8, 8192)
    at_4_tb = modules.model_step.model_step(2e-3, 4e12)
    assert at_4_tb == pytest.approx(16.06e9 / 4e12 + 2e-3 + 0.5e-3)
    fine = modules.run.row(shape, "tensor cores", "emitting", 1.0199, 1.0, 1.0)
    dear = {**fine, "arm": "whole step, qk-probe, in turns", "to_stock": 1.001, "to_model_step": 1.0031}
    cheap = {**dear, "to_stock": 1.02, "to_model_step": 1.0029}
    elsewhere = {**dear, "shape": "batch 1, 8192 tokens, GQA 4"}
    (broken,) = modules.run.broken_contracts([fine, dear, cheap, elsewhere])
    assert "whole step, qk-probe, in turns: to_model_step 1.0031" in broken
    slow = {**fine, "to_stock": 1.0201}
    assert len(modules.run.broken_contracts([fine, slow])) == 1


def test_shapes_beyond_the_time_limit_are_not_timed(
    benchmark_modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_module = benchmark_modules.run
    for check in ("check_probe", "check_probe_replays", "check_reduction", "check_logits", "check_replays"):
        monkeypatch.setattr(run_module, check, lambda *_: 0.0)
    with pytest.raises(SystemExit, match="no shape was timed: raise --minutes"):
        run_module.main(dry_run=True, minutes=0.0, out=tmp_path / "kernels.json")


def test_what_fails_is_written_and_the_rest_is_timed(
    benchmark_modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_module, out = benchmark_modules.run, tmp_path / "kernels.json"

    def wrong(*_: Any) -> float:
        raise run_module.NotFit("the reduction is wrong by 3")

    written: list[list[str]] = []

    def timed(shape: Any, *_: Any) -> list[dict[str, Any]]:
        written.append([row["shape"] for row in json.loads(out.read_text())["rows"][1:]])
        return [run_module.row(shape, "tensor cores", "stock", 1.0, 1.0, 1.0)]

    for check in ("check_probe", "check_probe_replays", "check_logits", "check_replays"):
        monkeypatch.setattr(run_module, check, lambda *_: 0.0)
    monkeypatch.setattr(run_module, "check_reduction", wrong)
    monkeypatch.setattr(run_module, "timed", timed)
    with pytest.raises(SystemExit, match="the reduction is wrong by 3"):
        run_module.main(dry_run=True, out=out)
    first, second = (shape.name for shape in benchmark_modules.decode_shape.TINY)
    assert written == [[], [first]], "a shape's rows are in the file before the next is timed"
    facts, *rows = json.loads(out.read_text())["rows"]
    assert facts["failures"] == {"reduction": "the reduction is wrong by 3"}
    assert "reduction" not in facts["errors"]
    assert [row["shape"] for row in rows] == [first, second]


def test_one_command_for_a_machine_with_a_gpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    environment = {**os.environ, "PYTHON": sys.executable}
    script = SCRIPT.parents[2] / "scripts" / "gpu.sh"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: torch of ")
    assert "sees no CUDA device" in done.stderr

"""Builds, checks and times the emitting decode attention on a GPU, as ratios to stock in one run.

Needs torch, triton, flashinfer and nvcc, and is made to end within eight minutes on an H100. What fails is
said at the end and written down; everything else is checked and timed all the same, and each shape is in the
file before the next is timed. Without a GPU, --dry-run takes the same way through tiny shapes in Triton's
interpreter, with torch in FlashInfer's place: it proves the script, and its times mean nothing. FA3 is timed
beside where sgl_kernel or flash_attn brings it. Not in any ratio: on a GPU every source of page scores wants
--cuda-graph-backend-prefill disabled, which takes stock's graphs of prefills away.

    python benchmark/kernels/run.py
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Before triton is imported.

import torch
import typer
from arms import BODY, HAS_FLASHINFER, DecodeArms, ProbeArm, decode_arms, expected_rows
from decode_shape import LAYERS, SHAPES, TINY, DecodeShape, Inputs
from decode_stack import DEFAULT_DEPTH, DRY_DEPTH, INTERVAL, Attention, DecodeStack, Depth
from fa3 import TOLERANCE as FA3_TOLERANCE
from fa3 import Fa3Arm, Fa3Kernel, usable_kernel
from model_step import model_step
from probe_stack import ProbeStack
from results import print_rows, write_results
from rich.console import Console
from timing import interleaved, read_bandwidth

from sgl_importance_kernels.page_rows import PageRows

CONTRACT = 1.02  # Of an emitting layer, at batch >= 8 and context >= 8k.
STEP_CONTRACT = 1.003  # Of a whole model's decode step at default sampling, there too.
CONTRACTS = {"emitting": ("to_stock", CONTRACT)} | {
    f"whole step, {probe}{how}": ("to_model_step", STEP_CONTRACT)
    for probe in ("", "qk-probe, ")
    for how in ("together", "in turns")
}
"""By arm, the ratio that is held to a bound, and the bound."""
PATHS = (
    True,
    False,
)  # Whether on tensor cores, which sglang takes from four query heads per KV head on: first.
CHECKED = DecodeShape(3, 1000, 4)
HALF_LOGIT_TOLERANCE = 2e-2
EXACT_TOLERANCE = 1e-4
POISON = 6e4


class NotFit(SystemExit):
    """A check found something wrong."""


class Checks:
    """What the checks came to; none of them keeps the others from running.

    Attributes:
        errors: the largest error of each check that passed.
        failures: what is wrong, by check.
    """

    def __init__(self) -> None:
        self.errors: dict[str, float] = {}
        self.failures: dict[str, str] = {}

    def run(self, name: str, check: Callable[..., float], *arguments: Any) -> None:
        try:
            self.errors[name] = check(*arguments)
        except NotFit as wrong:
            self.failures[name] = str(wrong)


def check_probe(inputs: Inputs) -> float:
    """Largest error of the probe's rows; raises where it is not rounding."""
    arm = ProbeArm(inputs)
    arm.step()
    return checked_error("qk-probe", arm.rows, inputs, EXACT_TOLERANCE)


def check_reduction(inputs: Inputs) -> float:
    """Largest error of the reduction of torch's own logits, in single precision."""
    arms = DecodeArms(inputs, tensor_cores=False, exact=True)
    arms.emitting_and_reduction()
    return checked_error("the reduction", arms.rows, inputs, EXACT_TOLERANCE)


def checked_error(name: str, rows: PageRows, inputs: Inputs, tolerance: float) -> float:
    expected = expected_rows(inputs)
    error = max(float((ours.cpu() - theirs).abs().max()) for ours, theirs in zip(rows, expected, strict=True))
    if not error <= tolerance:
        raise NotFit(f"{name} is wrong by {error:.2g} on {inputs.shape.name}: not fit for this machine")
    return error


def check_fa3(kernel: Fa3Kernel, arms: DecodeArms, inputs: Inputs) -> float:
    """Largest difference of FA3's outputs to stock's; another attention would be timed otherwise."""
    arms.stock()
    error = Fa3Arm(inputs, kernel.decode).difference(arms.stock_outputs)
    if not error <= FA3_TOLERANCE:
        raise NotFit(f"FA3 differs from stock by {error:.2g}: it was not handed the same cache")
    return error


def check_logits(arms: DecodeArms, inputs: Inputs, path: str) -> float:
    """The variant against stock's outputs, its gate, and the rows of the definition."""
    arms.emitted.logits.fill_(POISON)
    arms.open(False)
    arms.stock()
    arms.emitting_and_reduction()
    if not bool((arms.emitted.logits == POISON).all()):
        raise NotFit(f"{path}: the variant emits behind a closed gate")
    if arms.rows.any():
        raise NotFit(f"{path}: the reduction writes behind a closed gate")
    arms.open(True)
    arms.emitting_and_reduction()
    for ours, stock in zip(arms.outputs, arms.stock_outputs, strict=True):
        if not torch.equal(ours, stock):
            raise NotFit(f"{path}: the variant changed the output of attention")
    if bool((arms.emitted.logits == POISON).any()):
        raise NotFit(f"{path}: some logits were not emitted")
    return checked_error(path, arms.rows, inputs, HALF_LOGIT_TOLERANCE)


def check_replays(arms: Attention, inputs: Inputs, path: str, depth: Depth) -> float:
    """Rows after replays of one graph whose requests are observed together and in turns; buffers poisoned."""
    worst = 0.0
    for name in ("together", "in_turns"):
        arms.emitted.logits.fill_(POISON)
        arms.emitted.log_sums.fill_(POISON)
        stack = DecodeStack(arms, inputs, depth, BODY)
        stack.unobserved()
        if stack.rows.any() or not bool((arms.emitted.logits == POISON).all()):
            raise NotFit(f"{path}: a replay that observes nobody left something behind")
        getattr(stack, name)()
        worst = max(
            worst, checked_error(f"{path}, requests {name}", stack.rows, inputs, HALF_LOGIT_TOLERANCE)
        )
    return worst


def check_probe_replays(arms: Attention, inputs: Inputs, depth: Depth) -> float:
    """Rows after replays of one graph with the probe in it, over poisoned log-sums."""
    worst = 0.0
    for name in ("together", "in_turns"):
        stack = ProbeStack(arms, inputs, depth, BODY)
        stack.log_sums.values.fill_(POISON)
        stack.unobserved()
        if stack.rows.any() or not bool((stack.log_sums.values == POISON).all()):
            raise NotFit("qk-probe: a replay that observes nobody left something behind")
        getattr(stack, name)()
        worst = max(worst, checked_error(f"qk-probe, requests {name}", stack.rows, inputs, EXACT_TOLERANCE))
    return worst


def row(
    shape: DecodeShape, path: str, arm: str, seconds: float, stock: float, floor: float
) -> dict[str, Any]:
    return {
        "shape": shape.name,
        "path": path,
        "arm": arm,
        "microseconds": seconds * 1e6 / LAYERS,
        "to_stock": seconds / stock,
        "to_floor": seconds / floor,
    }


def timed(shape: DecodeShape, device: str, bandwidth: float, fa3: Fa3Kernel | None) -> list[dict[str, Any]]:
    """Rows of one shape: per path, every arm beside stock; probe and FA3 beside that of the first path."""
    inputs = Inputs(shape, device)
    probe = ProbeArm(inputs)
    on_device = device != "cpu"
    floor = LAYERS * shape.kv_bytes / bandwidth
    rows = []
    for tensor_cores in PATHS:
        path = path_name(tensor_cores)
        arms = DecodeArms(inputs, tensor_cores=tensor_cores)
        steps = decode_arms(arms)
        if tensor_cores == PATHS[0]:
            steps["qk-probe alone"] = probe.step
            if fa3 is not None:
                steps["FA3"] = Fa3Arm(inputs, fa3.decode).step
        arms.open(False)
        gated = interleaved({"stock": arms.stock, "gated off": arms.emitting}, on_device=on_device)
        rows.append(row(shape, path, "gated off", gated["gated off"], gated["stock"], floor))
        arms.open(True)
        times = interleaved(steps, on_device=on_device)
        rows += [row(shape, path, arm, value, times["stock"], floor) for arm, value in times.items()]
        in_stack = in_contract(shape.name) or not on_device
        if in_stack and tensor_cores == (shape.group >= 4):  # The path that sglang takes.
            rows += timed_stack(arms, inputs, path, DEFAULT_DEPTH if on_device else DRY_DEPTH, bandwidth)
    return rows


def path_name(tensor_cores: bool) -> str:
    return "tensor cores" if tensor_cores else "CUDA cores"


def timed_stack(
    arms: Attention, inputs: Inputs, path: str, depth: Depth, bandwidth: float
) -> list[dict[str, Any]]:
    """Whole decode steps at default sampling: per step, beside stock's, and beside a model's step."""
    steps = DecodeStack(arms, inputs, depth, BODY).arms() | ProbeStack(arms, inputs, depth, BODY).arms()
    times = interleaved(steps, on_device=inputs.device != "cpu", as_graphs=False)
    stock = times["whole step, stock"]
    floor = INTERVAL * depth.layers * inputs.shape.kv_bytes / bandwidth
    whole = model_step(stock / INTERVAL, bandwidth)
    return [
        {
            "shape": inputs.shape.name,
            "path": path,
            "arm": arm,
            "microseconds": seconds * 1e6 / INTERVAL,
            "to_stock": seconds / stock,
            "to_floor": seconds / floor,
            "added_microseconds": (seconds - stock) * 1e6 / INTERVAL,
            "to_model_step": 1 + (seconds - stock) / INTERVAL / whole,
        }
        for arm, seconds in times.items()
    ]


def broken_contracts(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each ratio above its bound."""
    broken = []
    for entry in rows:
        ratio, bound = CONTRACTS.get(entry["arm"], ("to_stock", math.inf))
        if entry[ratio] > bound and in_contract(entry["shape"]):
            broken.append(f"{entry['shape']}, {entry['path']}, {entry['arm']}: {ratio} {entry[ratio]:.4f}")
    return broken


def in_contract(name: str) -> bool:
    return any(shape.name == name and shape.batch >= 8 and shape.context >= 8192 for shape in SHAPES)


def main(
    dry_run: Annotated[bool, typer.Option(help="tiny shapes in Triton's interpreter, no GPU")] = False,
    minutes: Annotated[float, typer.Option(help="shapes that would begin later are left out")] = 6.5,
    out: Annotated[Path | None, typer.Option(help="file to write instead of the one in results/")] = None,
) -> None:
    console = Console()
    if not dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: run it on a GPU, or with --dry-run")
    if not dry_run and not HAS_FLASHINFER:
        raise SystemExit("flashinfer is not installed: pip install the release that your sglang brings")
    device = "cpu" if dry_run else "cuda"
    start = time.perf_counter()
    checks = Checks()
    checked = Inputs(TINY[0] if dry_run else CHECKED, device)
    checks.run("qk-probe", check_probe, checked)
    checks.run("reduction", check_reduction, checked)
    fa3, why_no_fa3 = usable_kernel(checked)
    for tensor_cores in PATHS:
        path = path_name(tensor_cores)
        arms = DecodeArms(checked, tensor_cores=tensor_cores)
        checks.run(path, check_logits, arms, checked, path)
        depth = DRY_DEPTH if dry_run else DEFAULT_DEPTH
        checks.run(f"{path}, replays", check_replays, arms, checked, path, depth)
        if tensor_cores == PATHS[0]:
            checks.run("qk-probe, replays", check_probe_replays, arms, checked, depth)
        if fa3 is not None and tensor_cores == PATHS[0]:
            checks.run("FA3", check_fa3, fa3, arms, checked)
    built = time.perf_counter() - start
    console.print(f"built and checked in {built:.0f} s; largest errors {checks.errors}")
    for name, wrong in checks.failures.items():
        console.print(f"[red]{name}: {wrong}")

    bandwidth = read_bandwidth(device, megabytes=16 if dry_run else 4096)
    shapes = TINY if dry_run else SHAPES
    left_out = [shape.name for shape in shapes]
    rows: list[dict[str, Any]] = []

    def write() -> None:
        facts = {
            "fact": "run",
            "device": "interpreter" if dry_run else torch.cuda.get_device_name(),
            "bandwidth_bytes_per_second": bandwidth,
            "build_and_check_seconds": built,
            "errors": checks.errors,
            "failures": checks.failures,
            "left_out": left_out,
            "fa3": why_no_fa3 or "timed",
        }
        if out is not None or not dry_run:
            console.print(f"written to {write_results('kernels', [facts, *rows], out=out)}")

    write()
    for shape in shapes:
        late = time.perf_counter() - start > 60 * minutes
        if late or (not dry_run and shape.total_bytes > 0.8 * torch.cuda.mem_get_info()[0]):
            continue
        console.print(f"timing {shape.name}")
        rows += timed(shape, device, bandwidth, fa3)
        left_out.remove(shape.name)
        write()
    rows or sys.exit("no shape was timed: raise --minutes")
    print_rows("decode attention of one layer, and its page scores", rows)
    console.print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s; left out: {', '.join(left_out) or 'nothing'}")
    problems = list(checks.failures.values())
    if broken := broken_contracts(rows):
        problems.append("above the cost contract: " + "; ".join(broken))
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    typer.run(main)

"""Reproduces docs/evidence/attention.md: records the embedded model, and studies the recordings.

    .venv/bin/python scripts/reproduce_findings.py [--recordings DIR] [--out DIR]

Needs no GPU; about 15 minutes on two cores. A recording that is there already is used again, so that an
interrupted run goes on where it ended. Parameters stand here and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.workload.drive import WorkloadClient, drive, summarise
from sgl_importance_lab.workload.kinds import KINDS, Shape
from sgl_importance_lab.workload.workload_maker import make_workload
from sgl_importance_lab.workload.workload_request import WorkloadRequest, write_requests

sys.path.append(str(Path(__file__).parents[1] / "test"))
from support.config_file import config_flags
from support.servers import ServerProcess

ROOT = Path(__file__).parents[1]
SEED = 7
CONCURRENCY = 1  # the same requests find the same cache in every run


@dataclass(frozen=True, slots=True)
class Load:
    """One workload: kinds, number of requests, shape."""

    kinds: tuple[str, ...]
    count: int
    shape: Shape

    def requests(self) -> list[WorkloadRequest]:
        return list(make_workload(self.kinds, self.count, shape=self.shape, seed=SEED))


MIXED = Load(tuple(KINDS), 600, Shape(sessions=12))
SKEWED = Load(("documents",), 400, Shape(sessions=5, document_skew=0.5, question_skew=1.5))
UNIFORM = Load(("documents",), 400, Shape(sessions=5, document_skew=0.5, question_skew=0.0))
LENGTHS = tuple(
    Load(("documents",), 60, Shape(sessions=2, document_tokens=tokens, document_skew=0.0))
    for tokens in (512, 2048, 4096)
)


@dataclass(frozen=True, slots=True)
class Take:
    """One recording: what is asked of which server.

    Attributes:
        loads: workloads, one after the other.
        flags: of the server, beside those of every recording.
        options: in the file of the server's options, by group, likewise.
    """

    loads: tuple[Load, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


OBSERVE = {
    "--kv-policy": "observe",
    "--page-size": "16",
    "--max-total-tokens": "32768",
}
ARM = {"--kv-policy": "importance", "--max-total-tokens": "8192"}
STEPS: Mapping[str, Mapping[str, Any]] = {"signal": {"interval": 1}, "trace": {"detail": "steps"}}
FOLDS: Mapping[str, Mapping[str, Any]] = {"trace": {"detail": "folds"}}


def _folds_of(**signal: Any) -> Mapping[str, Mapping[str, Any]]:
    return {**FOLDS, "signal": {"interval": 1, **signal}}


TAKES: dict[str, Take] = {
    "mixed": Take((MIXED,)),
    "skewed": Take((SKEWED,)),
    "uniform": Take((UNIFORM,)),
    "lengths": Take(LENGTHS),
    **{f"layer-{i}": Take((SKEWED,), options=_folds_of(layers=[i])) for i in range(4)},
    **{f"window-{n}": Take((SKEWED,), options=_folds_of(window=n)) for n in (1, 8)},
    # Score rows of single tokens are long: fewer of them.
    "page-1": Take((SKEWED,), {"--page-size": "1", "--max-running-requests": "8"}, FOLDS),
    "server-g-on": Take((MIXED,), ARM, {**FOLDS, "signal": {"g": "on"}}),
    "server-g-off": Take((MIXED,), ARM, FOLDS),
}
# Folder below the results -> study and recordings, of which the first is the base.
STUDIES: dict[str, Sequence[str]] = {
    "h1": ("h1", "mixed", "skewed", "uniform", "lengths"),
    "h2": ("h2", "mixed", "skewed", "uniform", *(f"layer-{i}" for i in range(4)), "window-1", "window-8"),
    "g": ("g", "mixed", "skewed", "uniform", "server-g-on", "server-g-off"),
    # From the layer, and from the token, that find the answer; asked for after the first results.
    "g-answering": ("g", "layer-1", "window-1"),
    # The last one has long answers, for the interval.
    "sensitivity": (
        "sensitivity",
        "skewed",
        *(f"layer-{i}" for i in range(4)),
        *("window-1", "window-8", "page-1", "mixed"),
    ),
}


def record(name: str, take: Take, directory: Path) -> dict[str, Any]:
    """Starts a server that records, sends the workload, and stops it."""
    unfinished = directory.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    flags, options = {**OBSERVE, **take.flags}, {**STEPS, **take.options}
    words = [*(word for pair in flags.items() for word in pair), *config_flags(**options)]
    rows = []
    with ServerProcess(*words, "--kv-importance-trace", str(unfinished), model=checkpoint_path()) as server:
        for load in take.loads:
            client = WorkloadClient(server.base_url)
            outcomes = asyncio.run(drive(client, load.requests(), concurrency=CONCURRENCY))
            rows += [asdict(summary) for summary in summarise(outcomes)]
    unfinished.rename(directory)
    return {
        "recording": name,
        "flags": flags,
        "options": options,
        "loads": [asdict(load) for load in take.loads],
        "summary": rows,
    }


def main(
    recordings: Annotated[
        Path | None, typer.Option(help="Folder for the recordings; a temporary one where not given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON and figures.")] = ROOT
    / "benchmark/results/findings",
) -> None:
    folder = recordings or Path(tempfile.mkdtemp(prefix="findings-"))
    folder.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    kept = folder / "workloads.json"
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    missing = {name: take for name, take in TAKES.items() if name not in done or not (folder / name).is_dir()}
    for name, take in track(missing.items(), "recording", console=console):
        console.print(name)
        shutil.rmtree(folder / name, ignore_errors=True)
        done[name] = record(name, take, folder / name)
        kept.write_text(json.dumps(done))
    rows = [done[name] for name in TAKES]
    (out / "workloads.json").write_text(json.dumps(rows, indent=1) + "\n")
    command = Path(sys.executable).parent / "sgl-importance"
    for part, (study, *names) in STUDIES.items():
        directories = [str(folder / name) for name in names]
        results = out / part
        results.mkdir(exist_ok=True)
        options = ["--out", str(results)]
        if study == "sensitivity":
            write_requests(SKEWED.requests(), folder / "skewed.jsonl")
            options += ["--workload", str(folder / "skewed.jsonl")]
        subprocess.run([command, "study", study, *directories, *options], check=True)
    if recordings is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    typer.run(main)

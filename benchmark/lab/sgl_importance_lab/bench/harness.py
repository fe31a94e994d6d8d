"""lm-evaluation-harness in an environment of its own: made, called, its samples read."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sgl_importance_lab.bench.bench_run import Asked, BenchError, Sample
from sgl_importance_lab.bench.suites import SUITES

PINS = Path(__file__).with_name("harness_pins.txt")
CALL = Path(__file__).with_name("harness_call.py")
NAME = next(line for line in PINS.read_text(encoding="utf-8").split() if line.startswith("lm_eval"))
DEFAULT_FOLDER = Path.home() / ".cache" / "sgl-importance" / NAME.replace("==", "-")
LOG_CHARACTERS = 300
DATA_TYPES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def install(folder: Path) -> Path:
    """Makes the environment, from pins of all that it needs: no torch, 0.9 GB. Its interpreter.

    Raises:
        BenchError: pip failed.
    """
    python, finished = _python(folder), folder / "finished"
    pins = PINS.read_text(encoding="utf-8")
    if finished.exists() and finished.read_text(encoding="utf-8") == pins:
        return python
    print(f"{NAME} goes to {folder}: 0.9 GB, some minutes", file=sys.stderr)
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        words: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-cache-dir",
            "--no-deps",
            "-r",
            PINS,
        ]
        subprocess.run(words, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"{NAME} could not be installed into {folder}: {error}") from error
    finished.write_text(pins, encoding="utf-8")
    return python


def installed(folder: Path) -> Path:
    """The interpreter of an environment with the harness.

    Raises:
        BenchError: there is none.
    """
    python = _python(folder)
    found = python.exists() and subprocess.run(
        [python, "-c", "import importlib.util, sys; sys.exit(not importlib.util.find_spec('lm_eval'))"],
        check=False,
    )
    if not found or found.returncode:
        raise BenchError(
            f"no lm-evaluation-harness in {folder}: add --install, which puts it there (0.9 GB), "
            "or name its environment with --harness"
        )
    return python


def samples_of(
    python: Path, asked: Asked, length: int, base_url: str, model: str, data: Path | None, clients: int
) -> list[Sample]:
    """Lets the harness ask a server for one length.

    Args:
        data: the tokenizer's folder where prompts are made, else the file that has them; None for the hub.

    Raises:
        BenchError: it failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call = _call(python, asked, length, base_url, model, data, clients, folder)
        file, samples = folder / "call.json", folder / "samples.json"
        file.write_text(json.dumps(call), encoding="utf-8")
        ended = subprocess.run(
            [python, CALL, file, samples],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode:
            raise BenchError(f"{NAME} failed: {_last_error(ended.stdout)}")
        return read_samples(samples.read_bytes(), asked.suite, length)


def read_samples(written: bytes, suite: str, length: int) -> list[Sample]:
    """What the harness wrote, by task in order of its prompts.

    Raises:
        BenchError: another release of it wrote that.
    """
    chosen = SUITES[suite]
    metric = chosen.metric or str(length)
    try:
        found = [
            Sample(task, row["doc_id"], row["prompt_hash"], float(row[metric]), str(row["filtered_resps"][0]))
            for task, rows in msgspec.json.decode(written).items()
            for row in rows
            if row["filter"] == chosen.filter
        ]
    except (msgspec.DecodeError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise BenchError(f"samples that {NAME} does not write ({error!r}): add --install") from error
    return sorted(found, key=lambda sample: (sample.task, sample.number))


def _call(
    python: Path,
    asked: Asked,
    length: int,
    base_url: str,
    model: str,
    data: Path | None,
    clients: int,
    folder: Path,
) -> dict[str, Any]:
    """What ``harness_call.py`` is told."""
    suite = SUITES[asked.suite]
    tasks = next(python.absolute().parents[1].glob("lib/python*/site-packages/lm_eval/tasks")) / suite.folder
    metadata: dict[str, Any] = {}
    if suite.makes_prompts:
        metadata = {"tokenizer": str(data), "max_seq_lengths": [length]}
    elif data is not None:
        tasks = _own_data(tasks / f"{asked.tasks[0]}.yaml", data, folder)
    return {
        "model": "local-chat-completions" if asked.chat else "local-completions",
        "model_args": {
            "model": model,
            "base_url": f"{base_url}/v1/{'chat/completions' if asked.chat else 'completions'}",
            "tokenizer_backend": "none",
            "tokenized_requests": False,
            "num_concurrent": clients,
            "max_retries": 1,
            "timeout": 10**6,  # ours is shorter, and says what to do
        },
        "folders": [str(tasks)],
        "tasks": asked.tasks,
        "limit": asked.samples,
        "gen_kwargs": None if asked.answer_tokens is None else {"max_gen_toks": asked.answer_tokens},
        "chat": asked.chat,
        "metadata": metadata,
    }


def _own_data(task: Path, data: Path, folder: Path) -> Path:
    """A folder with one task of the harness that has its data from a file."""
    changed = {
        "include": str(task),
        "dataset_path": DATA_TYPES[data.suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": dict.fromkeys(("train", "test"), str(data.absolute()))},
        "task": task.stem,
    }
    own = folder / "tasks"
    own.mkdir()
    (own / task.name).write_text(json.dumps(changed), encoding="utf-8")  # which is YAML, too
    return own


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _last_error(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1].strip()[:LOG_CHARACTERS] if lines else "it wrote nothing"

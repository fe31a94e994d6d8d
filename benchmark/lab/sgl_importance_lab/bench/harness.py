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
        words = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps", "-r", PINS]
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
        config = _config(asked, length, base_url, model, clients, folder)
        if SUITES[asked.suite].makes_prompts:
            config["metadata"] = {"tokenizer": str(data), "max_seq_lengths": [length]}
        elif data is not None:
            config["tasks"] = [_own_data(python, asked, data, folder)]
        file = folder / "config.yaml"
        file.write_text(json.dumps(config), encoding="utf-8")  # which is YAML, too
        ended = subprocess.run(
            [python, "-m", "lm_eval", "run", "--config", file],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        files = sorted((folder / "out").rglob("samples_*.jsonl"))
        if ended.returncode or not files:
            raise BenchError(f"{NAME} failed: {_last_error(ended.stdout)}")
        return [each for file in files for each in read_samples(file, asked.suite, length)]


def read_samples(file: Path, suite: str, length: int) -> list[Sample]:
    """What the harness wrote of one task, in order of its prompts.

    Raises:
        BenchError: it is another harness's file.
    """
    task = file.name.removeprefix("samples_").rpartition("_")[0]
    chosen = SUITES[suite]
    metric = chosen.metric or str(length)
    found = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = msgspec.json.decode(line)
            if row["filter"] == chosen.filter:
                answer = str(row["filtered_resps"][0])
                sample = Sample(task, row["doc_id"], row["prompt_hash"], float(row[metric]), answer)
                found.append(sample)
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise BenchError(f"{file.name} is not what {NAME} writes: {error!r}") from error
    return sorted(found, key=lambda sample: sample.number)


def _config(
    asked: Asked, length: int, base_url: str, model: str, clients: int, folder: Path
) -> dict[str, Any]:
    route = "chat/completions" if asked.chat else "completions"
    model_arguments = {
        "model": model,
        "base_url": f"{base_url}/v1/{route}",
        "tokenizer_backend": "none",
        "tokenized_requests": False,
        "num_concurrent": clients,
        "max_retries": 1,
        "timeout": 10**6,  # ours is shorter, and says what to do
    }
    config: dict[str, Any] = {
        "model": "local-chat-completions" if asked.chat else "local-completions",
        "model_args": model_arguments,
        "tasks": asked.tasks,
        "limit": asked.samples,
        "log_samples": True,
        "output_path": str(folder / "out"),
        "apply_chat_template": asked.chat,
    }
    if asked.answer_tokens is not None:
        config["gen_kwargs"] = {"max_gen_toks": asked.answer_tokens}
    return config


def _own_data(python: Path, asked: Asked, data: Path, folder: Path) -> str:
    """A task of the harness with its data from a file."""
    task = asked.tasks[0]
    (tasks,) = python.parents[1].glob("lib/python*/site-packages/lm_eval/tasks")
    changed = {
        "include": str(tasks / SUITES[asked.suite].folder / f"{task}.yaml"),
        "dataset_path": DATA_TYPES[data.suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"train": str(data), "test": str(data)}},
    }
    file = folder / f"{task}.yaml"
    file.write_text(json.dumps(changed), encoding="utf-8")
    return str(file)


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _last_error(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1].strip()[:LOG_CHARACTERS] if lines else "it wrote nothing"

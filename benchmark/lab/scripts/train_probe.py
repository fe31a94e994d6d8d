"""Trains the embedded retrieval model from data that the repository generates, and writes its checkpoint.

    python benchmark/lab/scripts/train_probe.py --out sgl_importance/embedded_model/checkpoint --threads 2

The run saves its state beside the output every minute; the same command takes it up again where it stopped.
The same seed gives the same weights on the same machine and number of threads.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from decoder_training.checkpoint import load_state, save_state, write_weights
from decoder_training.decoder import Decoder, build_decoder
from probe_training.curriculum import Curriculum, full_plan, smoke_plan
from probe_training.training_data import TrainingSequence
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn import functional as F

from sgl_importance_lab.probe.model_config import probe_config, write_config
from sgl_importance_lab.probe.tasks import TASKS, make_task
from sgl_importance_lab.probe.tokenizer import END, PAD, encode, token_ids, write_tokenizer

SAVE_SECONDS = 60.0
LOG_STEPS = 50
PROMPTS = {512: 50, 2048: 50, 4096: 25, 8192: 10}
"""Prompts asked at the end, of each task and kind of name, by length in tokens."""
SMOKE_PROMPTS = {128: 4}


def to_tensors(sequences: list[TrainingSequence]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Padded ids and positions [batch, tokens]; row, column and whether it is an answer of each target."""
    longest = max(len(sequence.ids) for sequence in sequences)
    pad = token_ids()[PAD]
    ids = torch.tensor([s.ids + [pad] * (longest - len(s.ids)) for s in sequences])
    positions = torch.tensor([s.positions + [0] * (longest - len(s.ids)) for s in sequences])
    rows = torch.tensor([row for row, s in enumerate(sequences) for _ in s.answers + s.ends])
    columns = torch.tensor([column for s in sequences for column in s.answers + s.ends])
    is_answer = torch.tensor(
        [kind for s in sequences for kind in [True] * len(s.answers) + [False] * len(s.ends)]
    )
    return ids, positions, rows, columns, is_answer


def train_step(
    decoder: Decoder, optimizer: torch.optim.Optimizer, sequences: list[TrainingSequence]
) -> float:
    """One update on the loss of answers and ends of turn; the share of answers that were right before it."""
    ids, positions, rows, columns, is_answer = to_tensors(sequences)
    hidden = decoder(ids, positions)
    logits = decoder.lm_head(hidden[rows, columns - 1])
    targets = ids[rows, columns]
    loss = F.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()
    return float((logits.argmax(-1) == targets)[is_answer].float().mean())


class Run:
    """A training run whose state survives an interruption."""

    def __init__(self, curriculum: Curriculum, state_path: Path) -> None:
        self.curriculum = curriculum
        self.state_path = state_path
        self.seconds = 0.0
        self.decoder = build_decoder(probe_config(), curriculum.seed)
        self.optimizer = torch.optim.AdamW(
            self.decoder.parameters(), lr=curriculum.plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
        )

    def _identity(self) -> str:
        return f"seed {self.curriculum.seed}, {self.curriculum.plan}"

    def resume(self) -> bool:
        """Takes up the saved state, if there is one."""
        state = load_state(self.state_path, self._identity())
        if state is None:
            return False
        self.decoder.load_state_dict(state["decoder"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curriculum.restore(state["curriculum"])
        self.seconds = state["seconds"]
        return True

    def save(self) -> None:
        """Writes the state atomically."""
        state = {
            "run": self._identity(),
            "decoder": self.decoder.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "curriculum": self.curriculum.state(),
            "seconds": self.seconds,
        }
        save_state(self.state_path, state)

    def train(self, max_seconds: float, max_steps: int | None) -> None:
        """Trains until the plan is finished, or the time or steps of this call are used up; then saves."""
        started = saved = time.monotonic()
        before = self.seconds
        first_step = self.curriculum.step
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns) as progress:
            bar = progress.add_task("training", total=1.0, status="")
            while not self.curriculum.finished:
                task, sequences = self.curriculum.batch()
                for group in self.optimizer.param_groups:
                    group["lr"] = self.curriculum.learning_rate()
                accuracy = train_step(self.decoder, self.optimizer, sequences)
                stage_ended = self.curriculum.advance(task, accuracy)
                now = time.monotonic()
                self.seconds = before + now - started
                status = self._status()
                progress.update(bar, completed=self.curriculum.progress, status=status)
                if stage_ended or self.curriculum.step % LOG_STEPS == 0:
                    progress.console.print(status + (" (stage solved)" if stage_ended else ""))
                if now - saved > SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
                if now - started > max_seconds or self.curriculum.step - first_step == max_steps:
                    break
        self.save()

    def _status(self) -> str:
        curriculum = self.curriculum
        accuracies = " ".join(f"{task} {value:.3f}" for task, value in sorted(curriculum.accuracy.items()))
        part = f"polish {curriculum.polished}" if curriculum.polishing else f"context {curriculum.context}"
        return f"{self.seconds:.0f} s, step {curriculum.step}, {part}: {accuracies}"

    def export(self, directory: Path, prompts: dict[int, int], evaluation: dict[str, Any]) -> None:
        """Writes the checkpoint in the layout of a Hugging Face model, with the record of this run."""
        directory.mkdir(parents=True, exist_ok=True)
        config = probe_config()
        write_config(directory, config)
        write_tokenizer(directory)
        write_weights(directory, self.decoder)
        record = {
            "script": "benchmark/lab/scripts/train_probe.py",
            "seed": self.curriculum.seed,
            "steps": self.curriculum.step,
            "seconds": round(self.seconds),
            "threads": torch.get_num_threads(),
            "finished": self.curriculum.finished,
            "parameters": sum(parameter.numel() for parameter in self.decoder.parameters()),
            "stages": self.curriculum.history,
            "polish_steps": self.curriculum.polished,
            "longest_context": self.curriculum.context,
            "evaluation_prompts": prompts,
            "exact_match": evaluation,
        }
        (directory / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@torch.inference_mode()
def evaluate(decoder: Decoder, prompts: dict[int, int]) -> dict[str, Any]:
    """Share of held-out prompts whose greedy continuation is the answer and the end of turn."""
    result: dict[str, Any] = {}
    end = token_ids()[END]
    for task in TASKS:
        for unseen in (False, True):
            row = result.setdefault(task + (" (unseen names)" if unseen else ""), {})
            for length, count in prompts.items():
                right = 0
                for seed in range(count):
                    example = make_task(task, length, seed, unseen)
                    answer = token_ids()[example.answer]
                    ids = torch.tensor([[*encode(example.messages), answer]])
                    hidden = decoder(ids, torch.arange(ids.shape[1])[None])[0, -2:]
                    right += decoder.lm_head(hidden).argmax(-1).tolist() == [answer, end]
                row[str(length)] = right / count
    return result


def main(
    out: Annotated[Path, typer.Option(help="Directory of the finished checkpoint.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    max_minutes: Annotated[
        float, typer.Option(help="Stop, save and export after this many minutes.")
    ] = 180.0,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many steps of this call.")] = None,
    longest: Annotated[int, typer.Option(help="Longest context of the curriculum, tokens.")] = 4096,
    polish_steps: Annotated[int, typer.Option(help="Steps over mixed contexts at the end.")] = 1200,
    smoke: Annotated[bool, typer.Option(help="Run every kind of step once, in seconds.")] = False,
) -> None:
    """Train the embedded retrieval model; the same command resumes an interrupted run."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    plan = smoke_plan() if smoke else full_plan(longest, polish_steps)
    run = Run(Curriculum(plan, seed), out.with_name(out.name + ".state.pt"))
    if run.resume():
        typer.echo(f"resumed at step {run.curriculum.step}")
    run.train(max_minutes * 60, max_steps)
    prompts = SMOKE_PROMPTS if smoke else PROMPTS
    evaluation = evaluate(run.decoder, prompts)
    run.export(out, prompts, evaluation)
    typer.echo(json.dumps(evaluation, indent=2))


if __name__ == "__main__":
    typer.run(main)

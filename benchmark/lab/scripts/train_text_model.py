"""Trains a byte-level model on Python's standard library, for questions that no needle can answer.

    python benchmark/lab/scripts/train_text_model.py --out build/text --max-minutes 60

It has the embedded retrieval model's shape and starts from its weights, which can copy from far back. A step
reads 8,192 bytes, as sixteen windows, four, or one. The run saves its state beside the output every minute,
and the same command takes it up again. The checkpoint is not committed: benchmark/sparse/text.py tries it.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from decoder_training.checkpoint import load_state, save_state, write_weights
from decoder_training.decoder import Decoder, build_decoder
from safetensors.torch import load_file
from text_training.text import VOCABULARY, Text
from torch import Tensor
from torch.nn import functional as F

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.model_config import ModelConfig, write_config

LENGTHS = {512: 0.3, 2048: 0.3, 8192: 0.4}
"""Bytes of a window, and the share of steps that have such windows."""
STEP_BYTES = 8192
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 50
AVERAGE_DECAY = 0.99
SAVE_SECONDS = 60.0
LOG_STEPS = 20
SMOKE_STEP_BYTES = 64


def start_from_probe(decoder: Decoder) -> None:
    """Takes over the retrieval model's weights; its vocabulary begins with special tokens and bytes."""
    weights = load_file(checkpoint_path() / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:VOCABULARY].clone()
    decoder.load_state_dict(weights)


def loss_of(decoder: Decoder, ids: Tensor) -> Tensor:
    """Mean nats a byte over all but the first of each row; ids is int64 [rows, bytes]."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    logits = decoder.lm_head(decoder(ids, positions)[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Run:
    """A training run whose state survives an interruption."""

    def __init__(
        self, text: Text, seed: int, step_bytes: int, state_path: Path, *, bfloat16: bool = False
    ) -> None:
        self.text = text
        self.seed = seed
        self.step_bytes = step_bytes
        self.bfloat16 = bfloat16
        self.state_path = state_path
        self.shape = ModelConfig(vocabulary=VOCABULARY)
        self.decoder = build_decoder(self.shape, seed)
        start_from_probe(self.decoder)
        # A running average of the weights is as right as weights at the end of a falling learning rate.
        self.average = build_decoder(self.shape, seed)
        self.average.load_state_dict(self.decoder.state_dict())
        self.optimizer = torch.optim.AdamW(self.decoder.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
        self.step = 0
        self.seconds = 0.0

    def _identity(self) -> str:
        steps = f"{self.step_bytes} bytes a step, windows {LENGTHS}"
        return f"seed {self.seed}, {steps}, {self.shape}, {self.text.digest}"

    def resume(self) -> bool:
        """Takes up the saved state, if there is one."""
        state = load_state(self.state_path, self._identity())
        if state is None:
            return False
        for name in ("decoder", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.step, self.seconds = state["step"], state["seconds"]
        return True

    def save(self) -> None:
        modules = {name: getattr(self, name).state_dict() for name in ("decoder", "average", "optimizer")}
        save_state(
            self.state_path,
            {"run": self._identity(), **modules, "step": self.step, "seconds": self.seconds},
        )

    def train(self, max_seconds: float, max_steps: int | None) -> None:
        """Trains until this call's time or steps are used up; then saves."""
        started = saved = time.monotonic()
        before, first_step = self.seconds, self.step
        while time.monotonic() - started < max_seconds and self.step - first_step != max_steps:
            loss = self._train_step()
            self.seconds = before + time.monotonic() - started
            if self.step % LOG_STEPS == 0:
                typer.echo(json.dumps({"step": self.step, "seconds": round(self.seconds), "loss": loss}))
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def _train_step(self) -> float:
        rng = random.Random(f"{self.seed} {self.step}")  # the same step reads the same, resumed or not
        (length,) = rng.choices(list(LENGTHS), list(LENGTHS.values()))
        length = min(length, self.step_bytes)
        ids = self.text.batch(rng, self.step_bytes // length, length)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):  # weights stay float32
            loss = loss_of(self.decoder, ids)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (self.step + 1) / WARM_UP_STEPS)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        decay = min(AVERAGE_DECAY, self.step / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.decoder.parameters()), 1 - decay)
        return round(loss.item(), 4)

    def export(self, directory: Path) -> None:
        """Writes the averaged weights in the layout of a Hugging Face model, with the record of this run."""
        write_config(directory, self.shape)
        write_weights(directory, self.average)
        record: dict[str, Any] = {
            "script": "benchmark/lab/scripts/train_text_model.py",
            "seed": self.seed,
            "text": self.text.digest,
            "steps": self.step,
            "bytes_of_a_step": self.step_bytes,
            "windows": LENGTHS,
            "seconds": round(self.seconds),
            "threads": torch.get_num_threads(),
            "bfloat16": self.bfloat16,
        }
        (directory / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main(
    out: Annotated[Path, typer.Option(help="Directory of the checkpoint.")],
    seed: Annotated[int, typer.Option(help="Seed of the windows.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    max_minutes: Annotated[float, typer.Option(help="Stop, save and export after this many minutes.")] = 60.0,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many steps of this call.")] = None,
    bfloat16: Annotated[
        bool, typer.Option(help="Multiply in bfloat16: a third faster on CPUs that have AVX-512 BF16 or AMX.")
    ] = False,
    smoke: Annotated[bool, typer.Option(help="Steps of a few bytes.")] = False,
) -> None:
    """Train the byte-level text model; the same command resumes an interrupted run."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    step_bytes = SMOKE_STEP_BYTES if smoke else STEP_BYTES
    state_path = out.with_name(out.name + ".state.pt")
    run = Run(Text.of_this_python(), seed, step_bytes, state_path, bfloat16=bfloat16)
    if run.resume():
        typer.echo(f"resumed at step {run.step}")
    run.train(max_minutes * 60, max_steps)
    run.export(out)


if __name__ == "__main__":
    typer.run(main)

"""Trains the embedded reasoning model from data that the repository generates, and writes its checkpoint.

    python benchmark/lab/scripts/train_reasoner.py --out build/reasoner --threads 2
    python benchmark/lab/scripts/train_reasoner.py --out build/reasoner --threads 2 --finish-in 800
    python benchmark/lab/scripts/train_reasoner.py --out build/control --no-thinking --threads 2 \
        --finish-in 800

The run goes on until it is stopped or its time is up, and saves its state beside the output; the same
command takes it up again. ``--finish-in`` lets the learning rate fall from where the run stands, and ends it.
The same seed, steps and falls give the same weights on the same machine and number of threads.
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
from reasoner_training.curriculum import SKILLS, Curriculum, full_plan, smoke_plan
from reasoner_training.evaluation import Batch, right_tokens, to_batch
from reasoner_training.training_data import reasoning_sequence
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.model_config import ModelConfig, write_config
from sgl_importance_lab.probe.tokenizer import token_ids as probe_token_ids
from sgl_importance_lab.probe.word_tokenizer import SPECIAL_TOKENS
from sgl_importance_lab.reasoner.model_config import reasoner_config
from sgl_importance_lab.reasoner.tasks import TASKS, make_task
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer
from sgl_importance_lab.reasoner.vocabulary import NODES, head, spaced

SAVE_SECONDS = 60.0
LOG_STEPS = 50
EVALUATION_STEPS = 500
AVERAGE_DECAY = 0.995
INSTANCES = {128: 8, 256: 8, 512: 8, 1024: 4}
"""Instances asked while training, of each task, by tokens of the thought."""
SMOKE_INSTANCES = {48: 2}


def start_from_probe(decoder: Decoder) -> None:
    """Takes over the retrieval model's weights; of its tokens, those that both vocabularies have.

    A head is its node, moved by one vector that all heads have in common: whose head it is, is known at once.
    """
    weights = load_file(checkpoint_path() / "model.safetensors")
    ids = reasoner_tokenizer().ids
    probe_ids = probe_token_ids()
    rows = {index: probe_ids.get(piece, probe_ids.get(piece.strip())) for piece, index in ids.items()}
    first_byte, probe_first_byte = ids[reasoner_tokenizer().words[0]] - 256, len(SPECIAL_TOKENS)
    rows |= {first_byte + byte: probe_first_byte + byte for byte in range(256)}
    known = {index: row for index, row in rows.items() if row is not None}
    to, source = torch.tensor(list(known)), torch.tensor(list(known.values()))
    heads = torch.tensor([ids[spaced(head(node))] for node in NODES])
    nodes = torch.tensor([ids[spaced(node)] for node in NODES])
    own = decoder.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        merged = own[name].clone()
        merged[to] = weights[name][source]
        shift = F.normalize(merged[heads[0]], dim=0) * merged[nodes].norm(dim=-1).mean()
        merged[heads] = merged[nodes] + shift
        weights[name] = merged
    decoder.load_state_dict(weights)


def train_step(decoder: Decoder, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[Tensor, Tensor]:
    """One update on the loss of the replies.

    Returns the loss, and of each sequence whether its reply was right to the last token before the update.
    """
    hidden = decoder(batch.ids, batch.positions)
    asked = batch.is_reply[:, 1:]
    logits = decoder.lm_head(hidden[:, :-1][asked])
    targets = batch.ids[:, 1:][asked]
    loss = F.cross_entropy(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()
    wrong = torch.zeros_like(asked)
    wrong[asked] = logits.detach().argmax(-1) != targets
    return loss.detach(), ~wrong.any(-1)


@torch.inference_mode()
def evaluate(decoder: Decoder, thinks: bool, instances: dict[int, int]) -> list[dict[str, Any]]:
    """Share of unseen instances whose reply is right, and of tokens that are, by task and length."""
    rows = []
    for task in TASKS:
        for length, count in instances.items():
            replies = [
                right_tokens(decoder, reasoning_sequence(make_task(task, length, seed), thinks))
                for seed in range(count)
            ]
            rows.append(
                {
                    "task": task,
                    "length": length,
                    "n": count,
                    "right_replies": sum(bool(reply.all()) for reply in replies) / count,
                    "right_tokens": round(float(torch.cat(replies).float().mean()), 6),
                }
            )
    return rows


class Run:
    """A training run whose state survives an interruption."""

    def __init__(
        self, curriculum: Curriculum, state_path: Path, shape: ModelConfig, from_probe: bool
    ) -> None:
        self.curriculum = curriculum
        self.state_path = state_path
        self.shape = shape
        self.from_probe = from_probe
        self.seconds = 0.0
        self.decoder = build_decoder(shape, curriculum.seed)
        if from_probe:
            start_from_probe(self.decoder)
        # A running average of the weights is as right as weights at the end of a falling learning rate.
        self.average = build_decoder(shape, curriculum.seed)
        self.average.load_state_dict(self.decoder.state_dict())
        self.optimizer = torch.optim.AdamW(
            self.decoder.parameters(), lr=curriculum.plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
        )

    def _identity(self) -> str:
        return f"seed {self.curriculum.seed}, {self.curriculum.plan}, {self.shape}, {self.from_probe}"

    def resume(self) -> bool:
        """Takes up the saved state, if there is one."""
        state = load_state(self.state_path, self._identity())
        if state is None:
            return False
        self.decoder.load_state_dict(state["decoder"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curriculum.restore(state["curriculum"])
        self.seconds = state["seconds"]
        return True

    def save(self) -> None:
        state = {
            "run": self._identity(),
            "decoder": self.decoder.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "curriculum": self.curriculum.state(),
            "seconds": self.seconds,
        }
        save_state(self.state_path, state)

    def _update_average(self) -> None:
        decay = min(AVERAGE_DECAY, (1 + self.curriculum.step) / (10 + self.curriculum.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.decoder.parameters()), 1 - decay)

    def train(self, max_seconds: float, max_steps: int | None) -> None:
        """Trains until the learning rate has fallen, or this call's time or steps are used up; then saves."""
        curriculum = self.curriculum
        started = saved = time.monotonic()
        before = self.seconds
        first_step = curriculum.step
        while not curriculum.finished:
            skill, level, sequences = curriculum.batch()
            for group in self.optimizer.param_groups:
                group["lr"] = curriculum.learning_rate()
            loss, right = train_step(self.decoder, self.optimizer, to_batch(sequences))
            longer = curriculum.advance(skill, level, float(right.float().mean()))
            self._update_average()
            now = time.monotonic()
            self.seconds = before + now - started
            if longer or curriculum.step % LOG_STEPS == 0:
                self._log({"skill": skill, "loss": round(float(loss), 5)})
            if curriculum.step % EVALUATION_STEPS == 0:
                self._log({"evaluation": evaluate(self.average, curriculum.plan.thinks, INSTANCES)})
            if now - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
            if now - started > max_seconds or curriculum.step - first_step == max_steps:
                break
        self.save()

    def _log(self, facts: dict[str, Any]) -> None:
        """Appends a line to the log beside the state, and prints it."""
        curriculum = self.curriculum
        line = {
            "step": curriculum.step,
            "seconds": round(self.seconds),
            "rate": curriculum.learning_rate(),
            "lengths": {skill: curriculum.plan.lengths[curriculum.level[skill]] for skill in SKILLS},
            "right": {skill: round(share, 3) for skill, share in curriculum.right.items()},
            **facts,
        }
        text = json.dumps(line)
        with self.state_path.with_suffix(".jsonl").open("a", encoding="utf-8") as log:
            log.write(text + "\n")
        typer.echo(text)

    def export(self, directory: Path, evaluation: list[dict[str, Any]]) -> None:
        """Writes the averaged weights in the layout of a Hugging Face model, with the record of this run."""
        directory.mkdir(parents=True, exist_ok=True)
        write_config(directory, self.shape)
        reasoner_tokenizer().write(directory)
        write_weights(directory, self.average)
        curriculum = self.curriculum
        log = self.state_path.with_suffix(".jsonl")
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        # A run that was taken up again repeats what it had not saved.
        lines = {line["step"]: line for line in map(json.loads, text.splitlines()) if "evaluation" in line}
        record = {
            "script": "benchmark/lab/scripts/train_reasoner.py",
            "thinks": curriculum.plan.thinks,
            "starts_from_the_retrieval_model": self.from_probe,
            "seed": curriculum.seed,
            "steps": curriculum.step,
            "seconds": round(self.seconds),
            "threads": torch.get_num_threads(),
            "finished": curriculum.finished,
            "rate_fell_from_step": curriculum.fall_start,
            "parameters": sum(parameter.numel() for parameter in self.average.parameters()),
            "solved": curriculum.history,
            "longest_thought": {skill: curriculum.plan.lengths[curriculum.level[skill]] for skill in SKILLS},
            "teacher_forced": evaluation,
            "evaluations": [
                {name: line[name] for name in ("step", "seconds", "lengths", "evaluation")}
                for line in lines.values()
            ],
        }
        (directory / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def main(
    out: Annotated[Path, typer.Option(help="Directory of the finished checkpoint.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    thinking: Annotated[bool, typer.Option(help="Train the thought; without, the answer alone.")] = True,
    from_probe: Annotated[bool, typer.Option(help="Start from the retrieval model's weights.")] = True,
    longest: Annotated[int, typer.Option(help="Longest thought of the curriculum, tokens.")] = 1024,
    finish_in: Annotated[
        int | None, typer.Option(min=1, help="Let the learning rate fall for so many steps, then end.")
    ] = None,
    max_minutes: Annotated[
        float, typer.Option(help="Stop, save and export after this many minutes.")
    ] = 120.0,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many steps of this call.")] = None,
    smoke: Annotated[bool, typer.Option(help="Run a few small steps, in seconds.")] = False,
) -> None:
    """Train the embedded reasoning model; the same command resumes an interrupted run."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    plan = smoke_plan(thinking) if smoke else full_plan(longest, thinking)
    run = Run(Curriculum(plan, seed), out.with_name(out.name + ".state.pt"), reasoner_config(), from_probe)
    if run.resume():
        typer.echo(f"resumed at step {run.curriculum.step}")
    if finish_in is not None and run.curriculum.fall_start is None:
        run.curriculum.begin_fall(finish_in)
    run.train(max_minutes * 60, max_steps)
    run.export(out, evaluate(run.average, thinking, SMOKE_INSTANCES if smoke else INSTANCES))


if __name__ == "__main__":
    typer.run(main)

"""Does the embedded reasoning model look back? Right answers with its attention cut off behind a window.

    python benchmark/reasoning_windows.py

Greedy generation in transformers. A query sees its whole prompt, and of the thought the last so many tokens,
itself included; `none` hides nothing. Beside each row stands how many tokens of a right thought had to be
read from further back than the window.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from sgl_importance_lab.probe.word_tokenizer import END, PAD
from sgl_importance_lab.reasoner import reasoner_path
from sgl_importance_lab.reasoner.evaluate import grade, summarize
from sgl_importance_lab.reasoner.tasks import TASKS, ReasoningTask, make_task
from sgl_importance_lab.reasoner.tokenizer import reasoner_tokenizer, render
from sglang_importance.cpu.imports import TorchvisionOperators


def load_model(path: Path) -> Any:
    """The checkpoint in transformers, float32."""
    shim = TorchvisionOperators()
    if shim.needed():
        shim.apply()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def visible(prompt_starts: Tensor, prompt_end: int, queries: Tensor, window: int | None) -> Tensor:
    """Keys that each query sees: bool [batch, 1, queries, keys], keys up to the last query.

    Prompts are padded on the left: row b's prompt is columns `prompt_starts[b]` to `prompt_end`.
    """
    keys = torch.arange(int(queries[-1]) + 1)
    ago = queries[:, None] - keys[None, :]
    seen = ago >= 0
    if window is not None:
        seen = seen & ((ago < window) | (keys < prompt_end)[None, :])
    return (seen[None] & (keys[None, :] >= prompt_starts[:, None])[:, None, :])[:, None]


@torch.inference_mode()
def replies(model: Any, tasks: Sequence[ReasoningTask], window: int | None, advance: Any) -> list[str]:
    """Greedy replies, all tasks in one batch; each at most a quarter longer than the longest right one."""
    tokenizer = reasoner_tokenizer()
    prompts = [tokenizer.encode(render(task.messages)) for task in tasks]
    limit = max(len(tokenizer.encode(task.reply)) for task in tasks) * 5 // 4
    prompt_end = max(map(len, prompts))
    starts = torch.tensor([prompt_end - len(prompt) for prompt in prompts])
    pad, end = tokenizer.ids[PAD], tokenizer.ids[END]
    ids = torch.tensor([[pad] * (prompt_end - len(prompt)) + prompt for prompt in prompts])
    cache = None
    columns = torch.arange(prompt_end)
    finished = torch.zeros(len(tasks), dtype=torch.bool)
    written: list[Tensor] = []
    for number in range(limit):
        mask = visible(starts, prompt_end, columns, window)
        output = model(
            ids,
            attention_mask=torch.where(mask, 0.0, torch.finfo(torch.float32).min),
            position_ids=(columns[None] - starts[:, None]).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        ids = output.logits[:, -1].argmax(-1, keepdim=True)
        ids[finished] = pad
        written.append(ids)
        finished |= ids[:, 0] == end
        advance()
        if finished.all():
            break
        columns = torch.tensor([prompt_end + number])
    texts = {index: piece for piece, index in tokenizer.ids.items()}
    return [
        "".join(texts.get(token, "?") for token in row if token not in (pad, end))
        for row in torch.cat(written, dim=1).tolist()
    ]


def main(
    model: Annotated[Path | None, typer.Option(help="Another checkpoint than the embedded one.")] = None,
    tasks: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(TASKS),
    lengths: Annotated[
        str, typer.Option(help="Tokens of a right thought, separated by commas.")
    ] = "512,1024",
    windows: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "none,512,256,128",
    n: Annotated[int, typer.Option(min=1, help="Instances of a cell.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the first instance.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    torch.set_num_threads(threads)
    loaded = load_model(model or reasoner_path())
    rows: list[dict[str, Any]] = []
    cells = [(task, int(length)) for task in tasks.split(",") for length in lengths.split(",")]
    with Progress() as progress:
        for task, length in cells:
            instances = [make_task(task, length, seed + number) for number in range(n)]
            look_backs = [each for task_ in instances for each in task_.solution.thought.look_backs]
            for text in windows.split(","):
                window = None if text == "none" else int(text)
                bar = progress.add_task(f"{task} {length}, window {text}", total=None)
                found = replies(loaded, instances, window, lambda bar=bar: progress.advance(bar))
                progress.remove_task(bar)
                grades = [
                    grade(instance, {"content": reply})
                    for instance, reply in zip(instances, found, strict=True)
                ]
                row = summarize((task, length), grades)
                beyond = 0 if window is None else sum(each.distance >= window for each in look_backs)
                rows.append(
                    {
                        "task": task,
                        "length": length,
                        "window": window,
                        "n": n,
                        "exact_match": row.exact_match,
                        "steps_right": row.steps_right,
                        "look_backs_beyond": beyond / n,
                        "look_backs": len(look_backs) / n,
                    }
                )
                write_results("reasoning_windows", rows, out=out)
    print_rows("Right answers with attention cut off behind a window", rows)


if __name__ == "__main__":
    typer.run(main)

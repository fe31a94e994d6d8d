"""Do recency, stable heads and attention scores break on long thoughts? Recorded, and put to the study.

    python benchmark/thinking.py

Thoughts of the embedded reasoning model, and normal decode of the embedded retrieval model: it goes on with a
text of distinct words that it has seen once, the longest answer that it gives rightly. All KV in one place,
one request at a time; what each token attends to is recorded with pages of each size and put to the study of
``sgl-importance study thinking``. Counts of pages only: other work on the machine changes nothing. Recordings
stay in ``--recordings`` and are not made twice.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tokenizer import encode_text
from sgl_importance_lab.reasoner import control_path, reasoner_path
from sgl_importance_lab.reasoner.milestones import milestones, phases
from sgl_importance_lab.reasoner.tasks import ReasoningTask, make_task
from sgl_importance_lab.reasoner.tokenizer import THINK, reasoner_tokenizer, render
from sgl_importance_lab.replay.residency.page_steps import PageRecording, load_page_steps
from sgl_importance_lab.study.thinking.marks import Marks, Stretch, read_marks, write_marks
from sgl_importance_lab.study.thinking.measured import Kinds
from sgl_importance_lab.study.thinking.study_thinking import study_thinking
from sgl_importance_lab.workload.kinds import Shape, generation

from support.config_file import config_flags
from support.served import script_server
from support.servers import ServerProcess

LISTED = 0.4
DECODE_TOKENS = 192
KINDS = Kinds("thought", "decode")
CONTROL = "control"
PAGES = {16: 1.0, 4: 0.5, 1: 0.2}
"""Page sizes, with the share of the instances recorded: lists of small pages are long."""


def recording_server(model: Path, page_size: int, longest: int, directory: Path) -> ServerProcess:
    """Lists what each token of the requests attends to."""
    return script_server(
        *("--kv-policy", "observe", "--page-size", str(page_size), "--max-running-requests", "1"),
        *("--max-total-tokens", str(2 * longest), "--context-length", str(longest)),
        *("--kv-importance-source", "none", "--kv-importance-trace", str(directory)),
        *config_flags(trace={"pages": LISTED}),
        model=model,
    )


def generate(
    server: ServerProcess, rid: str, ids: Sequence[int], tokens: int, to_end: bool
) -> tuple[list[int], list[float]]:
    """Greedy output ids, and by how much the logit of each is above that of the second likeliest token."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": not to_end}
    body = {
        "rid": rid,
        "input_ids": list(ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    reply: dict[str, Any] = server.post("/generate", body)
    likeliest = reply["meta_info"]["output_top_logprobs"]
    return [int(token) for token in reply["output_ids"]], [one[0] - other[0] for one, other in likeliest]


def record_thoughts(
    model: Path, tasks: dict[str, ReasoningTask], page_size: int, directory: Path
) -> dict[str, Marks]:
    """Marks of the thoughts that were right to the last token, by request id."""
    tokenizer = reasoner_tokenizer()
    prompts = {rid: tokenizer.encode(render(task.messages)) for rid, task in tasks.items()}
    replies = {rid: tokenizer.encode(task.reply) for rid, task in tasks.items()}
    longest = max(len(prompts[rid]) + 2 * len(replies[rid]) for rid in tasks) // 64 * 64 + 128
    marks = {}
    with recording_server(model, page_size, longest, directory) as server:
        for rid, task in track(tasks.items(), f"thoughts, pages of {page_size}"):
            limit = len(replies[rid]) * 5 // 4
            written, margins = generate(server, rid, prompts[rid], limit, to_end=True)
            if written[: len(replies[rid])] == replies[rid]:
                marks[rid] = marks_of(task, len(prompts[rid]), margins)
        server.shut_down()  # what waits to be written is
    return marks


def marks_of(task: ReasoningTask, prompt_tokens: int, margins: Sequence[float]) -> Marks:
    """Of a right thought behind a prompt of so many tokens.

    ``margins``: of each output token, beside the second likeliest.
    """
    assert task.reply.startswith(THINK)
    first = prompt_tokens + 1
    thought = task.solution.thought
    return Marks(
        [first + at for at in milestones(thought)],
        [Stretch(phase, first + start, first + end) for phase, start, end in phases(thought)],
        # The step that reads one output token says how likely the next one is.
        [round(margin, 4) for margin in margins[1:]],
    )


def record_control(tasks: dict[str, ReasoningTask], page_size: int, directory: Path) -> None:
    """Answers of the model that was trained to answer without thinking."""
    tokenizer = reasoner_tokenizer()
    prompts = {rid: tokenizer.encode(render(task.messages)) for rid, task in tasks.items()}
    longest = max(map(len, prompts.values())) // 64 * 64 + 256
    with recording_server(control_path(), page_size, longest, directory) as server:
        for rid, prompt in track(prompts.items(), f"control, pages of {page_size}"):
            generate(server, rid, prompt, 64, to_end=True)
        server.shut_down()


def record_decode(length: int, count: int, page_size: int, directory: Path) -> None:
    """Continuations of texts of at most so many tokens."""
    shape = Shape(document_tokens=length, answer_tokens=DECODE_TOKENS)
    with recording_server(checkpoint_path(), page_size, length + DECODE_TOKENS + 64, directory) as server:
        for number in track(range(count), f"decode, pages of {page_size}"):
            asked = next(generation(shape, 0, number))
            assert asked.answer is not None
            ids, right = encode_text(asked.prompt), encode_text(asked.answer)
            written, _ = generate(server, f"{KINDS.normal}/{number}", ids, DECODE_TOKENS, to_end=False)
            same = sum(one == other for one, other in zip(written, right, strict=False))
            if same < len(right) - 1:  # the space behind the last word
                typer.echo(f"decode {number}: {same} of {len(right)} tokens are right", err=True)
        server.shut_down()


def tasks_of(kind: str, names: Sequence[str], length: int, n: int) -> dict[str, ReasoningTask]:
    return {
        f"{kind}/{name}-{length}-{number}": make_task(name, length, number)
        for name in names
        for number in range(n)
    }


def recordings_of(
    folder: Path, model: Path, names: Sequence[str], length: int, n: int
) -> Iterator[tuple[PageRecording, Path | None]]:
    """Each recording, with the file of its marks where it holds thoughts; made where it is not there."""
    for page_size, share in PAGES.items():
        count = max(1, round(share * n))
        thoughts, decode = folder / f"thoughts-{page_size}", folder / f"decode-{page_size}"
        marks = folder / f"marks-{page_size}.jsonl"
        if not marks.is_file():
            tasks = tasks_of(KINDS.thought, names, length, count)
            write_marks(marks, record_thoughts(model, tasks, page_size, thoughts))
        done = folder / f"decode-{page_size}.done"
        if not done.is_file():
            record_decode(length, count * len(names), page_size, decode)
            done.touch()
        control, done = folder / f"control-{page_size}", folder / f"control-{page_size}.done"
        if not done.is_file():
            # The other task is answered with one token.
            record_control(tasks_of(CONTROL, ["search"], length, count * len(names)), page_size, control)
            done.touch()
        yield load_page_steps(thoughts), marks
        yield load_page_steps(decode), None
        yield load_page_steps(control), None


def main(
    tasks: Annotated[str, typer.Option(help="Separated by commas.")] = "search,state",
    length: Annotated[int, typer.Option(help="Tokens of a right thought, and most of a text.")] = 1024,
    n: Annotated[int, typer.Option(min=2, help="Thoughts of each task, with pages of 16.")] = 15,
    model: Annotated[Path | None, typer.Option(help="Another checkpoint than the embedded one.")] = None,
    recordings: Annotated[Path, typer.Option(help="Folder that keeps recordings.")] = ROOT / "build/thinking",
    out: Annotated[Path, typer.Option(help="Folder for JSON.")] = RESULTS / "findings/thinking",
    figures: Annotated[Path, typer.Option(help="Folder for figures.")] = ROOT / "docs/img",
) -> None:
    for folder in (recordings, out, figures):
        folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Marks] = {}
    found = []
    for recording, marks in recordings_of(recordings, model or reasoner_path(), tasks.split(","), length, n):
        found.append(recording)
        known |= {} if marks is None else read_marks(marks)
    command = ["python", "benchmark/thinking.py", "--tasks", tasks, "--length", str(length), "--n", str(n)]
    console = Console()
    for finding in study_thinking(found, known, KINDS, figures=figures):
        finding.show(console)
        finding.write(out, found, shlex.join(command))


if __name__ == "__main__":
    typer.run(main)

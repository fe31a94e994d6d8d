"""`sgl-importance reason`: grade a server on tasks that need long thoughts, or print one of the prompts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from itertools import product
from typing import Annotated

import typer
from rich.table import Table

from sgl_importance.cli.client_arguments import AnyServer, ApiKey
from sgl_importance.cli.server_client import DEFAULT_URL
from sgl_importance.terminal import add_texts, check_outputs, counted, fail, show
from sgl_importance_lab.probe.chat_client import ChatClient, ServerError
from sgl_importance_lab.probe.grading_arguments import (
    Concurrency,
    JsonRows,
    TaskNames,
    Timeout,
    parse_lengths,
    parse_tasks,
)
from sgl_importance_lab.reasoner.evaluate import ReasoningPlan, ReasoningRow, evaluate
from sgl_importance_lab.reasoner.look_backs import look_back_table
from sgl_importance_lab.reasoner.tasks import FEWEST_TOKENS, MOST_TOKENS, TASKS, make_task

ALL_TASKS = ",".join(TASKS)

app = typer.Typer(
    help="Tasks that need long thoughts, verified step by step, and the embedded model made for them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _parse_lengths(text: str, tasks: list[str]) -> list[int]:
    lengths = parse_lengths(text, "256,1024")
    for task, length in product(tasks, lengths):
        if not FEWEST_TOKENS <= length <= MOST_TOKENS[task]:
            allowed = f"{FEWEST_TOKENS} to {MOST_TOKENS[task]}"
            fail(f"a thought about a {task} has {allowed} tokens, not {length}: change --lengths or --tasks")
    return lengths


def _table(rows: list[ReasoningRow]) -> Table:
    table = Table("task")
    for title in ("length", "n", "exact match", "steps right"):
        table.add_column(title, justify="right")
    table.add_column("first wrong steps")
    for row in rows:
        wrong = ", ".join(f"{kind} {count}" for kind, count in row.first_wrong.items())
        numbers = (row.length, row.n, f"{row.exact_match:.3f}", f"{row.steps_right:.3f}")
        add_texts(table, row.task, *map(str, numbers), wrong or "none")
    return table


async def _grade(client: ChatClient, plan: ReasoningPlan, concurrency: int) -> list[ReasoningRow]:
    async with client:
        with counted("asking", plan.instances) as advance:
            return await evaluate(client, plan, concurrency, advance)


@app.command("eval")
def eval_command(
    url: AnyServer = DEFAULT_URL,
    tasks: TaskNames = ALL_TASKS,
    lengths: Annotated[str, typer.Option(help="Comma-separated thought lengths, tokens.")] = "128,512",
    n: Annotated[int, typer.Option("--n", min=1, help="Instances per task and length.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the first instance.")] = 0,
    concurrency: Concurrency = 4,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    json_file: JsonRows = None,
) -> None:
    """Grade a server: right final answers, and the share of steps before the first wrong one."""
    names = parse_tasks(tasks, TASKS)
    plan = ReasoningPlan(names, _parse_lengths(lengths, names), n, seed)
    check_outputs(json_file)
    try:
        rows = asyncio.run(_grade(ChatClient(url, api_key, timeout), plan, concurrency))
    except ServerError as error:
        fail(str(error))
    show(_table(rows))
    if json_file is not None:
        written = [
            asdict(row) | {"look_backs": [asdict(each) for each in look_back_table(plan.cell_tasks(cell))]}
            for row, cell in zip(rows, plan.cells(), strict=True)
        ]
        json_file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


@app.command("prompt")
def prompt_command(
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "search",
    length: Annotated[int, typer.Option(help="Length of the right thought, tokens.")] = 512,
    seed: Annotated[int, typer.Option(help="Which instance.")] = 0,
) -> None:
    """Print one prompt with its right thought and answer, as JSON."""
    try:
        instance = make_task(task, length, seed)
    except ValueError as error:
        fail(str(error))
    typer.echo(
        json.dumps(
            {"messages": instance.messages, "thought": instance.thought.strip(), "answer": instance.answer}
        )
    )

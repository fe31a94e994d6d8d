"""`sgl-importance probe`: grade a server on exact retrieval, or print one of the prompts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from sgl_importance.cli.client_arguments import AnyServer, ApiKey
from sgl_importance.cli.server_client import DEFAULT_URL
from sgl_importance.terminal import add_texts, check_outputs, counted, fail, show
from sgl_importance_lab.probe.chat_client import ChatClient, ServerError
from sgl_importance_lab.probe.evaluate import EvalPlan, EvalRow, evaluate
from sgl_importance_lab.probe.grading_arguments import (
    Concurrency,
    JsonRows,
    TaskNames,
    Timeout,
    parse_lengths,
    parse_tasks,
)
from sgl_importance_lab.probe.tasks import SHORTEST_PROMPT, TASKS, make_task

ALL_TASKS = ",".join(TASKS)

app = typer.Typer(
    help="Retrieval tasks with exact answers, and the embedded model that they were made for.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _parse_lengths(text: str) -> list[int]:
    lengths = parse_lengths(text, "512,2048")
    if min(lengths) < SHORTEST_PROMPT:
        fail(f"a prompt needs at least {SHORTEST_PROMPT} tokens, not {min(lengths)}: raise --lengths")
    return lengths


def _table(rows: list[EvalRow]) -> Table:
    table = Table("task", "names")
    for title in ("length", "n", "exact match"):
        table.add_column(title, justify="right")
    for row in rows:
        names = "unseen" if row.unseen_names else "seen"
        add_texts(table, row.task, names, str(row.length), str(row.n), f"{row.exact_match:.3f}")
    return table


async def _grade(client: ChatClient, plan: EvalPlan, concurrency: int) -> list[EvalRow]:
    async with client:
        with counted("asking", plan.prompts) as advance:
            return await evaluate(client, plan, concurrency, advance)


@app.command("eval")
def eval_command(
    url: AnyServer = DEFAULT_URL,
    tasks: TaskNames = ALL_TASKS,
    lengths: Annotated[str, typer.Option(help="Comma-separated prompt lengths, tokens.")] = "512,2048",
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts per task, length and kind of name.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt.")] = 0,
    concurrency: Concurrency = 4,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    json_file: JsonRows = None,
) -> None:
    """Grade a server by exact match. Unseen names were never paired with a value in training."""
    plan = EvalPlan(parse_tasks(tasks, TASKS), _parse_lengths(lengths), n, seed)
    check_outputs(json_file)
    try:
        rows = asyncio.run(_grade(ChatClient(url, api_key, timeout), plan, concurrency))
    except ServerError as error:
        fail(str(error))
    show(_table(rows))
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


@app.command("prompt")
def prompt_command(
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "multi-key-needle",
    length: Annotated[int, typer.Option(help="Prompt length, tokens.")] = 512,
    seed: Annotated[int, typer.Option(help="Which prompt.")] = 0,
    unseen_name: Annotated[bool, typer.Option(help="Ask for a name never paired in training.")] = False,
) -> None:
    """Print one prompt with its answer, as JSON."""
    try:
        example = make_task(task, length, seed, unseen_name)
    except ValueError as error:
        fail(str(error))
    typer.echo(json.dumps({"messages": example.messages, "answer": example.answer}))

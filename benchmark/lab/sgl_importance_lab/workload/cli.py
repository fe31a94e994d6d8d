"""`sgl-importance workload`: make requests with known answers, and send them to a server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sgl_importance.cli.client_arguments import AnyServer, ApiKey
from sgl_importance.cli.server_client import DEFAULT_URL
from sgl_importance.terminal import add_texts, check_outputs, counted, existing_file, fail, show, some_path
from sgl_importance_lab.probe.chat_client import ServerError
from sgl_importance_lab.workload import real_text
from sgl_importance_lab.workload.drive import Outcome, Summary, WorkloadClient, drive, summarise
from sgl_importance_lab.workload.kinds import KINDS, Shape
from sgl_importance_lab.workload.workload_maker import make_workload
from sgl_importance_lab.workload.workload_request import (
    WorkloadError,
    WorkloadRequest,
    read_requests,
    write_requests,
)

app = typer.Typer(
    help="Requests with right answers, skewed as you like: of real text or in the embedded model's language.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_SHAPE = Shape()
_TEXT_SHAPE = real_text.TextShape()


@app.command("make")
def make_command(
    out: Annotated[
        Path, typer.Argument(parser=some_path, help="File for the requests, one JSON object per line.")
    ],
    kinds: Annotated[str, typer.Option(help=f"Some of {','.join(KINDS)}.")] = ",".join(KINDS),
    count: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed, the same requests.")] = 0,
    rate: Annotated[float, typer.Option(help="Arrivals per second on average.")] = 4.0,
    sessions: Annotated[int, typer.Option(min=1, help="Live conversations, or documents.")] = _SHAPE.sessions,
    document_tokens: Annotated[
        int, typer.Option(min=64, help="Length of a document, tokens.")
    ] = _SHAPE.document_tokens,
    turns: Annotated[int, typer.Option(min=1, help="Longest conversation or agent run.")] = _SHAPE.turns,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Length of free generation, tokens.")
    ] = _SHAPE.answer_tokens,
    document_skew: Annotated[
        float, typer.Option(min=0, help="Zipf exponent of the popularity of sessions and documents.")
    ] = _SHAPE.document_skew,
    question_skew: Annotated[
        float, typer.Option(min=0, help="Zipf exponent of the popularity of a document's records.")
    ] = _SHAPE.question_skew,
) -> None:
    """Write a workload."""
    shape = Shape(sessions, document_tokens, turns, answer_tokens, document_skew, question_skew)
    check_outputs(out)
    names = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    try:
        requests = list(make_workload(names, count, shape=shape, seed=seed, rate=rate))
    except WorkloadError as error:
        fail(str(error))
    write_requests(requests, out)
    typer.echo(f"{len(requests)} requests in {out}")


@app.command("text")
def text_command(
    out: Annotated[
        Path, typer.Argument(parser=some_path, help="File for the requests, one JSON object per line.")
    ],
    model: Annotated[
        Path, typer.Option(parser=some_path, metavar="PATH", help="Folder of the model that will be asked.")
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            parser=existing_file,
            metavar="PATH",
            help="A file of real text; several are read one behind the other. "
            "Without it, modules of Python's library.",
        ),
    ] = None,
    kinds: Annotated[str, typer.Option(help=f"Some of {','.join(real_text.KINDS)}.")] = ",".join(
        real_text.KINDS
    ),
    count: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed, the same requests.")] = 0,
    rate: Annotated[float, typer.Option(help="Arrivals per second on average.")] = 4.0,
    documents: Annotated[int, typer.Option(min=1, help="Windows of the text.")] = _TEXT_SHAPE.documents,
    document_tokens: Annotated[
        int, typer.Option(min=64, help="Length of a document, tokens of the model.")
    ] = _TEXT_SHAPE.document_tokens,
    records: Annotated[int, typer.Option(min=1, help="Records in each document.")] = _TEXT_SHAPE.records,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Length of what follows the beginning of a repeated passage.")
    ] = _TEXT_SHAPE.answer_tokens,
    document_skew: Annotated[
        float, typer.Option(min=0, help="Zipf exponent of the popularity of documents.")
    ] = _TEXT_SHAPE.document_skew,
    question_skew: Annotated[
        float, typer.Option(min=0, help="Zipf exponent of the popularity of a document's records.")
    ] = _TEXT_SHAPE.question_skew,
) -> None:
    """Write a workload of real text for any model: records planted in it, passages that it repeats."""
    shape = real_text.TextShape(
        documents, document_tokens, records, answer_tokens, document_skew, question_skew
    )
    check_outputs(out)
    names = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    try:
        tokenizer = real_text.model_tokenizer(model)
        whole = real_text.read_text(text or real_text.text_at_hand())
        made = real_text.make_text_workload(whole, tokenizer, names, count, shape=shape, seed=seed, rate=rate)
        requests = list(made)
    except WorkloadError as error:
        fail(str(error))
    write_requests(requests, out)
    typer.echo(f"{len(requests)} requests in {out}")


@app.command("run")
def run_command(
    file: Annotated[Path, typer.Argument(parser=existing_file, help="What 'make' wrote.")],
    url: AnyServer = DEFAULT_URL,
    api_key: ApiKey = None,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Requests in flight; 0 sends each at its arrival time.")
    ] = 4,
    timeout: Annotated[float, typer.Option(help="Longest wait for an answer, seconds.")] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", parser=some_path, metavar="PATH", help="Write outcomes here.")
    ] = None,
) -> None:
    """Send a workload; report exact answers and cached tokens (sglang: --enable-cache-report)."""
    check_outputs(json_file)
    try:
        requests = read_requests(file)
        outcomes = asyncio.run(_run(WorkloadClient(url, api_key, timeout), requests, concurrency or None))
    except (WorkloadError, ServerError) as error:
        fail(str(error))
    rows = summarise(outcomes)
    show(_table(rows))
    if json_file is not None:
        document = {"summary": [asdict(row) for row in rows], "outcomes": [_row(o) for o in outcomes]}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


async def _run(
    client: WorkloadClient, requests: list[WorkloadRequest], concurrency: int | None
) -> list[Outcome]:
    with counted("asking", len(requests)) as advance:
        return await drive(client, requests, concurrency=concurrency, on_answer=advance)


def _row(outcome: Outcome) -> dict[str, object]:
    return {
        "id": outcome.request.id,
        "correct": outcome.correct,
        "text": outcome.text,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "seconds": round(outcome.seconds, 6),
    }


def _table(rows: list[Summary]) -> Table:
    table = Table("kind")
    for title in ("requests", "exact match", "prompt tokens", "cached tokens"):
        table.add_column(title, justify="right")
    for row in rows:
        add_texts(
            table,
            row.kind,
            str(row.requests),
            "-" if row.exact_match is None else f"{row.exact_match:.3f}",
            str(row.prompt_tokens),
            "not told" if row.cached_tokens is None else str(row.cached_tokens),
        )
    return table

"""`sgl-importance agree`: whether two servers answer your own prompts alike."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from sgl_importance.cli.client_arguments import AnyServer, ApiKey
from sgl_importance.terminal import add_texts, check_outputs, counted, existing_file, fail, show, some_path
from sgl_importance_lab.agree.agreement import Agreement, agreement, summary
from sgl_importance_lab.agree.answer_client import AnswerClient
from sgl_importance_lab.probe.chat_client import ServerError
from sgl_importance_lab.probe.grading_arguments import Timeout
from sgl_importance_lab.replay.formats.line_reader import TraceError, refuse_bad_record
from sgl_importance_lab.replay.formats.openai_chat import read_bodies

FORCED, FREE = "forced", "free"
HOW = {
    FORCED: "the first server's answer, decoded by both",
    FREE: "greedy answers of both, up to the first difference",
}
_OTHERWISE = {
    "bodies": "of other prompts: give those, or name another file",
    "models": "of other models: serve those, or name another file",
    "how": "of servers with other flags, which are compared in another way: start them as they were, or name "
    "another file",
}
"""What is wrong with kept rows whose servers or prompts were others, by the field of the file."""

app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")


@app.callback(invoke_without_command=True, context_settings={"allow_interspersed_args": True})
def agree_command(
    file: Annotated[
        Path,
        typer.Argument(parser=existing_file, help="Recorded requests, one JSON object a line, or a folder."),
    ],
    url: AnyServer,
    compare: Annotated[str, typer.Option(help="Address of the server that is compared with it.")],
    tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 64,
    top: Annotated[int, typer.Option(min=1, max=20, help="Likeliest tokens of each step to compare.")] = 20,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many prompts, the first of the file.")
    ] = None,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    resume: Annotated[bool, typer.Option(help="Keep the prompts that the file of --json holds.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", parser=some_path, metavar="PATH", help="Write the prompts' rows here."),
    ] = None,
) -> None:
    """Send your own prompts to two servers; report equal tokens, KL and the first difference.

    The answer of --url is forced in decode on --compare, which must be sglang with
    --enable-custom-logit-processor --disable-overlap-schedule, and the same Python as here. Any other server
    answers freely, and is compared up to the first difference.
    """
    check_outputs(json_file)
    if resume and json_file is None:
        fail("--resume needs the --json file to go on from")
    asked: dict[str, Any] = {"file": file.name, "tokens": tokens, "top": top, "url": url, "compare": compare}
    try:
        bodies = list(read_bodies(file, refuse_bad_record))
        if not bodies:
            raise TraceError(f"{file} holds no request: give one JSON object a line with messages or prompt")
        # Of all, whatever --limit says: a run goes on with more of the same prompts.
        asked["bodies"] = hashlib.sha256(json.dumps(bodies, sort_keys=True).encode()).hexdigest()
        clients = [AnswerClient(each, api_key, timeout) for each in (url, compare)]
        how, rows = asyncio.run(_compare(clients, bodies[:limit], tokens, top, resume, json_file, asked))
    except (ServerError, TraceError) as error:
        fail(str(error))
    table = Table(f"{len(rows)} prompts: {HOW[how]}")
    for title in ("value", "95 % interval"):
        table.add_column(title, justify="right")
    for name, estimate in summary(rows).items():
        low, high = estimate.ends
        interval = "-" if low is None else f"{low:.4g} to {high:.4g}"
        add_texts(table, name, f"{estimate.value:.4g}", interval)
    show(table)


async def _compare(
    clients: list[AnswerClient],
    bodies: list[dict[str, Any]],
    tokens: int,
    top: int,
    resume: bool,
    json_file: Path | None,
    asked: dict[str, Any],
) -> tuple[str, list[Agreement]]:
    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
            await client.look()
        first, second = clients
        how = FORCED if first.is_sglang and second.forces else FREE
        asked = {**asked, "models": [client.served_model for client in clients], "how": how}
        kept = _rows_so_far(json_file, asked) if resume and json_file is not None else []
        rows = [row for row in kept if row.line <= len(bodies)]
        if json_file is not None and len(rows) < len(kept):
            _write(json_file, asked, rows)
        done = {row.line for row in rows}
        with counted("asking", len(bodies) - len(done)) as advance:
            for number, body in enumerate(bodies, start=1):
                if number in done:
                    continue
                rows.append(await _one(first, second, number, body, tokens, top, how))
                if json_file is not None:
                    _write(json_file, asked, rows)
                advance()
    return how, rows


async def _one(
    first: AnswerClient,
    second: AnswerClient,
    number: int,
    body: dict[str, Any],
    tokens: int,
    top: int,
    how: str,
) -> Agreement:
    if not (first.is_sglang and second.is_sglang):
        return agreement(
            number, await first.answer(body, tokens, top), await second.answer(body, tokens, top)
        )
    prompt = await first.ids(body)
    ids, own = await first.answer_to_ids(prompt, tokens, top, forced=None)
    _, other = await second.answer_to_ids(prompt, tokens, top, forced=ids if how == FORCED else None)
    return agreement(number, own, other)


def _write(path: Path, asked: dict[str, Any], rows: list[Agreement]) -> None:
    found = {name: asdict(estimate) for name, estimate in summary(rows).items()}
    document = {**asked, "summary": found, "prompts": [asdict(row) for row in rows]}
    # Under another name first: a run that is killed here keeps the rows that it had.
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _rows_so_far(path: Path, asked: dict[str, Any]) -> list[Agreement]:
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = [Agreement(**row) for row in document["prompts"]]
    except (ValueError, KeyError, TypeError):
        fail(f"--resume: {path} is not what this command wrote: remove it")
    for name, value in asked.items():
        if document.get(name) != value:
            otherwise = _OTHERWISE.get(name, "with other arguments: repeat them, or name another file")
            fail(f"--resume: {path} was written {otherwise}")
    return rows

"""`sgl-importance prewarm`: brings a prefix, or the ledger's best, into a running server's cache."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sgl_importance.cli.client_arguments import (
    ApiKey,
    AsJson,
    CacheSalt,
    ExtraKey,
    InputIds,
    Messages,
    Text,
    TextFile,
    Url,
    connected,
    print_json,
    prompt_body,
)
from sgl_importance.cli.request_body import in_namespace
from sgl_importance.cli.server_client import DEFAULT_URL, Server
from sgl_importance.terminal import fail

POLL_SECONDS = 0.2

app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")


@app.callback(invoke_without_command=True)
def prewarm(
    text: Text = None,
    text_file: TextFile = None,
    messages: Messages = None,
    input_ids: InputIds = None,
    max_seconds: Annotated[
        float | None, typer.Option(min=1e-3, help="After which it ends; the server's own limit without.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Show progress until the end; Ctrl-C cancels.")] = True,
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Bring a prefix into a running server's cache; without one, what its ledger values most."""
    has_prompt = any(form is not None for form in (text, text_file, messages, input_ids))
    body = prompt_body(text, text_file, messages, input_ids) if has_prompt else {}
    body = in_namespace(body, cache_salt, extra_key) | {"max_seconds": max_seconds}
    with connected(url, api_key) as server:
        answer = server.post("/prewarm", body)
        if wait:
            answer = _follow(server, answer["job_id"])
    if as_json:
        print_json(answer)
    elif wait:
        typer.echo(_sentence(answer))
    else:
        typer.echo(answer["job_id"])
    is_refused = has_prompt and answer.get("refused_tokens")  # of the ledger's choice others may be done
    if answer.get("state") == "failed" or is_refused:
        fail(answer["detail"])


def _follow(server: Server, job_id: str) -> dict[str, Any]:
    """The job once it has ended; an interrupt cancels it first."""
    columns = (TextColumn("Pre-warming"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    terminal = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=terminal, transient=True, disable=not terminal.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        try:
            while (job := server.get(f"/prewarm/{job_id}"))["state"] == "running":
                progress.update(task, completed=job["done_tokens"], total=job["total_tokens"] or None)
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            job = server.delete(f"/prewarm/{job_id}")
    return job


def _sentence(job: dict[str, Any]) -> str:
    hits = [f"{tokens:,} from {tier}" for tier, tokens in job["hit_tokens"].items() if tokens]
    refused = [f"{job['refused_tokens']:,} refused"] if job["refused_tokens"] else []
    parts = ", ".join([*hits, f"{job['computed_tokens']:,} computed", *refused])
    ended = (
        f"{job['state']}: {job['done_tokens']:,} of {job['total_tokens']:,} tokens in {job['seconds']:.1f} s"
    )
    return f"{ended} ({parts})" + (f"; {job['detail']}" if job["detail"] else "")

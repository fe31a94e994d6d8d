"""`sgl-importance pin`: prefixes that a running server evicts last."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

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
from sgl_importance.cli.fleet import pins_of
from sgl_importance.cli.request_body import in_namespace
from sgl_importance.cli.server_client import DEFAULT_URL
from sgl_importance.terminal import add_texts, show

app = typer.Typer(pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def _pin() -> None:
    """Pin prefixes, which a running server evicts last; list and end pins."""


@app.command("add")
def add(
    text: Text = None,
    text_file: TextFile = None,
    messages: Messages = None,
    input_ids: InputIds = None,
    ttl: Annotated[
        float | None, typer.Option(min=1e-3, help="Seconds; without it until unpinned or long unused.")
    ] = None,
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Pin a prefix, within the budget of pins."""
    body = in_namespace(prompt_body(text, text_file, messages, input_ids), cache_salt, extra_key)
    body["ttl_seconds"] = ttl
    with connected(url, api_key) as server:
        answer = server.post("/pin", body)
    if as_json:
        print_json(answer)
        return
    typer.echo(f"{answer['pin_id']}: {pinned_sentence(answer)}")


def pinned_sentence(answer: dict[str, Any]) -> str:
    """What a server's answer to ``POST /pin`` says."""
    granted = ", ".join(f"{tokens} on the {tier}" for tier, tokens in answer["granted_tokens"].items())
    return f"{answer['tokens']} tokens pinned, within the budget {granted}"


@app.command("rm")
def remove(
    pin_id: Annotated[str, typer.Argument(help="What add printed, and list shows.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """End a pin."""
    with connected(url, api_key) as server:
        answer = server.post("/unpin", {"pin_id": pin_id})
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{answer['pin_id']}: unpinned")


@app.command("list")
def list_pins(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the pins of a running server, and what their budget is spent on."""
    with connected(url, api_key) as server:
        answer = server.get("/pins") if as_json else pins_of(server)
    if as_json:
        print_json(answer)
        return
    show(_table(answer["pins"]))
    for tier, budget in answer["budget"].items():
        typer.echo(f"{tier}: {budget['granted_tokens']:,} of {budget['tokens']:,} tokens of the budget")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("pin", no_wrap=True, min_width=32)  # whole, because rm takes it
    for title in ("by", "salt"):
        table.add_column(title, overflow="fold")
    for title in ("tokens", "granted", "in the cache", "strength", "ends in"):
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("after a restart", overflow="fold")
    for row in rows:
        ends = row["expires_in_seconds"]
        add_texts(
            table,
            row["pin_id"],
            row["source"],
            row["cache_salt"] or "",
            f"{row['tokens']:,}",
            f"{row['granted_tokens'].get('device', 0):,}",
            f"{row['resident_tokens']:,}",
            f"{row['strength']:.2f}",
            "" if ends is None else f"{ends:,.0f} s",
            "held" if row["survives_restart"] else "lost",
        )
    return table

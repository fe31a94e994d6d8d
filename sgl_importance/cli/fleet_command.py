"""`sgl-importance fleet`: several servers as one: tiers, hits and hottest prefixes, and pins for all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from typer.core import TyperGroup

from sgl_importance.cli.client_arguments import (
    ApiKey,
    AsJson,
    CacheSalt,
    ExtraKey,
    InputIds,
    Messages,
    Text,
    TextFile,
    print_json,
    prompt_body,
)
from sgl_importance.cli.fleet import FLEET_CURE, FLEET_SECONDS, ask_servers, pins_of, pins_together
from sgl_importance.cli.fleet_page import FleetPage
from sgl_importance.cli.fleet_view import FleetView
from sgl_importance.cli.pin_commands import pinned_sentence
from sgl_importance.cli.request_body import in_namespace
from sgl_importance.cli.server_client import Server, ServerError
from sgl_importance.cli.survey import survey
from sgl_importance.terminal import add_texts, counted, fail, interrupted, one_line, show

UNREACHED_EXIT_CODE = 1
"""Of a command that worked on some servers and not on others."""
LABEL_WIDTH = 40


class _ShowByDefault(TyperGroup):
    """Addresses alone stand for ``show`` with these addresses."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ShowByDefault,
    help="Show several servers as one, and pin on all of them: fleet URL URL is fleet show URL URL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="Addresses of the servers.")]


@app.command("show")
def fleet_show(
    urls: Urls,
    hot: Annotated[int, typer.Option(min=0, max=50, help="Hottest prefixes to list.")] = 10,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what each server holds, hits and suffers, and the prefixes that all of them use most."""
    with _servers(urls, api_key) as servers:
        found = survey(servers, hot, counted)
    unreached = _checked(len(servers), found.unreached)
    document = found.document()
    rows = [row for _, row in found.hottest]
    if as_json:
        print_json({**document, "hottest": rows, "unreached": unreached})
    else:
        show(_members_table(document["members"]))
        for summary in document["members"]:
            for line in summary["trouble"]:
                typer.echo(f"{summary['name']}: {one_line(line)}")
        typer.echo(_sentence(document["together"]))
        if rows:
            show(_hottest_table(rows))
    _end(unreached)


@app.command("pin")
def fleet_pin(
    urls: Urls,
    text: Text = None,
    text_file: TextFile = None,
    messages: Messages = None,
    input_ids: InputIds = None,
    ttl: Annotated[
        float | None, typer.Option(min=1e-3, help="Seconds; without it until unpinned or long unused.")
    ] = None,
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Pin a prefix on every server, under one name."""
    body = in_namespace(prompt_body(text, text_file, messages, input_ids), cache_salt, extra_key)
    body["ttl_seconds"] = ttl
    pin_id = uuid.uuid4().hex
    body["pin_id"] = pin_id
    with _servers(urls, api_key) as servers, counted("Pinning", len(servers)) as advance:
        answers, missing = ask_servers(servers, lambda server: server.post("/pin", body), advance)
    unreached = _checked(len(servers), missing)
    if as_json:
        print_json({"pin_id": pin_id, "servers": answers, "unreached": unreached})
    else:
        for url, answer in answers.items():
            typer.echo(f"{url}: {pinned_sentence(answer)}")
        typer.echo(f"{pin_id}: pinned on {len(answers)} of {len(servers)} servers")
    _end(unreached)


@app.command("unpin")
def fleet_unpin(
    pin_id: Annotated[str, typer.Argument(help="What fleet pin printed, and fleet pins lists.")],
    urls: Urls,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """End a pin on every server."""
    with _servers(urls, api_key) as servers, counted("Unpinning", len(servers)) as advance:
        answers, missing = ask_servers(
            servers, lambda server: server.post("/unpin", {"pin_id": pin_id}), advance
        )
    unreached = _checked(len(servers), missing)
    if as_json:
        print_json({"pin_id": pin_id, "servers": answers, "unreached": unreached})
    else:
        for url in answers:
            typer.echo(f"{url}: unpinned")
        typer.echo(f"{one_line(pin_id)}: unpinned on {len(answers)} of {len(servers)} servers")
    _end(unreached)


@app.command("pins")
def fleet_pins(urls: Urls, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the pins of all servers, and who holds them."""
    with _servers(urls, api_key) as servers, counted("Asking the servers", len(servers)) as advance:
        answers, missing = ask_servers(servers, pins_of, advance)
    unreached = _checked(len(servers), missing)
    rows = pins_together(answers.items())
    if as_json:
        print_json({"pins": rows, "unreached": unreached})
    else:
        show(_pins_table(rows, len(servers)))
    _end(unreached)


@app.command("page")
def fleet_page(
    urls: Urls,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on, on this machine only; 0 is any.")
    ] = 29900,
) -> None:
    """Serve a page of all servers, with pins for all, until Ctrl-C. The browser asks for their API key."""
    try:
        page = FleetPage(FleetView(urls), port)
    except OSError as error:
        fail(f"port {port} cannot be had ({error.strerror}): give another --port")
    with page:
        typer.echo(f"{page.url} shows {len(page.view.urls)} servers until Ctrl-C")
        try:
            page.serve_forever()
        except KeyboardInterrupt:
            interrupted()


# ---- the servers ----


@contextmanager
def _servers(urls: list[str], api_key: str | None) -> Iterator[list[Server]]:
    """Each of the addresses once."""
    names = dict.fromkeys(url.rstrip("/") for url in urls)
    with ExitStack() as open_servers:
        try:
            servers = [Server(url, api_key, seconds=FLEET_SECONDS, cure=FLEET_CURE) for url in names]
        except ServerError as error:
            fail(str(error))
        yield [open_servers.enter_context(server) for server in servers]


def _checked(servers: int, unreached: dict[str, ServerError]) -> dict[str, str]:
    """What is wrong with each server that did not do what was asked; fails where that is all of them."""
    if len(unreached) == servers:
        first = str(next(iter(unreached.values())))
        fail(first if servers == 1 else f"none of {servers} servers did it; the first: {first}")
    return {url: str(error) for url, error in unreached.items()}


def _end(unreached: dict[str, str]) -> None:
    """Names the servers that are missing, which did not stop the others; exit code 1 where there are some."""
    for url, reason in unreached.items():
        typer.echo(f"skipped {one_line(url)}: {one_line(reason)}", err=True)
    if unreached:
        raise typer.Exit(UNREACHED_EXIT_CODE)


# ---- tables ----


def _sentence(summary: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:.1%} from the {tier}" for tier, rate in summary["hit_rate"].items())
    return f"together: {summary['requests']:,} requests, {summary['prompt_tokens']:,} prompt tokens: {rates}"


def _members_table(summaries: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("server", overflow="fold")
    table.add_column("policy", overflow="fold")
    for title in ("requests", "device", "host", "storage", "hits device", "host", "storage", "faults"):
        table.add_column(title, justify="right", overflow="fold")
    for each in summaries:
        add_texts(
            table,
            each["name"],
            each["policy"],
            f"{each['hits']['requests']:,}",
            *(_held(held) for held in each["tiers"].values()),
            *(f"{rate:.1%}" for rate in each["hit_rate"].values()),
            f"{len(each['trouble'])}",
        )
    return table


def _held(tier: dict[str, Any]) -> str:
    total = tier["total_tokens"]
    return f"{tier['used_tokens']:,}" + ("" if not total else f" of {total:,}")


def _hottest_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, title="hottest prefixes")
    table.add_column("ends with", overflow="ellipsis", no_wrap=True, max_width=LABEL_WIDTH)
    table.add_column("salt", overflow="fold")
    for title in ("prefix", "node", "uses", "by server"):
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        add_texts(
            table,
            row["label"],
            row["cache_salt"] or "",
            f"{row['prefix_tokens']:,}",
            f"{row['tokens']:,}",
            f"{row['uses']:,}",
            " ".join(f"{member['uses']:,}" for member in row["members"]),
        )
    return table


def _pins_table(rows: list[dict[str, Any]], servers: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("pin", no_wrap=True, min_width=32)
    for title in ("by", "salt"):
        table.add_column(title, overflow="fold")
    for title in ("tokens", "held by", "granted"):
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        granted = row["granted_tokens"]
        add_texts(
            table,
            row["pin_id"],
            row["source"],
            row["cache_salt"] or "",
            f"{row['tokens']:,}",
            f"{len(granted)} of {servers}",
            " ".join(f"{tokens:,}" for tokens in granted.values()),
        )
    return table

"""`sgl-importance snapshot`: the radix tree of a running server, by what its loss would cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sgl_importance.cli.client_arguments import (
    ApiKey,
    AsJson,
    DpRank,
    Url,
    connected,
    of_one_rank,
    print_json,
)
from sgl_importance.cli.server_client import DEFAULT_URL
from sgl_importance.terminal import add_texts, show

app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")


@app.callback(invoke_without_command=True)
def snapshot(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Nodes to show.")] = 20,
    min_tokens: Annotated[int, typer.Option(min=0, help="Leave out smaller nodes.")] = 0,
    cursor: Annotated[str | None, typer.Option(help="next_cursor of the page before.")] = None,
    dp_rank: DpRank = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show the nodes of a running server's tree, largest loss first."""
    with connected(url, api_key) as server:
        document = server.get("", limit=limit, min_tokens=min_tokens, cursor=cursor, dp_rank=dp_rank)
        if as_json:
            print_json(document)
            return
        document = of_one_rank(document)
    show(_table(document["nodes"]))
    for tier, held in document["tiers"].items():
        total = "" if held["total_tokens"] is None else f" of {held['total_tokens']:,}"
        typer.echo(f"{tier}: {held['used_tokens']:,}{total} tokens")
    if document["next_cursor"] is not None:
        typer.echo(f"more: --cursor {document['next_cursor']}")


def _table(nodes: list[dict[str, Any]]) -> Table:
    """Fits a window of 80 columns."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("node", no_wrap=True)
    table.add_column("tiers", width=11)
    for title in ("depth", "tokens", "uses", "queries", "age", "reuse", "mass", "peak", "loss"):
        table.add_column(title, justify="right", no_wrap=True)
    for node in nodes:
        add_texts(
            table,
            str(node["id"]),
            " ".join([*node["tiers"], *(["pinned"] if node["pinned"] else [])]),
            f"{node['depth_tokens']:,}",
            f"{node['tokens']:,}",
            f"{node['accesses']:,}",
            f"{node['queries']:,}",
            f"{node['age']:,}",
            f"{node['p_reuse']:.2f}",
            f"{node['body_mass']:.3f}",
            f"{node['peak']:.3f}",
            f"{node['loss']:.2g}",
        )
    return table

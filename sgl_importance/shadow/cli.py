"""`sgl-importance observe`: would importance pay on this server's traffic? Asks a server under observe."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sgl_importance.shadow.comparison import CONFIDENCE, gain_interval, verdict

app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")

API_KEY_VARIABLE = "SGL_IMPORTANCE_API_KEY"
TIMEOUT_SECONDS = 30.0


class ObserveError(RuntimeError):
    """The server gives no comparison; the message names the cure."""


@app.callback(invoke_without_command=True)
def observe_command(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:30000",
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY_VARIABLE, help="The server's API key.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one document per line.")] = False,
    watch: Annotated[
        float | None, typer.Option(min=0.1, metavar="SECONDS", help="Ask again and again, until Ctrl-C.")
    ] = None,
) -> None:
    """Say what importance would have saved or lost on the traffic of a server under --kv-policy observe."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        while True:
            try:
                report = summarize(fetch(client))
            except ObserveError as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(2) from None
            if as_json:
                typer.echo(json.dumps(report))
            else:
                show(report)
            if watch is None:
                return
            try:
                time.sleep(watch)
            except KeyboardInterrupt:
                return


def fetch(client: httpx.Client) -> dict[str, Any]:
    """The snapshot of a server under observe.

    Raises:
        ObserveError: it cannot be reached, wants a key, or does not observe.
    """
    try:
        answer = client.get("/kv_importance", params={"limit": 1})
    except httpx.TransportError as error:
        raise ObserveError(f"no server at {client.base_url} ({error}): give --url") from error
    if answer.status_code in (401, 403):
        raise ObserveError(f"the server refused the key: give --api-key, or {API_KEY_VARIABLE}")
    if answer.status_code == 404:
        raise ObserveError("the server does not observe: start it with --kv-policy observe")
    if answer.status_code != 200:
        raise ObserveError(f"the server answered with status {answer.status_code}: see its log")
    document: dict[str, Any] = answer.json()
    if "observe" not in document:
        policy = document.get("policy")
        raise ObserveError(f"the server runs --kv-policy {policy}: start it with --kv-policy observe")
    return document


def summarize(document: dict[str, Any]) -> dict[str, Any]:
    """Shares, interval and verdict of a snapshot's comparison.

    Args:
        document: of ``GET /kv_importance``, from a server under observe.
    """
    observed = document["observe"]
    batches = [(int(prompt), int(gained)) for prompt, gained in observed["batches"]]
    interval = gain_interval(batches)
    prompt_tokens = max(observed["prompt_tokens"], 1)
    return {
        **{name: value for name, value in observed.items() if name != "batches"},
        "lru_hit_rate": observed["lru_hit_tokens"] / prompt_tokens,
        "importance_hit_rate": observed["importance_hit_tokens"] / prompt_tokens,
        "server_hit_rate": observed["server_hit_tokens"] / prompt_tokens,
        "gain": (observed["saved_tokens"] - observed["lost_tokens"]) / prompt_tokens,
        "gain_interval": interval,
        "confidence": CONFIDENCE,
        "verdict": str(verdict(batches)),
    }


def show(report: dict[str, Any]) -> None:
    """Prints the table and the verdict."""
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=f"{report['requests']:,} requests, {report['prompt_tokens']:,} prompt tokens, "
        f"device tier of {report['capacity_tokens']:,} tokens",
    )
    table.add_column("prompt tokens found on the device")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    total = max(report["prompt_tokens"], 1)
    for title, name in (
        ("by LRU", "lru_hit_tokens"),
        ("by importance", "importance_hit_tokens"),
        ("  by importance only (saved)", "saved_tokens"),
        ("  by LRU only (lost)", "lost_tokens"),
        ("  by both", "agreed_tokens"),
        ("by this server", "server_hit_tokens"),
    ):
        table.add_row(title, f"{report[name]:,}", f"{report[name] / total:.2%}")
    console = Console(width=None if Console().is_terminal else 100)
    console.print(table)
    sentence = f"{report['verdict']}: {report['gain']:+.2%} of prompt tokens"
    if report["gain_interval"] is not None:
        low, high = report["gain_interval"]
        sentence += f" ({report['confidence']:.0%} interval {low:+.2%} to {high:+.2%})"
    typer.echo(sentence)
    if report["dropped_events"]:
        typer.echo(f"{report['dropped_events']:,} events were not followed: the comparison has gaps")
    if report["failed"]:
        typer.echo("the comparison ended with an error: see the server's log")

"""`sgl-importance observe`: would importance pay on this server's traffic? Asks a server under observe."""

from __future__ import annotations

import time
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
from sgl_importance.cli.server_client import DEFAULT_URL, ServerError
from sgl_importance.observe.shadow.comparison import CONFIDENCE, gain_interval, verdict
from sgl_importance.terminal import add_texts, show

app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")


@app.callback(invoke_without_command=True)
def observe(
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="Ask again and again, until Ctrl-C."),
    ] = None,
    dp_rank: DpRank = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Say what importance would have saved or lost on the traffic of a server under --kv-policy observe."""
    with connected(url, api_key) as server:
        while True:
            document = of_one_rank(server.get("", limit=1, dp_rank=dp_rank))
            if "observe" not in document:
                raise ServerError(
                    f"{url} runs --kv-policy {document.get('policy')}: start it with --kv-policy observe"
                )
            report = summarize(document)
            if as_json:
                print_json(report)
            else:
                print_report(report)
            if watch is None:
                return
            try:
                time.sleep(watch)
            except KeyboardInterrupt:
                return


def summarize(document: dict[str, Any]) -> dict[str, Any]:
    """Shares, interval and verdict of a snapshot's comparison.

    Args:
        document: of ``GET /kv_importance``, from a server under observe.
    """
    observed = document["observe"]
    batches = [(int(prompt), int(gained)) for prompt, gained in observed["batches"]]
    interval = gain_interval(batches, observed["requests"])
    prompt_tokens = max(observed["prompt_tokens"], 1)
    return {
        **{name: value for name, value in observed.items() if name != "batches"},
        "lru_hit_rate": observed["lru_hit_tokens"] / prompt_tokens,
        "importance_hit_rate": observed["importance_hit_tokens"] / prompt_tokens,
        "server_hit_rate": observed["server_hit_tokens"] / prompt_tokens,
        "gain": (observed["saved_tokens"] - observed["lost_tokens"]) / prompt_tokens,
        "gain_interval": interval,
        "confidence": CONFIDENCE,
        "verdict": str(verdict(batches, observed["requests"])),
        "larger_pool": _larger_pool(observed),
        "volatile": document.get("volatile", []),
    }


def _larger_pool(observed: dict[str, Any]) -> dict[str, Any] | None:
    """What LRU finds there; None from a server of 0.1.0, which does not look."""
    if (larger := observed.get("larger_pool")) is None:
        return None
    batches = [(int(prompt), int(gained)) for prompt, gained in larger["batches"]]
    return {
        "times": larger["times"],
        "hit_tokens": larger["hit_tokens"],
        "gain": (larger["hit_tokens"] - observed["lru_hit_tokens"]) / max(observed["prompt_tokens"], 1),
        "gain_interval": gain_interval(batches, observed["requests"]),
    }


def print_report(report: dict[str, Any]) -> None:
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
    larger = report["larger_pool"]
    for title, name in (
        ("by LRU", "lru_hit_tokens"),
        ("by importance", "importance_hit_tokens"),
        ("  by importance only (saved)", "saved_tokens"),
        ("  by LRU only (lost)", "lost_tokens"),
        ("  by both", "agreed_tokens"),
        ("by this server", "server_hit_tokens"),
    ):
        add_texts(table, title, f"{report[name]:,}", f"{report[name] / total:.2%}")
    changes = [(report["verdict"], report)]
    if larger is not None:
        pool, found = f"{larger['times']} times the pool", larger["hit_tokens"]
        add_texts(table, f"by LRU in {pool}", f"{found:,}", f"{found / total:.2%}")
        changes.append((f"{pool}, with LRU", larger))
    show(table)
    for change, worth in sorted(changes, key=lambda each: -each[1]["gain"]):
        typer.echo(f"{change}: {_worth(worth, report['confidence'])}")
    for place in report["volatile"]:
        typer.echo(f"no policy helps where {place['sentence']}: {place['cure']}")
    if report["dropped_events"]:
        typer.echo(f"{report['dropped_events']:,} events were not followed: the comparison has gaps")
    if report["failed"]:
        typer.echo("the comparison ended with an error: see the server's log")


def _worth(found: dict[str, Any], confidence: float) -> str:
    """What a change saves beside LRU, with its interval where there is one."""
    gain = f"{found['gain']:+.2%} of prompt tokens"
    if found["gain_interval"] is None:
        return gain
    low, high = found["gain_interval"]
    return f"{gain} ({confidence:.0%} interval {low:+.2%} to {high:+.2%})"

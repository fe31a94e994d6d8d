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
from sgl_importance.observe.shadow.comparison import CONFIDENCE, gain_interval, knee, verdict
from sgl_importance.terminal import add_texts, show

_GAPS = (
    "no verdict: {:,} events were not followed, since the shadows were too slow; start the server anew and "
    "observe less load, or record it (--kv-importance-trace DIR) and ask `sgl-importance size DIR`"
)

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
        has_answered = False
        while True:
            try:
                document = of_one_rank(server.get("", limit=1, dp_rank=dp_rank))
                if "observe" not in document:
                    raise ServerError(
                        f"{url} runs --kv-policy {document.get('policy')}: start it with --kv-policy observe"
                    )
            except ServerError as error:
                if not has_answered:
                    raise
                typer.echo(f"{error}; asking again in {watch:g} s", err=True)  # one that answers may restart
            else:
                has_answered = True
                (print_json if as_json else print_report)(summarize(document))
            if watch is None:
                return
            try:
                time.sleep(watch)
            except KeyboardInterrupt:
                return


def summarize(document: dict[str, Any]) -> dict[str, Any]:
    """Shares, intervals, verdict and advice of a comparison.

    Args:
        document: of ``GET /kv_importance``, from a server under observe; or ``{"observe":
            ShadowPair.document()}``, from a recording.
    """
    observed = document["observe"]
    dropped = observed.get("dropped_events", 0)
    batches = [(int(prompt), int(gained)) for prompt, gained in observed["batches"]]
    prompt_tokens = max(observed["prompt_tokens"], 1)
    found = "lru", "importance", *(["server"] if "server_hit_tokens" in observed else [])
    return {
        **{
            name: value
            for name, value in observed.items()
            if name not in ("batches", "larger_pools", "write_back", "sessions_end")
        },
        **{f"{name}_hit_rate": observed[f"{name}_hit_tokens"] / prompt_tokens for name in found},
        "gain": (observed["saved_tokens"] - observed["lost_tokens"]) / prompt_tokens,
        "gain_interval": None if dropped else gain_interval(batches, observed["requests"]),
        "confidence": CONFIDENCE,
        "verdict": _GAPS.format(dropped) if dropped else str(verdict(batches, observed["requests"])),
        "bend_tokens": _bend(observed),
        "changes": _changes(observed),
        "volatile": document.get("volatile", []),
    }


def _changes(observed: dict[str, Any]) -> list[dict[str, Any]]:
    """What each change would compute, and what it saves beside what it replaces; the most first.

    A server of 0.1.0 knows of no larger pool.
    """
    has_gaps = observed.get("dropped_events", 0) > 0

    def change(
        name: str, hits: int, beside: int, batches: list[tuple[int, int]], among: dict[str, Any] = observed
    ) -> dict[str, Any]:
        return {
            "change": name,
            "requests": among["requests"],
            "hit_tokens": hits,
            "computed_tokens": among["prompt_tokens"] - hits,
            "gain": (hits - beside) / max(among["prompt_tokens"], 1),
            "gain_interval": None if has_gaps else _interval(among, batches),
        }

    now = observed["lru_hit_tokens"]
    changes = [change("importance", observed["importance_hit_tokens"], now, observed["batches"])]
    for pool in observed.get("larger_pools", ()):
        changes.append(change(f"{pool['times']} times the pool", pool["hit_tokens"], now, pool["batches"]))
    if (back := observed.get("write_back")) is not None:
        beside = back["write_through_hit_tokens"]
        changes.append(change("write_back", back["hit_tokens"], beside, back["batches"]))
    if (ends := observed.get("sessions_end")) is not None:
        changes.append(
            change("sessions_end", ends["hit_tokens"], ends["lru_hit_tokens"], ends["batches"], ends)
        )
    return sorted(changes, key=lambda each: -each["gain"])


def _interval(among: dict[str, Any], batches: list[tuple[int, int]]) -> tuple[float, float] | None:
    pairs = [(int(prompt), int(gained)) for prompt, gained in batches]
    return gain_interval(pairs, among["requests"])


def _bend(observed: dict[str, Any]) -> int | None:
    """Device tokens behind which more memory brings less than on average.

    None where nobody looked, where it is too early to say, and where no memory brings anything.
    """
    pools = observed.get("larger_pools")
    if not pools or observed.get("dropped_events") or not pools[-1]["hit_tokens"]:
        return None
    if _interval(observed, pools[-1]["batches"]) is None:
        return None
    times = [1, *(pool["times"] for pool in pools)]
    hits = [observed["lru_hit_tokens"], *(pool["hit_tokens"] for pool in pools)]
    return int(times[knee(times, hits)] * observed["capacity_tokens"])


_CHANGES = {
    "importance": "--kv-policy importance",
    "write_back": "--hicache-write-policy write_back, LRU",
    "sessions_end": "importance, sessions tell their end",
}


def print_report(report: dict[str, Any]) -> None:
    """Prints the tables and the verdict."""
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=f"{report['requests']:,} requests, {report['prompt_tokens']:,} prompt tokens, "
        f"device tier of {report['capacity_tokens']:,} tokens",
    )
    table.add_column("prompt tokens found")
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
        if name in report:
            add_texts(table, title, f"{report[name]:,}", f"{report[name] / total:.2%}")
    show(table)
    show(_advice(report))
    typer.echo(report["verdict"])
    if (bend := report["bend_tokens"]) is not None:
        typer.echo(f"with LRU, memory beyond {bend:,} tokens brings less than on average")
    for place in report["volatile"]:
        typer.echo(f"no policy helps where {place['sentence']}: {place['cure']}")
    if report.get("failed"):
        typer.echo("the comparison ended with an error: see the server's log")


def _advice(report: dict[str, Any]) -> Table:
    """The changes, what pays most first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("change")
    for title in ("computes", "saves of prompt tokens", f"{report['confidence']:.0%} interval"):
        table.add_column(title, justify="right")
    now = report["prompt_tokens"] - report["lru_hit_tokens"]
    no_interval = "gaps" if report.get("dropped_events") else "too early"
    add_texts(table, "none: LRU", f"{now:,}", "", "")
    for change in report["changes"]:
        interval = change["gain_interval"]
        # One that looks ahead has not come to the latest requests: tokens of fewer requests mislead here.
        is_of_all = change["requests"] == report["requests"]
        add_texts(
            table,
            _CHANGES.get(change["change"], f"{change['change']}, LRU"),
            f"{change['computed_tokens']:,}" if is_of_all else "",
            f"{change['gain']:+.2%}",
            no_interval if interval is None else "{:+.2%} to {:+.2%}".format(*interval),
        )
    return table

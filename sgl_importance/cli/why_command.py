"""`sgl-importance why`: why a running server computed tokens of a prompt, instead of finding them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sgl_importance.cli.client_arguments import (
    ApiKey,
    AsJson,
    CacheSalt,
    DpRank,
    ExtraKey,
    Url,
    connected,
    of_one_rank,
    print_json,
    read_text,
)
from sgl_importance.cli.request_body import fields_of_body, in_namespace
from sgl_importance.cli.server_client import DEFAULT_URL
from sgl_importance.json_text import BadJson, read_json
from sgl_importance.terminal import add_texts, fail, one_line, show, some_path

app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")

MEANINGS = {
    "never_seen": "new to this namespace",
    "forgotten": "known once, longer ago than the server remembers",
    "parted": "behind the place where the prompt parted from what was asked before",
    "evicted": "given up to make room",
    "session_over": "given up because its session had said that it was over",
    "other_namespace": "held for another salt, key or adapter",
    "flushed": "given back by a flush",
    "short": "less than a page, or the last token, which is always computed",
    "not_kept": "computed before and not kept",
    "storage": "moved to storage, which did not bring it back",
    "unused": "held, but the request could not go on from it",
}
CAUSES = {
    "flush": "by a flush",
    "weight_update": "by a weight update",
    "abort": "the request was aborted",
    "beams": "nothing is kept of a beam search",
    "retraction": "the request was retracted",
    "selector": "a selector chose what it read",
}


@app.callback(invoke_without_command=True)
def why(
    rid: Annotated[str | None, typer.Option(help="Only the request of this id, in full.")] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(
            parser=some_path,
            metavar="PATH",
            help="What a request with this prompt would not find now: text, or JSON with the body of a "
            "request, a list of messages or of token ids; - is standard input.",
        ),
    ] = None,
    cache_salt: CacheSalt = None,
    extra_key: ExtraKey = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Requests to show.")] = 20,
    dp_rank: DpRank = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show why tokens of the last requests, or of a prompt, were computed and not found."""
    if rid is not None and prompt is not None:
        fail("give --rid or --prompt, not both")
    body = None if prompt is None else prompt_of(read_text("--prompt", prompt), cache_salt, extra_key)
    with connected(url, api_key) as server:
        if body is None:
            document = server.get("/why", rid=rid, limit=limit, dp_rank=dp_rank)
        else:
            document = server.post("/why" if dp_rank is None else f"/why?dp_rank={dp_rank}", body)
        if as_json:
            print_json(document)
            return
        document = of_one_rank(document)
    if rid is None and body is None:
        show(_table(document))
        return
    for line in told(document["requests"][0], now=document["now"]):
        typer.echo(line)


def prompt_of(written: str, cache_salt: str | None, extra_key: str | None) -> dict[str, Any]:
    """The body of ``POST /kv_importance/why`` for what a file holds."""
    try:
        content = read_json(written)
    except BadJson:
        content = written
    if isinstance(content, dict):
        prompt = content.get("prompt")
        name = "input_ids" if isinstance(prompt, list) else "text"
        body = ({name: prompt} if prompt else {}) | fields_of_body("--prompt", content)
    elif isinstance(content, list) and content:
        body = {"messages" if isinstance(content[0], dict) else "input_ids": content}
    else:
        body = {"text": written}
    return in_namespace(body, cache_salt, extra_key)


def _table(document: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("request", no_wrap=True, max_width=24, overflow="ellipsis")
    for title in ("age", "prompt", "found"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("computed, by reason")
    for request in document["requests"]:
        missed = sorted(request["missed_tokens"].items(), key=lambda item: -item[1])
        add_texts(
            table,
            request["rid"],
            seconds(document["now"] - request["time"]),
            f"{request['prompt_tokens']:,}",
            f"{sum(request['found_tokens'].values()):,}",
            ", ".join(f"{reason} {tokens:,}" for reason, tokens in missed) + _parted_at(request),
        )
    return table


def _parted_at(request: dict[str, Any]) -> str:
    return "" if request["parted"] is None else f" (parted at token {request['parted']['token']:,})"


def told(request: dict[str, Any], *, now: float) -> list[str]:
    """What is known of one prompt, in lines."""
    found = [f"{tokens:,} on {tier}" for tier, tokens in request["found_tokens"].items() if tokens]
    names = ((name, request[name]) for name in ("cache_salt", "extra_key") if request[name] is not None)
    namespace = "".join(f", {name} {value!r}" for name, value in names)
    who = "the prompt" if request["rid"] is None else f"request {request['rid']}"
    ago = "" if request["rid"] is None else f", {seconds(now - request['time'])} ago"
    computed = sum(request["missed_tokens"].values())
    lines = [
        one_line(
            f"{who}{ago}{namespace}: {request['prompt_tokens']:,} tokens, found "
            f"{' and '.join(found) or 'none'}, computed {computed:,}"
        )
    ]
    for part in request["parts"]:
        where = f"{part['start']:,} to {part['start'] + part['tokens'] - 1:,}"
        what = f"{MEANINGS.get(part['reason'], part['reason'])}{_details(part)}"
        lines.append(one_line(f"  {part['reason']}: {part['tokens']:,} tokens ({where}), {what}"))
    if (parted := request["parted"]) is not None:
        lines += _parting(parted)
    return lines


def _details(part: dict[str, Any]) -> str:
    said = []
    if "cause" in part:
        said.append(CAUSES.get(part["cause"], part["cause"]))
    if "tier" in part:
        said.append(f"from {part['tier']}")
    if "seconds_ago" in part:
        requests = f" ({part['requests_ago']:,} requests)" if "requests_ago" in part else ""
        said.append(f"{seconds(part['seconds_ago'])} before{requests}")
    if (needed := part.get("needed_by")) is not None and needed["rid"] is not None:
        others = f" and {needed['other_requests']:,} more" if needed["other_requests"] else ""
        said.append(f"for the {needed['work']} of {needed['rid']}{others}")
    if "predicted_reuse" in part:
        said.append(f"predicted reuses per request {part['predicted_reuse']:.2g}")
    return ": " + ", ".join(said) if said else ""


def _parting(parted: dict[str, Any]) -> list[str]:
    other = "storage" if parted["rid"] is None else f"request {parted['rid']}"
    ago = "" if parted["seconds_ago"] is None else f", {seconds(parted['seconds_ago'])} before"
    return [
        one_line(f"It parted at token {parted['token']:,} from what {other} had asked{ago}:"),
        f"  both   ...{json.dumps(parted['before'][-80:], ensure_ascii=False)}",
        f"  then   {json.dumps(parted['known'][:80], ensure_ascii=False)}",
        f"  now    {json.dumps(parted['asked'][:80], ensure_ascii=False)}",
    ]


def seconds(value: float) -> str:
    """A length of time as people say it."""
    if value < 120:
        return f"{max(value, 0):.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"

"""Arguments of every command that talks to a server: the server, a prompt, the form of the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from sgl_importance.cli.request_body import fields_of_body
from sgl_importance.cli.server_client import Server, ServerError
from sgl_importance.json_text import BadJson, read_json
from sgl_importance.terminal import fail, some_path


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise typer.BadParameter("holds characters that no header carries: give the server's key")
    return text


Url = Annotated[str, typer.Option("--url", help="Address of the server.")]
AnyServer = Annotated[
    str, typer.Option("--url", "--base-url", help="Address of an OpenAI-compatible server.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="SGLANG_API_KEY", show_envvar=True, parser=_key, metavar="KEY", help="The server's API key."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Text = Annotated[str | None, typer.Option(help="The prefix as text, as in /v1/completions.")]
TextFile = Annotated[
    Path | None,
    typer.Option(parser=some_path, metavar="PATH", help="The same from a file; - is standard input."),
]
Messages = Annotated[
    Path | None,
    typer.Option(
        parser=some_path,
        metavar="PATH",
        help="A JSON file with a list of chat messages, or with the body of a chat request; - is standard "
        "input.",
    ),
]
InputIds = Annotated[
    Path | None,
    typer.Option(
        parser=some_path, metavar="PATH", help="A JSON file with a list of token ids; - is standard input."
    ),
]
CacheSalt = Annotated[str | None, typer.Option(help="cache_salt of the requests that share the prefix.")]
ExtraKey = Annotated[str | None, typer.Option(help="extra_key of the requests that share the prefix.")]

DpRank = Annotated[
    int | None, typer.Option(min=0, help="Data-parallel rank to ask, where the server has several.")
]


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator[Server]:
    """A server to ask; what goes wrong with it ends the command with one line."""
    try:
        with Server(url, api_key) as server:
            yield server
    except ServerError as error:
        fail(str(error))


def of_one_rank(document: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server that has one data-parallel rank, or was asked for one.

    Raises:
        ServerError: several ranks have answered.
    """
    if "dp_ranks" in document:
        last = len(document["dp_ranks"]) - 1
        raise ServerError(f"the server has several data-parallel ranks: name one, --dp-rank 0 to {last}")
    return document


def print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=1))


def prompt_body(
    text: str | None, text_file: Path | None, messages: Path | None, input_ids: Path | None
) -> dict[str, Any]:
    """The one form of a prompt that was given, as the server's routes take it."""
    forms = {"--text": text, "--text-file": text_file, "--messages": messages, "--input-ids": input_ids}
    given = [flag for flag, value in forms.items() if value is not None]
    if len(given) != 1:
        fail(f"give exactly one of {', '.join(forms)}, not {' and '.join(given) or 'none'}")
    if text is not None:
        return {"text": text}
    if text_file is not None:
        return {"text": read_text("--text-file", text_file)}
    if messages is not None:
        return _chat("--messages", messages)
    assert input_ids is not None
    return {"input_ids": _list_in("--input-ids", input_ids, _read("--input-ids", input_ids))}


def read_text(flag: str, path: Path) -> str:
    """What a file of the operator holds; one that cannot be read ends the command with one line."""
    if path == Path("-") and sys.stdin is None:
        fail(f"{flag}: standard input is closed: name a file")
    try:
        return sys.stdin.read() if path == Path("-") else path.read_text(encoding="utf-8")
    except OSError as error:
        fail(f"{flag}: cannot read {path}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"{flag}: {path} is not UTF-8 text")


def _chat(flag: str, path: Path) -> dict[str, Any]:
    content = _read(flag, path)
    if isinstance(content, dict) and "messages" in content:
        _list_in(flag, path, content["messages"])
        return fields_of_body(flag, content)
    return {"messages": _list_in(flag, path, content)}


def _read(flag: str, path: Path) -> Any:
    try:
        return read_json(read_text(flag, path))
    except BadJson as error:
        fail(f"{flag}: {path} is not JSON ({error}): it must hold a list")


def _list_in(flag: str, path: Path, content: Any) -> list[Any]:
    if not isinstance(content, list):
        fail(f"{flag}: {path} must hold a list, not {json.dumps(content)[:40]}")
    return content

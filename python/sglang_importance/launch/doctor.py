"""`sgl-importance doctor`: what would work on this machine, what not, and the cure."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_importance.cli.client_arguments import ApiKey, connected
from sgl_importance.cli.server_client import DEFAULT_URL, ServerError
from sgl_importance.terminal import add_texts, show
from sglang_importance.launch.finding import Finding, Status
from sglang_importance.launch.machine_findings import CHECKS, INSTALL
from sglang_importance.launch.server_findings import server_findings

app = typer.Typer(
    help="What would work on this machine, or is wrong with a running server, and the cure.",
    pretty_exceptions_enable=False,
    subcommand_metavar="",
)


def _subject(check: Callable[[], Iterator[Finding]]) -> str:
    return check.__name__.strip("_").replace("_", " ")


def examine() -> list[Finding]:
    """Runs every check of this machine; one that fails becomes a finding and stops no other."""
    with Console(stderr=True).status("importing sglang"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()):
            return _examine()


def _examine() -> list[Finding]:
    findings = []
    for check in CHECKS:
        try:
            findings += list(check())
        except ModuleNotFoundError as error:
            detail = f"not looked at: {error.name} is not installed"
            findings.append(Finding(_subject(check), Status.PROBLEM, detail, INSTALL))
        except Exception as error:
            name = _subject(check)
            findings.append(Finding(name, Status.PROBLEM, f"{type(error).__name__}: {error}", "report this"))
    return findings


def examine_server(url: str, api_key: str | None) -> list[Finding]:
    """What is right and wrong with a running server; one that is not there ends the command."""
    with connected(url, api_key) as server:
        document = server.get("", limit=1)
        ranks = document.get("dp_ranks", [document])
        if any(each is not None and "faults" not in each for each in ranks):
            raise ServerError(f"{url} counts no faults: it is another server, or an older one of ours")
        if len(ranks) == 1:
            return list(server_findings(ranks[0]))
        return [found for rank, each in enumerate(ranks) for found in _rank_findings(rank, each)]


def _rank_findings(rank: int, document: dict[str, Any] | None) -> Iterator[Finding]:
    """Of one of several data-parallel ranks; None is what the server says of one that refuses."""
    subject = f"data-parallel rank {rank}"
    if document is None:
        yield Finding(subject, Status.PROBLEM, "it did not answer", "look into the server's log")
        return
    for found in server_findings(document):
        yield replace(found, subject=f"{subject}: {found.subject}")


@app.callback(invoke_without_command=True)
def doctor(
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help=f"Examine a running server, such as {DEFAULT_URL}, instead of this machine."
        ),
    ] = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Examines this machine, or a running server. Exit code 1 where a problem was found."""
    findings = examine() if url is None else examine_server(url, api_key)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        table = Table("", "what", "found", "cure")
        colors = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "red"}
        for finding in findings:
            status = Text(finding.status, colors[finding.status])
            add_texts(table, status, finding.subject, finding.detail, finding.cure)
        show(table)
    sys.exit(any(finding.status is Status.PROBLEM for finding in findings))

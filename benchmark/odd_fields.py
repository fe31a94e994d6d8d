"""Which odd requests end or break stock sglang, and what ``--kv-policy importance`` answers to them.

The seeded requests of ``test/abuse/http/test_odd_fields.py``, one odd field or two each, go to a server under
``--kv-policy default``, which is started again whenever one ends it. What ended it, was answered with 500 or
with nothing in half a minute is then sent to a server under ``importance``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from results import print_rows, write_results
from rich.progress import track

from sgl_importance.embedded_model import checkpoint_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))

from support import warm_start
from support.models import write_random_llama
from support.odd_requests import OddRequest
from support.route_fields import seeded_odd_requests
from support.servers import ServerProcess

FLAGS = ("--page-size", "16", "--max-total-tokens", "2048")
PATIENCE = 30.0
SIMPLE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}


@dataclass(frozen=True)
class Broken:
    """A request that stock sglang did not survive, or not answer."""

    request: OddRequest
    outcome: str


def at(body: Any, path: str) -> Any:
    """What stands at a path of names in a body."""
    for name in path.split("."):
        body = body.get(name) if isinstance(body, dict) else None
    return body


def send(server: ServerProcess, path: str, body: Any) -> httpx.Response:
    content = json.dumps(body)  # httpx sends no NaN, and no half of a surrogate pair
    headers = {"content-type": "application/json"}
    with httpx.Client(trust_env=False, timeout=PATIENCE) as client:
        return client.post(f"{server.base_url}{path}", content=content, headers=headers)


def outcome_of(server: ServerProcess, request: OddRequest) -> str | None:
    """What became of a request, or of the server that it was sent to; None where all is well."""
    outcome = None
    try:
        answer = send(server, request.path, request.to(server.name))
        if answer.status_code >= 500 and answer.status_code != 501:
            outcome = str(answer.status_code)
        send(server, "/generate", SIMPLE).raise_for_status()
    except httpx.TimeoutException:
        return "hangs"
    except (httpx.TransportError, httpx.HTTPStatusError):
        return "ends"
    return outcome


def broken_of(requests: list[OddRequest], model: Path) -> list[Broken]:
    found: list[Broken] = []
    waiting = iter(track(requests, description="stock"))
    is_over = False
    while not is_over:
        with ServerProcess("--kv-policy", "default", *FLAGS, model=model) as server:
            is_over = True
            for request in waiting:
                outcome = outcome_of(server, request)
                if outcome is not None:
                    found.append(Broken(request, outcome))
                if outcome in ("ends", "hangs"):
                    is_over = False
                    server.stop()
                    break
    return found


def main(
    count: Annotated[int, typer.Option(min=1, help="Requests.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 34,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Sends them and writes the results."""
    warm_start.is_on = True  # stock is started many times over
    made = seeded_odd_requests(seed)
    requests = [made.next() for _ in range(count)]
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        model = write_random_llama(Path(folder), tokenizer_of=checkpoint_path())
        broken = broken_of(requests, model)
        with ServerProcess("--kv-policy", "importance", *FLAGS, model=model) as server:
            for each in track(broken, description="ours"):
                request = each.request
                answer = send(server, request.path, request.to(server.name))
                rows.append(
                    {
                        "route": request.path,
                        "fields": " ".join(request.odd),
                        "value": repr([at(request.body, name) for name in request.odd])[:120],
                        "stock": each.outcome,
                        "importance": answer.status_code,
                        "message": answer.text[:160] if answer.status_code != 200 else "",
                    }
                )
                send(server, "/generate", SIMPLE).raise_for_status()
    rows.append({"route": "all", "requests": count, "broken": len(broken)})
    print_rows("Odd requests", [row for row in rows if "fields" in row])
    typer.echo(f"written to {write_results('odd_fields', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

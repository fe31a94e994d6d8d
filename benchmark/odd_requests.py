"""How many odd requests a server stands: seeded, and sent until they are through or something gives way.

Half of them are those of ``test/abuse/http/test_odd_fields.py`` with up to three odd fields; the others are
full bodies of every route that takes one, spoiled anywhere inside. What ends the server, is answered with
500 or with nothing, changes a canary's tokens or leaves books that do not balance is a finding.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import httpx
import typer
from results import RESULTS, print_rows, rows_so_far, write_results
from rich.progress import track

from sgl_importance.embedded_model import checkpoint_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))

from support import servers, warm_start
from support.models import write_random_llama
from support.odd_requests import OddRequest
from support.route_fields import seeded_odd_requests
from support.servers import ServerFailed, ServerProcess
from support.spoiled_bodies import SpoiledBodies
from support.tiered import DEVICE_TOKENS

PATIENCE = 60.0
EVERY = 100
"""Requests between two canaries."""
CANARY = {
    "input_ids": [300 + 7 * place % 600 for place in range(200)],
    "sampling_params": {"max_new_tokens": 8, "temperature": 0},
}
POOL = ("--page-size", "16", "--max-total-tokens", "2048")
Kind = Literal["device", "storage", "pages", "observe"]


def flags_of(kind: Kind, folder: Path) -> tuple[str, ...]:
    """Of a server with a device pool alone, with all tiers, with tiered pages, or under ``observe``."""
    if kind == "storage":
        store = ("--kv-importance-store", str(folder / "store"))
        return (
            "--kv-policy",
            "importance",
            *POOL,
            "--enable-hierarchical-cache",
            "--hicache-ratio",
            "2",
            *store,
        )
    if kind == "pages":
        slots = ("--kv-residency", "tiered", "--kv-device-tokens", str(DEVICE_TOKENS))
        few = ("--max-running-requests", "8", "--schedule-conservativeness", "0.05")
        return ("--kv-policy", "importance", *POOL, *slots, *few)
    return ("--kv-policy", "observe" if kind == "observe" else "importance", *POOL)


class Requests:
    """The same ones for the same seed, beside the same sglang."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._fields = seeded_odd_requests(seed, largest=3)
        self._bodies = SpoiledBodies(random.Random(seed + 1))

    def next(self) -> OddRequest:
        return (self._fields if self._rng.random() < 0.5 else self._bodies).next()


def problem_of(client: httpx.Client, request: OddRequest, model: str) -> tuple[str, int]:
    """What a request did that it must not, and its status; 0 where there is none."""
    content = json.dumps(request.to(model))  # httpx sends no NaN, and no half of a surrogate pair
    try:
        answer = client.post(request.path, content=content, headers={"content-type": "application/json"})
    except httpx.TimeoutException:
        return f"no answer in {PATIENCE:.0f} s", 0
    except httpx.TransportError as error:
        return f"{type(error).__name__}: {error}", 0
    if answer.status_code >= 500 and answer.status_code not in (501, 503):
        return f"{answer.status_code} {answer.text[:300]}", answer.status_code
    if "Internal server error" in answer.text or "Traceback (most" in answer.text:
        return answer.text[:300], answer.status_code
    return "", answer.status_code


def main(
    kind: Annotated[Kind, typer.Option(help="Of server.")] = "device",
    count: Annotated[int, typer.Option(min=1, help="Requests.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Sends them, and writes what was found; a run that was cut off goes on where it stopped."""
    warm_start.is_on = True  # a server that ends is started again
    servers.START_SECONDS = 1200.0  # of a machine that has other work
    file = out or RESULTS / "odd_requests.json"
    before = rows_so_far(file)
    others = [row for row in before if (row["kind"], row["seed"]) != (kind, seed)]
    known = next((row for row in before if (row["kind"], row["seed"]) == (kind, seed)), None)
    row: dict[str, Any] = known or {
        "kind": kind,
        "seed": seed,
        "requests": 0,
        "servers": 0,
        "answers": {},
        "canary_changed": 0,
        "findings": [],
    }
    requests = Requests(seed)
    for _ in range(row["requests"]):
        requests.next()
    progress = iter(track(range(row["requests"], count), description=kind))

    def save() -> None:
        write_results("odd_requests", [*others, row], out=file)

    with TemporaryDirectory() as folder:
        model = write_random_llama(Path(folder), tokenizer_of=checkpoint_path())
        while row["requests"] < count:
            row["servers"] += 1
            with ServerProcess(*flags_of(kind, Path(folder)), model=model) as server:
                try:
                    _send(server, requests, row, progress, save)
                    server.stop()  # which looks for faults of ours
                    continue
                except (AssertionError, ServerFailed) as error:
                    problem = str(error)[-3000:]
                row["findings"].append({"number": row["requests"], "problem": problem})
                save()
                server.expects_faults = True
    print_rows("Odd requests", [{**row, "answers": str(row["answers"]), "findings": len(row["findings"])}])
    typer.echo(f"written to {file}")


def _send(server: ServerProcess, requests: Requests, row: dict[str, Any], progress: Any, save: Any) -> None:
    """Until all are sent, or the server is not what it was."""

    def canary() -> list[int]:
        return list(server.post("/generate", CANARY)["output_ids"])

    expected = canary()
    row["memory_mb_at_start"] = server.memory() >> 20
    with httpx.Client(base_url=server.base_url, trust_env=False, timeout=PATIENCE) as client:
        for _ in progress:
            request = requests.next()
            row["requests"] += 1
            began = time.monotonic()
            problem, status = problem_of(client, request, server.name)
            row["slowest_s"] = max(row.get("slowest_s", 0.0), round(time.monotonic() - began, 2))
            answers = row["answers"]
            answers[str(status)] = answers.get(str(status), 0) + 1
            if problem:
                what = {"path": request.path, "odd": request.odd, "body": json.dumps(request.body)[:3000]}
                row["findings"].append({"number": row["requests"], "problem": problem, **what})
                save()
                if status == 0:  # an answer may be long: a server that answers others goes on
                    server.raise_if_ended(2.0)
                    row["late"] = row.get("late", 0) + (canary() == expected)
            if row["requests"] % EVERY == 0:
                if canary() != expected:
                    row["canary_changed"] += 1
                row["memory_mb"] = server.memory() >> 20
                save()
    server.flush_cache()  # only an idle server, whose books balance, can be flushed
    row["flushed"] = True
    save()


if __name__ == "__main__":
    typer.run(main)

"""What each server decided, request by request: tokens found in each tier, and the nodes that it gave up.

    python benchmark/serving/decisions.py record                    # every arm on every workload
    python benchmark/serving/decisions.py record --jobs 2 --resume  # two servers at a time; what is missing
    python benchmark/serving/decisions.py record --ours             # the arms that our code decides
    python benchmark/serving/decisions.py compare OTHER             # with another folder of such files

For changes that must not change a decision. One request at a time, as in the pass ``counts``, so that nothing
hangs on the machine. A file per workload and arm, a line per request: tokens found on device, host and in
storage, then what was evicted until the next request. Ours name the tier (its first letter) and the digest of
each node; of stock servers only the number of tokens is known.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS
from benchmark.serving.arms import ARMS, Arm
from benchmark.serving.passes import Servers
from benchmark.serving.workloads import Workload, load_parameters, make_workload
from sgl_importance.observe.trace.reader import open_trace
from sgl_importance.observe.trace.records import EventKind, RequestAdmitted, TreeEvent
from sgl_importance_lab.workload.workload_request import WorkloadRequest

from support.servers import ServerProcess

COMMITTED = RESULTS / "decisions"
TIERS = ("device", "host", "storage")
HEADER = "\t".join((*TIERS, "evicted"))
DIGEST_DIGITS = 8

app = typer.Typer(help="What each server decided, request by request.")


def decide(workload: Workload, arm: Arm, parameters: dict[str, Any]) -> list[str]:
    """Serves the workload; one line per request, those behind a restart included."""
    split = workload.restart_after or len(workload.requests)
    lives = [life for life in (workload.requests[:split], workload.requests[split:]) if life]
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="decisions-") as folder:
        for number, requests in enumerate(lives):
            trace = Path(folder) / f"trace-{number}"
            recorded = ("--kv-importance-trace", str(trace)) if arm.learns else ()
            with Servers(parameters) as servers:
                server = servers.start(
                    replace(arm, flags=(*arm.flags, *recorded)),
                    workload,
                    store=f"{folder}/store",
                )
                found, evicted = _serve(server, requests, counts_tokens=not arm.learns)
            given_up = _victims(trace, len(requests)) if arm.learns else map(str, evicted)
            lines += [
                "\t".join((*map(str, tiers), names)) for tiers, names in zip(found, given_up, strict=True)
            ]
    return lines


def _serve(
    server: ServerProcess, requests: Sequence[WorkloadRequest], *, counts_tokens: bool
) -> tuple[list[list[int]], list[int]]:
    """Tokens that each request found by tier; and, where asked for, tokens evicted until the next request."""
    found, evicted = [], []
    before = _evicted_tokens(server) if counts_tokens else 0
    for request in requests:
        answer = server.chat(
            request.messages,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            return_cached_tokens_details=True,
        )
        details = (answer.get("sglext") or {}).get("cached_tokens_details") or {}
        found.append([details.get(tier) or 0 for tier in TIERS])
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert sum(found[-1]) == cached, (found[-1], cached)
        if counts_tokens:
            after = _evicted_tokens(server)
            evicted.append(after - before)
            before = after
    return found, evicted


def _evicted_tokens(server: ServerProcess) -> int:
    try:
        return round(server.metric("sglang:evicted_tokens_total"))
    except KeyError:  # nothing was evicted so far
        return 0


def _victims(trace: Path, requests: int) -> Iterator[str]:
    """Names of what was evicted behind each of the last ``requests`` admissions of a recording."""
    victims: list[list[str]] = []
    for record in open_trace(trace):
        if isinstance(record, RequestAdmitted):
            victims.append([])
        elif isinstance(record, TreeEvent) and record.kind is EventKind.EVICT and victims:
            victims[-1].append(record.tier[0] + record.digest.hex()[:DIGEST_DIGITS])
    assert len(victims) >= requests, f"{len(victims)} of {requests} requests recorded"
    return (" ".join(names) for names in victims[-requests:])


def _file(folder: Path, workload: str, arm: str) -> Path:
    return folder / workload / f"{arm}.tsv"


def _write(file: Path, lines: Iterable[str], commit: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join((f"# commit {commit}", HEADER, *lines)) + "\n"
    unfinished = file.with_suffix(".part")
    unfinished.write_text(text)
    unfinished.replace(file)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()[2:]


@app.command()
def record(
    workloads: Annotated[str, typer.Option(help="Some of the workloads, separated by commas.")] = "",
    arms: Annotated[str, typer.Option(help="Some of the arms, separated by commas.")] = "",
    ours: Annotated[bool, typer.Option(help="Only the arms that our code decides.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Servers at a time.")] = 1,
    resume: Annotated[bool, typer.Option(help="Leave out what the folder has.")] = False,
    requests: Annotated[int, typer.Option(min=0, help="Of each workload, from the first on; 0: all.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the files.")] = COMMITTED,
) -> None:
    """Serve the workloads and write what was decided."""
    parameters = load_parameters()
    for shape in parameters["workloads"].values():
        shape["requests"] = min(requests or shape["requests"], shape["requests"])
        if "restart_after" in shape:
            shape["restart_after"] = min(shape["restart_after"], shape["requests"] // 2)
    names = [name for name in workloads.split(",") if name] or list(parameters["workloads"])
    chosen = [name for name in arms.split(",") if name] or [
        name for name, arm in ARMS.items() if arm.learns or not ours
    ]
    if unknown := [*set(names) - set(parameters["workloads"]), *set(chosen) - set(ARMS)]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    wanted = [
        (workload, arm)
        for arm in chosen
        for workload in (make_workload(name, parameters) for name in names)
        if not ARMS[arm].is_copy(workload.tiers) and not (resume and _file(out, workload.name, arm).exists())
    ]
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(jobs) as pool:
        bar = progress.add_task("servers", total=len(wanted))
        running = {
            pool.submit(decide, workload, ARMS[arm], parameters): (workload.name, arm)
            for workload, arm in wanted
        }
        for done in as_completed(running):
            workload_name, arm = running[done]
            if done.exception() is not None:
                pool.shutdown(cancel_futures=True)  # it would run for an hour before anybody is told
            _write(_file(out, workload_name, arm), done.result(), commit)
            progress.advance(bar)


@app.command()
def compare(
    other: Annotated[Path, typer.Argument(help="Folder of other files.", exists=True, file_okay=False)],
    folder: Annotated[Path, typer.Option(help="Folder to compare with.")] = COMMITTED,
) -> None:
    """Say where two folders differ. Exit code 1 where they do, or where they have no file in common."""
    compared, different = 0, 0
    for file in sorted(other.rglob("*.tsv")):
        name = file.relative_to(other)
        if not (folder / name).exists():
            print(f"{name}: not in {folder}")
            continue
        compared += 1
        before, after = _lines(folder / name), _lines(file)
        differing = [i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new]
        if differing or len(before) != len(after):
            different += 1
            first = differing[0] if differing else min(len(before), len(after))
            lengths = "" if len(before) == len(after) else f" ({len(after)} there)"
            print(f"{name}: {len(differing)} of {len(before)} requests differ{lengths}, first {first}:")
            for sign, lines in (("-", before), ("+", after)):
                print(f"  {sign} {lines[first] if first < len(lines) else ''}")
    print(f"{compared} files compared, {different} differ")
    raise typer.Exit(bool(different or not compared))


if __name__ == "__main__":
    app()

"""The replay command at the terminal: its lists, reading, running, tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console

from sgl_importance.replay.formats.detect import read_trace
from sgl_importance.replay.formats.line_reader import BadRecord, ReadOptions, TraceError, refuse_bad_record
from sgl_importance.replay.policy_registry import UnknownPolicyError, load_policy
from sgl_importance.replay.replay_runner import JobT, ReplayError, RowT, run_jobs
from sgl_importance.replay.trace import Trace
from sgl_importance.terminal import counted, fail, interrupted

NumberT = TypeVar("NumberT", int, float)


def parse_policies(text: str) -> list[str]:
    """Names of a comma-separated list, each once; fails on an unknown one."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        fail("no policy is named: name at least one, such as lru")
    try:
        for name in names:
            load_policy(name)
    except UnknownPolicyError as error:
        fail(str(error))
    return names


def parse_numbers(
    option: str, text: str | None, kind: type[NumberT], *, may_be_zero: bool = False
) -> list[NumberT]:
    """Positive numbers of a comma-separated list, or 0 where it may be; none if the option is absent."""
    if text is None:
        return []
    try:
        numbers = [kind(number) for number in text.split(",")]
    except ValueError:
        fail(f"{option} takes numbers such as {'1827,3655' if kind is int else '0.01,0.02'}, not {text!r}")
    if not all(0 < number < float("inf") or (may_be_zero and number == 0) for number in numbers):
        fail(f"{option} takes numbers {'from 0 on' if may_be_zero else 'above 0'}, not {text!r}")
    return numbers


def check_traces(paths: Sequence[Path]) -> None:
    """Fails, before anything else is asked for, where there is no such trace."""
    for path in paths:
        if not path.exists():
            fail(f"{path}: no such file")


def read_traces(
    paths: Sequence[Path], options: ReadOptions, format_name: str | None, *, skip_bad: bool
) -> list[Trace]:
    """Reads all traces; two of the same name are told apart by their paths."""
    traces = []
    for path in paths:
        bad: list[BadRecord] = []
        on_bad_record = bad.append if skip_bad else refuse_bad_record
        try:
            with Console(stderr=True).status(f"reading {path.name}"):
                trace = read_trace(path, options, format_name=format_name, on_bad_record=on_bad_record)
        except TraceError as error:
            fail(str(error))
        finally:
            if bad:
                typer.echo(f"skipped {len(bad)} bad record{'s' * (len(bad) > 1)}, first {bad[0]}", err=True)
        if trace.parents is None and not options.object_level:
            fail(f"{path}: its objects have no prefixes: add --object-level")
        traces.append(trace)
    if len({trace.name for trace in traces}) < len(traces):
        return [replace(trace, name=str(path)) for trace, path in zip(traces, paths, strict=True)]
    return traces


def run_with_progress(
    run_one: Callable[[Sequence[Trace], JobT], RowT],
    traces: Sequence[Trace],
    jobs: Sequence[JobT],
    processes: int,
) -> list[RowT]:
    """Rows in the order of the jobs, whatever finishes first."""
    rows: dict[int, RowT] = {}
    try:
        with counted("replaying", len(jobs)) as advance:
            for index, row in run_jobs(run_one, traces, jobs, processes):
                rows[index] = row
                advance()
    except ReplayError as error:
        fail(str(error))
    except KeyboardInterrupt:
        interrupted(f"after {len(rows)} of {len(jobs)} replays")
    return [rows[index] for index in range(len(jobs))]


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Writes dataclass rows as a JSON list."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")

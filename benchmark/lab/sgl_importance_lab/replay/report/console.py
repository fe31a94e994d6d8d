"""The replay command at the terminal: its lists, reading, running, tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console

from sgl_importance.terminal import counted, fail, interrupted, plain
from sgl_importance_lab.replay.formats.detect import depends_on_seed, read_trace
from sgl_importance_lab.replay.formats.line_reader import (
    BadRecord,
    ReadOptions,
    TraceError,
    refuse_bad_record,
)
from sgl_importance_lab.replay.policy_registry import UnknownPolicyError, load_policy
from sgl_importance_lab.replay.ray_cluster import RayCluster
from sgl_importance_lab.replay.replay_runner import JobT, ReplayError, RowT, run_jobs
from sgl_importance_lab.replay.report.journal import SweepJournal
from sgl_importance_lab.replay.trace import Trace

MOST = 2**53
"""Of blocks, shares and seeds; behind it floats are no whole numbers any more."""
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
    if any(number > MOST for number in numbers):
        fail(f"{option} takes numbers up to 2**53, not {text!r}")
    if not all(0 < number < float("inf") or (may_be_zero and number == 0) for number in numbers):
        fail(f"{option} takes numbers {'from 0 on' if may_be_zero else 'above 0'}, not {text!r}")
    return numbers


def parse_seeds(text: str) -> list[int]:
    """Seeds of a comma-separated list, each once; fails on what is none."""
    return list(dict.fromkeys(parse_numbers("--seed", text, int, may_be_zero=True)))


def check_traces(paths: Sequence[Path]) -> None:
    """Fails, before anything else is asked for, where there is no such trace."""
    for path in paths:
        if not path.exists():
            fail(f"{path}: no such file")


def read_traces(
    paths: Sequence[Path],
    options: ReadOptions,
    format_name: str | None,
    *,
    skip_bad: bool,
    seeds: Sequence[int] = (0,),
) -> list[Trace]:
    """Reads all traces, each with every seed; two of the same name are told apart by their paths."""
    traces: list[Trace] = []
    for path, seed in product(paths, seeds):
        bad: list[BadRecord] = []
        on_bad_record = bad.append if skip_bad else refuse_bad_record
        try:
            if seed != seeds[0] and not depends_on_seed(path, format_name):
                traces.append(traces[-1])
                continue
            with Console(stderr=True).status(plain(f"reading {path.name}")):
                trace = read_trace(
                    path,
                    replace(options, seed=seed, remark=_remark),
                    format_name=format_name,
                    on_bad_record=on_bad_record,
                )
        except TraceError as error:
            fail(str(error))
        finally:
            if bad:
                typer.echo(f"skipped {len(bad)} bad record{'s' * (len(bad) > 1)}, first {bad[0]}", err=True)
        if trace.parents is None and not options.object_level:
            fail(f"{path}: its objects have no prefixes: add --object-level")
        traces.append(trace)
    names = [trace.name for trace in traces]
    if len(set(names)) < len(paths):
        names = [str(path) for path in paths for _ in seeds]
    if len(seeds) > 1:
        names = [f"{name}, seed {seed}" for name, seed in zip(names, cycle(seeds), strict=False)]
    return [replace(trace, name=name) for trace, name in zip(traces, names, strict=True)]


def _remark(text: str) -> None:
    typer.echo(text, err=True)


def run_with_progress(
    run_one: Callable[[Sequence[Trace], JobT], RowT],
    traces: Sequence[Trace],
    jobs: Sequence[JobT],
    workers: int | RayCluster,
    journal: SweepJournal[RowT] | None = None,
) -> list[RowT]:
    """Rows in the order of the jobs, whatever finishes first.

    Args:
        run_one, traces, jobs, workers: as in ``run_jobs``.
        journal: has the rows that an interrupted run left, and gets the others.
    """
    rows = dict(journal.rows) if journal is not None else {}
    if journal is not None and rows:
        typer.echo(f"going on after {len(rows)} of {len(jobs)} replays, from {journal.path}", err=True)
    left = [index for index in range(len(jobs)) if index not in rows]
    try:
        with counted("replaying", len(left)) as advance:
            for index, row in run_jobs(run_one, traces, [jobs[index] for index in left], workers):
                rows[left[index]] = row
                if journal is not None:
                    journal.add(left[index], row)
                advance()
    except ReplayError as error:
        fail(str(error))
    except KeyboardInterrupt:
        goes_on = ": the same command goes on from there" * (journal is not None)
        interrupted(f"after {len(rows)} of {len(jobs)} replays{goes_on}")
    return [rows[index] for index in range(len(jobs))]


def open_journal(
    results: Path | None, row_type: type[RowT], traces: Sequence[Trace], jobs: Sequence[Any]
) -> SweepJournal[RowT] | None:
    """Beside the result file, if there is one; fails where it cannot be written."""
    if results is None:
        return None
    try:
        return SweepJournal(results, row_type, traces, jobs)
    except OSError as error:
        fail(f"{results.parent}: {error.strerror}: rows of an unfinished sweep are kept there")


def write_rows(path: Path, rows: Sequence[Any], journal: SweepJournal[Any] | None = None) -> None:
    """Writes dataclass rows as a JSON list; the journal is not needed any more."""
    # Under another name first: a process that ends here leaves the journal and no half of a result.
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    if journal is not None:
        journal.remove()

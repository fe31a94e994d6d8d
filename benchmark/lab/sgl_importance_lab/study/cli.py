"""`sgl-importance study`: tests of claims about importance on recordings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from sgl_importance.observe.trace import TraceError
from sgl_importance.terminal import check_outputs, existing_file, fail, plain, some_path
from sgl_importance_lab.replay.residency.page_steps import PageRecording, load_page_steps
from sgl_importance_lab.study import h2, sensitivity, streams
from sgl_importance_lab.study.h1 import study_h1
from sgl_importance_lab.study.h2 import study_h2
from sgl_importance_lab.study.recording import Recording, load_recording
from sgl_importance_lab.study.sensitivity import study_sensitivity
from sgl_importance_lab.study.study_report import Finding, StudyError, check_drawing
from sgl_importance_lab.workload.workload_request import WorkloadError, read_requests

app = typer.Typer(
    help="Claims about importance, each with a value, a bootstrap interval and a verdict, from recordings.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

RecordingT = TypeVar("RecordingT", Recording, PageRecording)

Directories = Annotated[
    list[Path], typer.Argument(parser=some_path, help="What --kv-importance-trace named, one or more.")
]
Out = Annotated[
    Path, typer.Option(parser=some_path, metavar="PATH", help="Folder for <study>.json and <study>.png.")
]
WithFigure = Annotated[bool, typer.Option(help="Draw a figure (matplotlib).")]
MinQueries = Annotated[
    int,
    typer.Option(min=2, help="Queries that a context needs to count; from few of them there is no verdict."),
]
MarksFile = Annotated[
    Path | None,
    typer.Option(
        "--marks",
        parser=existing_file,
        metavar="PATH",
        help="Where milestones and phases of the thoughts are: for each request a line of JSON with rid, "
        "milestones and phases.",
    ),
]


def run_study(
    name: str,
    directories: Sequence[Path],
    out: Path,
    with_figure: bool,
    study: Callable[[Sequence[Recording], Path | None], Finding],
) -> None:
    """Loads the recordings, runs one study, prints and writes its finding."""
    run_study_on(load_recording, name, directories, out, with_figure, study)


def run_study_on(
    load: Callable[[Path], RecordingT],
    name: str,
    directories: Sequence[Path],
    out: Path,
    with_figure: bool,
    study: Callable[[Sequence[RecordingT], Path | None], Finding | Sequence[Finding]],
) -> None:
    """The same on what ``load`` makes of each directory; a study may have several findings."""
    if not out.is_dir():
        fail(f"no directory {out}: create it or give --out")
    _refuse_repeated(directories)
    console = Console()
    try:
        if with_figure:
            check_drawing()
        with console.status(f"reading {len(directories)} recordings"):
            loaded = [load(directory) for directory in directories]
        recordings: list[RecordingT] = _told_apart(directories, loaded)
        if empty := [recording.name for recording in recordings if not recording.num_requests]:
            fail(f"no requests in {', '.join(empty)}: record while clients ask")
        found = study(recordings, out / f"{name}.png" if with_figure else None)
    except (TraceError, StudyError) as error:
        fail(str(error))
    words = ["sgl-importance", "study", name, *(recording.name for recording in recordings)]
    for finding in [found] if isinstance(found, Finding) else found:
        finding.show(console)
        written = finding.write(out, recordings, shlex.join(words))
        console.print(plain(f"written: {written}"))


def _refuse_repeated(directories: Sequence[Path]) -> None:
    """Its requests would count twice."""
    seen: set[Path] = set()
    for directory in directories:
        if directory.resolve() in seen:
            fail(f"{directory} is given twice: name each recording once")
        seen.add(directory.resolve())


def _told_apart(directories: Sequence[Path], recordings: list[RecordingT]) -> list[RecordingT]:
    """Recordings whose directories have the same name are called by their paths."""
    if len({recording.name for recording in recordings}) == len(recordings):
        return recordings
    return [
        replace(recording, name=str(directory))
        for directory, recording in zip(directories, recordings, strict=True)
    ]


@app.command("h1")
def h1_command(
    directories: Directories,
    out: Out = Path("."),
    figure: WithFigure = True,
    min_queries: MinQueries = streams.MIN_QUERIES,
) -> None:
    """Do earlier scores say which pages the next decode step needs? (sparse-serving reading)"""
    study = partial(study_h1, min_queries=min_queries)
    run_study("h1", directories, out, figure, lambda recordings, path: study(recordings, figure=path))


@app.command("h2")
def h2_command(
    directories: Directories,
    out: Out = Path("."),
    figure: WithFigure = True,
    min_queries: MinQueries = h2.MIN_QUERIES,
) -> None:
    """Do the pages that matter to one query matter to the others on the same context?"""
    study = partial(study_h2, min_queries=min_queries)
    run_study("h2", directories, out, figure, lambda recordings, path: study(recordings, figure=path))


@app.command("h3")
def h3_command(directories: Directories, out: Out = Path("."), figure: WithFigure = True) -> None:
    """Does choosing pages together with where they are save loads? (recorded page lists)"""
    from sgl_importance_lab.study.h3 import study_h3

    run_study_on(
        load_page_steps,
        "h3",
        directories,
        out,
        figure,
        lambda recordings, path: study_h3(recordings, figure=path),
    )


@app.command("thinking")
def thinking_command(
    directories: Directories,
    out: Out = Path("."),
    figure: WithFigure = True,
    marks: MarksFile = None,
    thought: Annotated[str, typer.Option(help="Requests that think, by the start of their ids.")] = "thought",
    normal: Annotated[str, typer.Option(help="Requests of normal decode.")] = "decode",
) -> None:
    """Do recency, stable heads and attention scores hold what a long thought wants? (recorded page lists)"""
    from sgl_importance_lab.study.thinking.marks import read_marks
    from sgl_importance_lab.study.thinking.measured import Kinds
    from sgl_importance_lab.study.thinking.study_thinking import study_thinking

    kinds = Kinds(thought, normal)
    if thought == normal:
        fail(f"--thought and --normal both name '{thought}': compare two kinds of requests")

    def study(recordings: Sequence[PageRecording], path: Path | None) -> Sequence[Finding]:
        known = {} if marks is None else read_marks(marks)
        return study_thinking(recordings, known, kinds, figures=None if path is None else path.parent)

    run_study_on(load_page_steps, "thinking", directories, out, figure, study)


@app.command("sensitivity")
def sensitivity_command(
    directories: Directories,
    out: Out = Path("."),
    figure: WithFigure = True,
    workload: Annotated[
        Path | None,
        typer.Option(
            parser=existing_file,
            metavar="PATH",
            help="Requests that were sent ('workload make'): whether pages that score high hold the answer.",
        ),
    ] = None,
    min_queries: MinQueries = sensitivity.MIN_QUERIES,
) -> None:
    """The effect of the signal's settings: half-life, window, page size, layers, interval, quantity."""
    try:
        requests = read_requests(workload) if workload else []
    except WorkloadError as error:
        fail(str(error))
    positions = {request.id: request.answer_position() for request in requests}
    answers = {rid: position for rid, position in positions.items() if position is not None}
    run_study(
        "sensitivity",
        directories,
        out,
        figure,
        lambda recordings, path: study_sensitivity(
            recordings, answers=answers, figure=path, min_queries=min_queries
        ),
    )


@app.command("reuse")
def reuse_command(
    trace: Annotated[
        Path, typer.Argument(parser=some_path, help="A trace as 'sgl-importance replay' reads it.")
    ],
    horizon: Annotated[int, typer.Option(help="Requests within which a reuse counts.", min=1)] = 1000,
    format: Annotated[str | None, typer.Option(help="Format of the trace, where it is not detected.")] = None,
    out: Annotated[Path | None, typer.Option(parser=some_path, metavar="PATH", help="JSON file.")] = None,
) -> None:
    """Are the reuse predictions of the policy right? Brier score and calibration, held out."""
    from sgl_importance_lab.replay.formats.detect import read_trace
    from sgl_importance_lab.replay.formats.line_reader import TraceError as ReplayTraceError
    from sgl_importance_lab.study.reuse_study import study_reuse

    check_outputs(out)
    try:
        finding = study_reuse(read_trace(trace, format_name=format), horizon)
    except (ReplayTraceError, ValueError) as error:
        fail(str(error))
    console = Console()
    finding.show(console)
    if out is not None:
        command = ["sgl-importance", "study", "reuse", trace.name, "--horizon", str(horizon)]
        document = {"command": shlex.join(command), **asdict(finding), "verdict": finding.verdict}
        out.write_text(json.dumps(document, indent=1) + "\n")
        console.print(plain(f"written: {out}"))

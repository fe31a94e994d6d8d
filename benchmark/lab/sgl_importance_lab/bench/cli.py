"""`sgl-importance bench`: standard benchmarks, by the field's own harness, of one server or two."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from sgl_importance.cli.client_arguments import ApiKey
from sgl_importance.terminal import add_texts, check_outputs, counted, existing_file, fail, show, some_path
from sgl_importance_lab.bench import harness
from sgl_importance_lab.bench.bench_run import Asked, BenchError, Part, Run, read_run, write_runs
from sgl_importance_lab.bench.benched_server import new_run
from sgl_importance_lab.bench.paired import NO_VERDICT, Paired, paired, scores_of
from sgl_importance_lab.bench.quality_plot import draw_quality
from sgl_importance_lab.bench.recording_proxy import RecordingProxy, listening
from sgl_importance_lab.bench.suites import SUITES
from sgl_importance_lab.probe.chat_client import ServerError
from sgl_importance_lab.probe.grading_arguments import Concurrency, Timeout, parse_lengths, parse_tasks
from sgl_importance_lab.replay.report.plot import PlotError, check_plot
from sgl_importance_lab.study.statistics import Estimate, mean_of


class _Hints(msgspec.Struct):
    selector: str | None = None
    budget: float | None = None


class _Fields(msgspec.Struct):
    """What this command itself reads of added fields."""

    kv_hints: _Hints | None = None


app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")


@app.callback(invoke_without_command=True, context_settings={"allow_interspersed_args": True})
def bench_command(
    suite: Annotated[str, typer.Argument(help=f"One of {', '.join(SUITES)}.")],
    url: Annotated[
        str, typer.Option(help="Address of an OpenAI-compatible server, or the JSON of an earlier run of it.")
    ],
    compare: Annotated[
        list[str] | None,
        typer.Option(help="Another address, or another run's JSON, that is compared with it; repeatable."),
    ] = None,
    body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Fields to add to each request to --url.")
    ] = None,
    compare_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Fields to add to each request to --compare.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            parser=some_path, metavar="FOLDER", help="The model's: ruler measures its prompts by it."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(parser=existing_file, metavar="FILE", help="The data set of an aime or gpqa task."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Comma-separated names, in place of all.")] = None,
    lengths: Annotated[
        str, typer.Option(help="Comma-separated tokens of ruler's prompts with their answers.")
    ] = "4096",
    samples: Annotated[int, typer.Option(min=1, max=500, help="Prompts a task and length.")] = 20,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in place of the harness's.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="By the chat route, with the server's template.")] = False,
    concurrency: Concurrency = 4,
    api_key: ApiKey = None,
    timeout: Timeout = 600.0,
    environment: Annotated[
        Path,
        typer.Option("--harness", parser=some_path, metavar="FOLDER", help="The harness's environment."),
    ] = harness.DEFAULT_FOLDER,
    install: Annotated[bool, typer.Option(help="Make that environment first, where it is missing.")] = False,
    resume: Annotated[
        bool,
        typer.Option(
            help="Keep what an interrupted run was answered by the same model "
            "and, where it is sglang, the same flags."
        ),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", parser=some_path, metavar="PATH", help="Write runs and answers here."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(parser=some_path, metavar="PATH", help="Draw quality against budget."),
    ] = None,
) -> None:
    """Ask a server a standard benchmark with lm-evaluation-harness; compare two on the same prompts.

    ruler makes its prompts with --tokenizer; aime and gpqa come from --data, or from the Hugging Face hub.
    """
    check_outputs(json_file, plot)
    if plot is not None:
        try:
            check_plot(plot)
        except PlotError as error:
            fail(str(error))
    if resume and json_file is None:
        fail("--resume needs the --json file to go on from")
    if suite not in SUITES:
        fail(f"unknown suite {suite!r}: choose from {', '.join(SUITES)}")
    chosen = SUITES[suite]
    asked = Asked(
        suite=suite,
        tasks=list(chosen.tasks) if tasks is None else parse_tasks(tasks, chosen.known),
        lengths=parse_lengths(lengths, "4096,8192") if chosen.makes_prompts else [0],
        samples=samples,
        answer_tokens=answer_tokens,
        chat=chat,
        harness=harness.NAME,
    )
    fields = _fields("--body", body), _fields("--compare-body", compare_body)
    kept = None if json_file is None else _kept_file(json_file)
    if kept is not None and not resume:
        kept.unlink(missing_ok=True)
    try:
        runs = []
        for number, place in enumerate([url, *(compare or [])]):
            if Path(place).is_file():
                runs.append(read_run(Path(place)))
                continue
            run = asyncio.run(new_run(place, api_key, timeout, asked, fields[number > 0]))
            if chosen.makes_prompts:
                _check_tokenizer(tokenizer)
            elif data is not None:
                _check_data(data, asked)
            python = harness.install(environment) if install else harness.installed(environment)
            _fill(
                run,
                number,
                python,
                tokenizer if chosen.makes_prompts else data,
                api_key,
                timeout,
                concurrency,
                kept,
            )
            runs.append(run)
            if json_file is not None:
                write_runs(json_file, runs)
        rows = [(run, paired(runs[0], run)) for run in runs[1:]]
    except (ServerError, BenchError) as error:
        fail(str(error))
    for run in runs:
        _show_run(run)
    for run, pairs in rows:
        _show_pairs(runs[0], run, pairs)
    if json_file is not None:
        write_runs(json_file, runs)
    if kept is not None:
        kept.unlink(missing_ok=True)
    if plot is not None:
        draw_quality(runs, plot)


def _fill(
    run: Run,
    number: int,
    python: Path,
    data: Path | None,
    api_key: str | None,
    timeout: float,
    clients: int,
    kept: Path | None,
) -> None:
    asked = run.asked
    title = f"{asked.suite}, {run.name}"
    with counted(title, len(asked.lengths) * len(asked.tasks) * asked.samples) as advance:
        for length in asked.lengths:
            # By number: a server that is compared with itself answers for each of its places.
            served = f"{number} {run.served}"
            proxy = RecordingProxy(run.url, served, api_key, timeout, run.body, kept, advance)
            with listening(proxy) as address:
                try:
                    samples = harness.samples_of(python, asked, length, address, run.model, data, clients)
                except BenchError as error:
                    raise BenchError(proxy.problem or str(error)) from error
            run.parts.append(
                Part(
                    length=length,
                    prompt_tokens=sum(each.prompt_tokens for each in proxy.exchanges),
                    cached_tokens=sum(each.cached_tokens for each in proxy.exchanges),
                    seconds=sum(each.seconds for each in proxy.exchanges),
                    samples=samples,
                )
            )


def _kept_file(json_file: Path) -> Path:
    return json_file.with_name(json_file.name + ".part")


def _fields(flag: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        msgspec.convert(found, _Fields)
    except msgspec.MsgspecError as error:
        fail(f'{flag} takes a JSON object such as \'{{"kv_hints": {{"budget": 512}}}}\': {error}')
    return found


def _check_tokenizer(folder: Path | None) -> None:
    if folder is None:
        raise BenchError("ruler makes its prompts with the model's tokenizer: name its folder, --tokenizer")
    if not (folder / "tokenizer_config.json").is_file():
        raise BenchError(f"--tokenizer {folder} holds no tokenizer_config.json: name the model's folder")


def _check_data(file: Path, asked: Asked) -> None:
    if file.suffix not in harness.DATA_TYPES:
        raise BenchError(f"--data {file}: give a file that ends in {', '.join(harness.DATA_TYPES)}")
    if len(asked.tasks) > 1:
        raise BenchError("--data holds one task's questions: name that one, --tasks")


def _show_run(run: Run) -> None:
    requests = sum(len(part.samples) for part in run.parts)
    prompts = sum(part.prompt_tokens for part in run.parts)
    cached = sum(part.cached_tokens for part in run.parts)
    seconds = sum(part.seconds for part in run.parts)
    typer.echo(
        f"{run.name}: {requests} answers, {cached:,} of {prompts:,} prompt tokens cached, "
        f"{seconds / max(requests, 1):.2f} s a request"
    )
    table = Table("task")
    for title in ("length", "n", "score", "95 % interval"):
        table.add_column(title, justify="right")
    for task, length, scores in scores_of(run):
        estimate = mean_of(scores)
        add_texts(table, task, str(length or "-"), str(estimate.n), f"{estimate.value:.3f}", _ends(estimate))
    show(table)


def _show_pairs(first: Run, second: Run, pairs: list[Paired]) -> None:
    typer.echo(f"{second.name} less {first.name}:")
    table = Table("task")
    for title in ("length", "n", "difference", "95 % interval", "lost, won", "p", "same answer", "verdict"):
        table.add_column(title, justify="right")
    for row in pairs:
        add_texts(
            table,
            row.task,
            str(row.length or "-"),
            str(row.n),
            f"{row.difference.value:+.3f}",
            _ends(row.difference),
            f"{row.lost}, {row.won}",
            f"{row.p:.3f}",
            f"{row.equal:.2f}",
            row.verdict,
        )
    show(table)
    if any(row.verdict == NO_VERDICT for row in pairs):
        typer.echo(f"No verdict where {first.name} scores under a half.")


def _ends(estimate: Estimate) -> str:
    low, high = estimate.ends
    return "-" if low is None else f"{low:.3f} to {high:.3f}"

"""`sgl-importance size`: sizes of device, host and storage memory for recorded traffic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sgl_importance.cli.observe_command import print_report, summarize
from sgl_importance.observe.trace import open_trace
from sgl_importance.terminal import add_texts, fail, plain, show, some_path
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.formats import recorded
from sgl_importance_lab.replay.formats.line_reader import ReadOptions
from sgl_importance_lab.replay.policy_registry import OPTIMUM
from sgl_importance_lab.replay.replay_arguments import (
    BYTES_PER_TOKEN,
    HOST_GBPS,
    PREFILL_TOKENS_PER_SECOND,
    STORAGE_GBPS,
    BytesPerToken,
    FormatName,
    HostGbps,
    Jobs,
    PrefillTokensPerSecond,
    SkipBad,
    StorageGbps,
    Tokenizer,
    check_results,
    workers_of,
)
from sgl_importance_lab.replay.replay_runner import Job, run_job
from sgl_importance_lab.replay.report.console import parse_policies, read_traces, run_with_progress
from sgl_importance_lab.replay.report.plot import plot_rows
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.sizing.recorded_pair import recorded_pair
from sgl_importance_lab.sizing.sizing import (
    GB,
    Hardware,
    HitCurve,
    Prices,
    Sizes,
    SizingError,
    Traffic,
    recommend,
)

app = typer.Typer(pretty_exceptions_enable=False, subcommand_metavar="")

FRACTIONS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0)
"""Capacities that are replayed, as parts of the unique blocks."""
BASELINE = "lru"
_PRICES = "Prices"


@app.callback(invoke_without_command=True, context_settings={"allow_interspersed_args": True})
def size_command(
    recording: Annotated[
        Path, typer.Argument(parser=some_path, help="Directory of --kv-importance-trace, or any trace.")
    ],
    policy: Annotated[
        str, typer.Option(help="Eviction policy that will run; lru is always shown beside.")
    ] = "importance",
    target_hit_rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of prompt tokens that all tiers must provide.")
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1e6, help="Hours that the trace stands for; its own if absent."),
    ] = None,
    bytes_per_token: BytesPerToken = BYTES_PER_TOKEN,
    prefill_tokens_per_second: PrefillTokensPerSecond = PREFILL_TOKENS_PER_SECOND,
    host_gbps: HostGbps = HOST_GBPS,
    storage_gbps: StorageGbps = STORAGE_GBPS,
    price_device: Annotated[
        float, typer.Option(min=0, max=1e9, rich_help_panel=_PRICES, help="Device memory, per GB and month.")
    ] = 18.0,
    price_host: Annotated[
        float, typer.Option(min=0, max=1e9, rich_help_panel=_PRICES, help="Host memory, per GB and month.")
    ] = 0.5,
    price_storage: Annotated[
        float, typer.Option(min=0, max=1e9, rich_help_panel=_PRICES, help="Storage, per GB and month.")
    ] = 0.05,
    price_prefill_hour: Annotated[
        float,
        typer.Option(min=0, max=1e9, rich_help_panel=_PRICES, help="An hour of the hardware that prefills."),
    ] = 2.0,
    format_name: FormatName = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Another --chunked-prefill-size than the recorded, for what observe says."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", parser=some_path, metavar="PATH", help="Write the result to this file."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", parser=some_path, metavar="PATH", help="Draw hit rate versus capacity."),
    ] = None,
    jobs: Jobs = None,
    skip_bad: SkipBad = False,
    tokenizer: Tokenizer = None,
) -> None:
    """Recommend device, host and storage sizes from recorded requests."""
    (name, *others) = parse_policies(policy)
    if others or name == OPTIMUM:
        fail("--policy takes one policy that a server can run, such as importance or lru")
    check_results(json_file, plot_file)
    workers = workers_of(jobs)
    (trace,) = read_traces([recording], ReadOptions(tokenizer), format_name, skip_bad=skip_bad)
    traffic = _traffic(trace, hours)
    hardware = Hardware(
        bytes_per_token,
        prefill_tokens_per_second,
        {Tier.HOST: host_gbps * 1e9, Tier.STORAGE: storage_gbps * 1e9},
    )
    prices = Prices(
        {Tier.DEVICE: price_device, Tier.HOST: price_host, Tier.STORAGE: price_storage}, price_prefill_hour
    )
    names = list(dict.fromkeys((name, BASELINE)))
    capacities = list(dict.fromkeys(max(1, round(part * trace.num_blocks)) for part in FRACTIONS))
    work = [Job(0, each, capacity) for each in names for capacity in capacities]
    rows = run_with_progress(run_job, [trace], work, workers)
    curves = {
        each: HitCurve.of(
            [
                (row.capacity_blocks * trace.block_tokens, row.token_hit_rate)
                for row in rows
                if row.policy == each
            ]
        )
        for each in names
    }
    try:
        chosen = {
            each: recommend(curve, traffic, hardware, prices, target_hit_rate=target_hit_rate)
            for each, curve in curves.items()
        }
    except SizingError as error:
        fail(str(error))
    needed = _lru_needs(trace, curves[name])
    show(_curve_table(trace, traffic, hardware, curves, needed))
    show(_sizes_table(hardware, chosen))
    observed = _observed(recording, chunk_tokens)
    if observed is not None:
        typer.echo("as the recorded server would compute, with its pool and whole nodes:")
        print_report(observed)
    if json_file is not None:
        document = _document(trace, traffic, hardware, prices, curves, chosen)
        document["curves"][name]["lru_needs_tokens"] = needed
        document["observed"] = observed
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        plot_rows(rows, {trace.name: trace.num_blocks}, plot_file)


def _observed(recording: Path, chunk_tokens: int | None) -> dict[str, Any] | None:
    """What ``sgl-importance observe`` would have said of the recorded server; None of other traces."""
    if not recorded.matches(recording):
        return None
    pair = recorded_pair(open_trace(recording), chunk_tokens)
    return None if pair is None else summarize({"observe": pair.document()})


def _traffic(trace: Trace, hours: float | None) -> Traffic:
    recorded = float(trace.seconds[-1] - trace.seconds[0]) / 3600
    if hours is None and recorded <= 0:
        fail("the trace has no arrival times: say with --hours how long such traffic takes")
    return Traffic(
        prompt_tokens=int(trace.input_tokens.sum()),
        hours=hours if hours is not None else recorded,
        longest_request=int((trace.input_tokens + trace.output_tokens).max()),
    )


def _gigabytes(tokens: float, hardware: Hardware) -> str:
    size = tokens * hardware.bytes_per_token / GB
    return f"{size:,.1f}" if size >= 10 else f"{size:.3g}"


def _lru_needs(trace: Trace, curve: HitCurve) -> list[int | None]:
    """Tokens with which LRU hits as much as each point of the curve, from its exact curve."""
    from sgl_importance_lab.replay.equivalent import lru_curve  # imports numba

    hits = lru_curve(trace).hit_tokens
    wanted = np.floor(curve.rates * int(trace.input_tokens.sum()) + 1e-6)
    blocks = np.searchsorted(hits, wanted).tolist()
    return [block * trace.block_tokens if block < len(hits) else None for block in blocks]


def _curve_table(
    trace: Trace,
    traffic: Traffic,
    hardware: Hardware,
    curves: dict[str, HitCurve],
    needed: Sequence[int | None],
) -> Table:
    """Hit rate and marginal value of the first policy by capacity; the knee is marked."""
    name, curve = next(iter(curves.items()))
    baseline = curves[BASELINE]
    saved = curve.seconds_saved_per_gb(traffic, hardware)
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=plain(
            f"{trace.name}: {trace.num_requests:,} requests, {traffic.prompt_tokens / 1e6:,.3f} M prompt "
            f"tokens in {traffic.hours:,.2f} h",
            "table.title",
        ),
        caption="prefill s/GB: seconds of prefill that each further GB saves on this traffic",
    )
    for title in (
        "GB",
        "tokens",
        f"{name} hits",
        *(["lru hits", "lru needs GB"] if name != BASELINE else []),
    ):
        table.add_column(title, justify="right")
    table.add_column("prefill s/GB", justify="right")
    table.add_column("")
    for place, tokens in enumerate(curve.tokens.tolist()):
        enough = needed[place]
        beside = [
            f"{baseline.rates[place]:.4f}",
            "never" if enough is None else _gigabytes(enough, hardware),
        ]
        add_texts(
            table,
            _gigabytes(tokens, hardware),
            f"{tokens:,.0f}",
            f"{curve.rates[place]:.4f}",
            *(beside if name != BASELINE else []),
            f"{saved[place]:,.3g}",
            "knee" if tokens == curve.knee() else "",
        )
    return table


def _sizes_table(hardware: Hardware, chosen: dict[str, Sizes]) -> Table:
    """The cheapest sizes by policy, one line per tier."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="cheapest sizes for this traffic")
    for title in ("policy", "tier"):
        table.add_column(title)
    for title in ("GB", "tokens", "of prompt tokens", "per month"):
        table.add_column(title, justify="right")
    for policy, sizes in chosen.items():
        for tier in Tier:
            if sizes.tokens[tier]:
                add_texts(
                    table,
                    policy,
                    tier,
                    _gigabytes(sizes.tokens[tier], hardware),
                    f"{sizes.tokens[tier]:,.0f}",
                    f"{sizes.shares[tier]:.4f}",
                    "",
                )
        add_texts(
            table,
            policy,
            "computed",
            "",
            "",
            f"{1 - sizes.hit_rate:.4f}",
            f"{sizes.total_price:,.2f} ({sizes.memory_price:,.2f} memory)",
        )
    return table


def _document(
    trace: Trace,
    traffic: Traffic,
    hardware: Hardware,
    prices: Prices,
    curves: dict[str, HitCurve],
    chosen: dict[str, Sizes],
) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "requests": trace.num_requests,
        "block_tokens": trace.block_tokens,
        "traffic": asdict(traffic),
        "hardware": asdict(hardware),
        "prices": asdict(prices),
        "curves": {
            policy: {
                "tokens": curve.tokens.tolist(),
                "bytes": (curve.tokens * hardware.bytes_per_token).tolist(),
                "token_hit_rates": curve.rates.tolist(),
                "prefill_seconds_saved_per_gb": curve.seconds_saved_per_gb(traffic, hardware).tolist(),
                "knee_tokens": curve.knee(),
            }
            for policy, curve in curves.items()
        },
        "recommended": {
            policy: {
                **asdict(sizes),
                "bytes": {tier: size * hardware.bytes_per_token for tier, size in sizes.tokens.items()},
                "hit_rate": sizes.hit_rate,
            }
            for policy, sizes in chosen.items()
        },
    }

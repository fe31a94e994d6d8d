"""H3, served: what a token waits where pages are chosen with a preference for those on the device.

    python benchmark/sparse/latency.py --throttled

The embedded model, one request at a time, a tenth of the context chosen by ``rep``, slots for a fifth of it.
A server for each policy of residency, and for ``lru`` with a bias; all run at once and take turns: in each
round they get the same questions about the same documents, and ratios are within a round. ``decode``: seconds
between the tokens of long answers; ``questions``: to the first token of a short one, and between the others.
With ``--throttled`` every byte from the host costs a sleep, so that host and device are as far apart as PCIe
and HBM of an H200; without it loads cost next to nothing. Rounds that the JSON has are not run again.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import RESULTS, print_rows, rows_so_far, write_results
from benchmark.sparse.load import slowed
from benchmark.sparse.page_counts import PageCounts
from benchmark.sparse.residency import ANSWER_TOKENS, PAGE, SLOTS, arm_flags, device_tokens
from benchmark.sparse.streamed import streamed
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document
from sgl_importance_lab.probe.tokenizer import encode, piece_ids

from support.served import script_server
from support.servers import ServerProcess

DECODE_TOKENS = 96
ARMS = (("lru", 0.0), ("bucketed_lru", 0.0), ("lru", 1.0), ("lru", 3.0))
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
Question = tuple[ProbeDocument, str]


def arm_name(policy: str, bias: float) -> str:
    return f"{policy}, bias {bias:g}" if bias else policy


def answer(server: ServerProcess, asked: Sequence[Question], tokens: int) -> dict[str, Any]:
    """What tokens waited; of long answers without the first, which reads the question."""
    counts = PageCounts(server)
    seconds: list[float] = []
    right = 0
    for document, name in asked:
        got = streamed(server, encode(document.messages(name)), tokens)
        seconds += got.steps if tokens == DECODE_TOKENS else [got.times[0], *got.steps]
        right += got.output_ids[:1] == piece_ids(document.records[name])
    found = counts.since("selected", "loaded", "load_seconds")
    return {
        "tokens": len(seconds),
        "right": right / len(asked),
        **{f"{name}_ms": 1000 * float(np.quantile(seconds, q)) for name, q in QUANTILES.items()},
        "mean_ms": 1000 * statistics.fmean(seconds),
        "loads a token": found["loaded"] / len(asked) / tokens,
        "load_ms": 1000 * found["load_seconds"] / len(asked) / tokens,
        "loaded_share": found["loaded"] / found["selected"],
    }


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row its quantiles as parts of the best independent choice's in the same round.

    The best has the smallest mean over rounds, in the same load.
    """
    for key in dict.fromkeys(map(_load, rows)):
        of_load = [row for row in rows if _load(row) == key]
        means = {
            arm: statistics.fmean(row["mean_ms"] for row in of_load if row["arm"] == arm)
            for arm in dict.fromkeys(row["arm"] for row in of_load if not row["bias"])
        }
        best = min(means, key=means.__getitem__)
        base = {row["round"]: row for row in of_load if row["arm"] == best}
        for row in of_load:
            row["best"] = best
            beside = base[row["round"]]
            row |= {f"{name}_ratio": row[f"{name}_ms"] / beside[f"{name}_ms"] for name in QUANTILES}


def _load(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["context"], row["throttled"], row["what"]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each load and arm, medians over rounds, and the ratios with their least and most."""
    found = []
    for key in dict.fromkeys((*_load(row), row["arm"]) for row in rows):
        own = [row for row in rows if (*_load(row), row["arm"]) == key]
        shown = dict(zip(("context", "throttled", "what", "arm"), map(str, key), strict=True))
        for name in QUANTILES:
            ratios = [row[f"{name}_ratio"] for row in own]
            middle = statistics.median(row[f"{name}_ms"] for row in own)
            of_best = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            shown[name] = f"{middle:.1f}: {of_best}"
        found.append(shown)
    return found


def main(
    length: Annotated[int, typer.Option(help="Tokens of a document.")] = 8192,
    documents: Annotated[int, typer.Option(help="How many.")] = 2,
    n: Annotated[int, typer.Option(help="Questions about each document, of a round.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds in the end.")] = 3,
    named: Annotated[
        str, typer.Option("--arms", help="Policies, each with a bias: lru:1; all where none is named.")
    ] = "",
    throttled: Annotated[bool, typer.Option(help="Bytes from the host cost a sleep.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON, with the rounds so far.")] = RESULTS
    / "pages_latency.json",
) -> None:
    arms = [(policy, float(bias)) for policy, bias in (arm.split(":") for arm in named.split(",") if arm)]
    arms = arms or list(ARMS)
    rows = rows_so_far(out)
    of_load = [row for row in rows if (row["context"], row["throttled"]) == (length, throttled)]
    done = 1 + max((row["round"] for row in of_load), default=-1)
    env = slowed() if throttled else {}
    pool = (documents + 1) * (length + 256) // PAGE * PAGE
    room = device_tokens(pool, int(SLOTS * length / PAGE))
    texts = [make_document(length - 64, seed) for seed in range(documents)]
    with ExitStack() as stack:
        servers = {
            arm: stack.enter_context(
                script_server(
                    *arm_flags(pool, room, *arm), "--skip-tokenizer-init", model=checkpoint_path(), env=env
                )
            )
            for arm in arms
        }
        for arm, server in servers.items():
            for text in track(texts, description=f"{arm_name(*arm)}: documents"):
                server.generate(encode(text.messages(next(iter(text.records)))), max_new_tokens=1)
        for number in track(range(done, rounds), description="rounds"):
            draws = random.Random(number)
            names = [draws.sample(list(text.records), n) for text in texts]
            # Documents take turns in pairs of questions, as when somebody asks back.
            asked = [
                (text, name)
                for at in range(0, n, 2)
                for text, of_text in zip(texts, names, strict=True)
                for name in of_text[at : at + 2]
            ]
            for policy, bias in draws.sample(arms, len(arms)):
                server = servers[policy, bias]
                key = {"context": length, "throttled": throttled, "round": number}
                arm_key = {"arm": arm_name(policy, bias), "policy": policy, "bias": bias}
                for what, those, tokens in (
                    ("questions", asked, ANSWER_TOKENS),
                    ("decode", asked[::2], DECODE_TOKENS),
                ):
                    rows.append({**key, "what": what, **arm_key, **answer(server, those, tokens)})
            compare(rows)
            write_results("pages_latency", rows, out=out)
    print_rows("Milliseconds a token, and as parts of the best independent choice's", summary(rows))


if __name__ == "__main__":
    typer.run(main)

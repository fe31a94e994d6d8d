"""What a further token of an answer takes of a trained model: reading all of the context, or chosen pages.

    python benchmark/real_model/decode.py --model .cache/models/smollm2

All servers run at once and take turns, one request at a time, over contexts that lie in their caches; each
round has another order. ``dense`` copies no KV (this project's attention on a CPU) and stands for the best
dense baseline; ``upstream`` is sglang's own attention there, which does. A tiered server has its whole pool
on the host and, codes of the pool included, memory for three quarters of the longest context on the device.
The JSON has the load of the machine before each round.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from tokenizers import Tokenizer

from benchmark.real_model.times import windows
from benchmark.results import RESULTS, print_rows, write_results
from benchmark.sparse.streamed import streamed

from support.served import script_server

STOCK = ("--kv-policy", "default")
TIERED = ("--kv-policy", "importance", "--kv-importance-source", "none", "--kv-residency", "tiered")
ARMS: dict[str, tuple[str, ...]] = {
    "dense": STOCK,
    "upstream": STOCK,
    "tiered all": TIERED,
    "token": (*TIERED, "--kv-sparse-selector", "token"),
    "bits": (*TIERED, "--kv-sparse-selector", "bits"),
}
BASELINE = "dense"


def flags_of(arm: str, longest: int, budget: float) -> list[str]:
    pool = ["--max-total-tokens", str(2 * longest), "--page-size", "16", "--max-running-requests", "2"]
    device = ["--kv-device-tokens", str(3 * longest // 4)] if ARMS[arm][: len(TIERED)] == TIERED else []
    share = ["--kv-sparse-budget", str(budget)] if "--kv-sparse-selector" in ARMS[arm] else []
    return [*ARMS[arm], *pool, *device, *share]


def main(
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    text: Annotated[list[Path] | None, typer.Option(help="Files of real text; this project's pages.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the contexts.")] = "4096,8000",
    budget: Annotated[float, typer.Option(help="Share of the pages that is read.")] = 0.1,
    tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Answers of each arm and context.")] = 7,
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "real_model_decode.json",
) -> None:
    """Measures and writes the JSON."""
    model = model.absolute()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    files = text or sorted((ROOT / "docs").glob("*.md"))
    ids = tokenizer.encode("\n\n".join(file.read_text(encoding="utf-8") for file in files)).ids
    sizes = [int(size) for size in lengths.split(",")]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        servers = {}
        for arm in track(ARMS, description="servers"):
            env = {"SGL_IMPORTANCE_CPU_ATTENTION": "upstream"} if arm == "upstream" else None
            flags = flags_of(arm, max(sizes), budget)
            server = script_server(*flags, model=model, imports_anew=True, env=env)
            servers[arm] = stack.enter_context(server)
        prompts = {size: windows(ids, size, 1)[0] for size in sizes}
        turns = [(size, number) for size in sizes for number in range(-1, rounds)]
        for size, number in track(turns, description="rounds"):  # the first of each fills the caches
            shift = number % len(ARMS)
            load = os.getloadavg()[0]
            for arm in [*ARMS][shift:] + [*ARMS][:shift]:
                answer = streamed(servers[arm], prompts[size], tokens)
                if number >= 0:
                    key = {"tokens": size, "arm": arm, "round": number, "load": load}
                    rows.append({**key, "cached": answer.cached, "decode_ms": 1000 * median(answer.steps)})
            write_results("real_model_decode", rows, out=out)
    print_rows("Milliseconds a token", medians(rows))


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each context and arm: medians over rounds, of milliseconds and of ratios to the baseline."""
    found = []
    for size, arm in dict.fromkeys((row["tokens"], row["arm"]) for row in rows):
        own = {row["round"]: row["decode_ms"] for row in rows if (row["tokens"], row["arm"]) == (size, arm)}
        base = {
            row["round"]: row["decode_ms"] for row in rows if (row["tokens"], row["arm"]) == (size, BASELINE)
        }
        ratios = sorted(own[number] / base[number] for number in own.keys() & base.keys())
        found.append(
            {
                "tokens": size,
                "arm": arm,
                "decode_ms": median(own.values()),
                "times_dense": median(ratios),
                "lowest": ratios[0],
                "highest": ratios[-1],
            }
        )
    return found


if __name__ == "__main__":
    typer.run(main)

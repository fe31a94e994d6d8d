"""Whether victims that are cut from their tails save a server tokens: real servers, cut and whole.

Two pairs of loads, both at a quarter of what their traffic goes on asking for: ``agents`` and ``documents``
of the serving benchmark, with the embedded model, by which the real tree without HTTP was judged; and
``recorded agents`` and ``recorded documents`` of benchmark/peers, on the first layer of a model. One request
at a time; sglang's own chunks, unless ``--chunk`` says otherwise.

    python benchmark/parts_of_leaves_served.py --data DIR --model .cache/models/smollm2 --resume
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.environments import PLACE
from benchmark.peers.run import kept_workload
from benchmark.peers.slices import first_layers
from benchmark.peers.workloads import UNIQUE, Texts
from benchmark.results import RESULTS, rows_so_far, write_results
from benchmark.serving.workloads import load_parameters, make_workload
from sgl_importance.embedded_model import checkpoint_path

from support import warm_start
from support.servers import ServerProcess

TIERS = ("device", "write_through", "write_back")
HOST_RATIO = 2
ANSWER_TOKENS = 2


class Load(NamedTuple):
    """Prompts, and the server that they are sent to.

    Attributes:
        stream: its name where it is made.
        pool: tokens.
    """

    stream: str
    pool: int
    page: int
    is_recorded: bool = False


LOADS = {
    "agents": Load("agents-4x", 4_096, 16),
    "documents": Load("documents", 3_328, 16),
    "recorded agents": Load("agents", UNIQUE["agents"] // 4, 32, is_recorded=True),
    "recorded documents": Load("documents", UNIQUE["documents"] // 4, 32, is_recorded=True),
}


def measure(
    load: Load, prompts: list[list[int]], tiers: str, arm: str, model: Path, chunk: int
) -> dict[str, Any]:
    """One server, from its start."""
    flags = ["--kv-policy", "importance", "--page-size", str(load.page), "--max-total-tokens", str(load.pool)]
    if chunk:
        flags += ["--chunked-prefill-size", str(chunk)]
    if tiers != "device":
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)]
        flags += ["--hicache-write-policy", tiers]
    env = {} if arm == "cut" else {"SGL_IMPORTANCE_WHOLE_LEAVES": "1"}
    with ServerProcess(*flags, model=model, env=env) as server:
        assert server.get("/server_info")["max_total_num_tokens"] == load.pool
        found = 0
        for prompt in track(prompts, description=f"{load.stream} {tiers} {arm}"):
            found += server.generate(prompt, max_new_tokens=ANSWER_TOKENS)["meta_info"]["cached_tokens"]
        given = server.get("/server_info")["chunked_prefill_size"]
        log = server.log()
    assert "KV importance: fault" not in log
    tokens = sum(map(len, prompts))
    return {"chunk": given, "requests": len(prompts), "prompt_tokens": tokens, "computed": tokens - found}


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/ and prompts/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    loads: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(LOADS),
    tiers: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(TIERS),
    chunk: Annotated[int, typer.Option(min=0, help="Tokens; 0 is sglang's.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that are there.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "parts_of_leaves_served.json",
) -> None:
    """Measures and writes the results, row by row."""
    warm_start.is_on = True  # starts are not measured
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    parameters = load_parameters()
    rows = rows_so_far(out) if resume else []
    fields = ("load", "tiers", "seed", "asked_chunk", "arm")
    done = {tuple(row[name] for name in fields) for row in rows}

    @cache
    def texts() -> Texts:
        return Texts(data, tokenizer)

    for number, tier, name in product(range(seeds), tiers.split(","), loads.split(",")):
        load = LOADS[name]
        seed = number + 1 if load.is_recorded else [parameters["seed"], *range(1, seeds)][number]
        missing = [arm for arm in ("whole", "cut") if (name, tier, seed, chunk, arm) not in done]
        if not missing:
            continue
        if load.is_recorded:
            prompts = [request.ids for request in kept_workload(load.stream, seed, texts)]
        else:
            made = make_workload(load.stream, {**parameters, "seed": seed}).requests
            prompts = [list(request.token_ids()) for request in made]
        served = first_layers(model, 1, PLACE) if load.is_recorded else checkpoint_path()
        for arm in missing:
            row = dict(zip(fields, (name, tier, seed, chunk, arm), strict=True))
            row |= {"pool": load.pool, **measure(load, prompts, tier, arm, served, chunk)}
            rows.append(row)
            write_results("parts_of_leaves_served", rows, out=out)


if __name__ == "__main__":
    typer.run(main)

"""Whether a server, the shadow caches of ``observe`` and replays compute the same tokens.

Real servers with the embedded model serve the first requests of two workloads of the serving benchmark under
stock's recency (``observe``) and ours, one at a time and eight at a time, with the device alone and with a
host tier. Their recordings go through shadow caches and through the node-granular replay, with the server's
pools and prefill chunks. Beside them stands the replay of single blocks, a bound that no server reaches.

    python benchmark/agreement.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from results import RESULTS, print_rows, rows_so_far, write_results
from rich.progress import track

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.observe.trace import open_trace
from sgl_importance.tiers import Tier
from sgl_importance_lab.replay.formats.detect import read_trace
from sgl_importance_lab.replay.lower_tiers.served_tiers import replay_served_tiers
from sgl_importance_lab.replay.lower_tiers.tiered_replay import replay_tiers
from sgl_importance_lab.replay.lower_tiers.tiered_setup import TieredSetup, TierSize, WritePolicy
from sgl_importance_lab.replay.policy_registry import IMPORTANCE
from sgl_importance_lab.replay.replay_runner import ReplayMode, choose_replay
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.sizing.recorded_pair import recorded_pair

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "test")]

from benchmark.serving.workloads import load_parameters, make_workload

from support.recordings import wait_until_recorded
from support.servers import ServerProcess

PAGE, POOL, CHUNK, HOST_RATIO = 16, 4096, 256, 2
ANSWER_TOKENS = 8
POLICIES = {"lru": "observe", IMPORTANCE: "importance"}
DEVICE = "device"
CASES = [
    *product(("agents-4x", "documents"), POLICIES, (DEVICE,), (1, 8)),
    *product(("agents-4x",), POLICIES, ("write_through", "write_back"), (1, 8)),
    *product(("documents",), POLICIES, ("write_through", "write_back"), (1,)),
]


def serve(prompts: Sequence[Sequence[int]], flags: Sequence[str], at_a_time: int, folder: Path) -> list[int]:
    """Prompt tokens that a server found of each prompt."""
    with ServerProcess(*flags, "--kv-importance-trace", str(folder), model=checkpoint_path()) as server:
        with ThreadPoolExecutor(at_a_time) as clients:
            asked = clients.map(
                lambda prompt: server.generate(prompt, max_new_tokens=ANSWER_TOKENS)["meta_info"], prompts
            )
            replies = list(track(asked, total=len(prompts), description="serving"))
        wait_until_recorded(folder, [reply["id"] for reply in replies])
    return [reply["cached_tokens"] for reply in replies]


def replayed(trace: Trace, policy: str, tiers: str, host_blocks: int) -> dict[str, int | None]:
    """Tokens that replays compute: of whole nodes, and of single blocks in tiers; None where these cannot
    rank the host by the policy."""
    if tiers == DEVICE:
        counts = choose_replay(policy, ReplayMode.NODES, chunk_tokens=CHUNK)(trace, POOL // PAGE)
        return {"replay": int(trace.input_tokens.sum()) - counts.hit_tokens, "replay_of_blocks": None}
    sizes = (
        TierSize(Tier.DEVICE, POOL // PAGE, policy, 1.0),
        TierSize(Tier.HOST, host_blocks, policy, 1.0),
    )
    costs = {"prefill_tokens_per_second": 1.0, "bytes_per_token": 1}
    nodes = TieredSetup(sizes, WritePolicy(tiers), **costs, chunk_tokens=CHUNK)
    blocks = None
    if (policy, tiers) != (IMPORTANCE, WritePolicy.WRITE_BACK):
        blocks = replay_tiers(trace, TieredSetup(sizes, WritePolicy(tiers), **costs)).recomputed_tokens
    return {"replay": replay_served_tiers(trace, nodes).recomputed_tokens, "replay_of_blocks": blocks}


def measure(workload: str, policy: str, tiers: str, at_a_time: int, requests: int) -> dict[str, Any]:
    """One server; computed tokens by all."""
    made = make_workload(workload, load_parameters()).requests[:requests]
    prompts = [request.token_ids() for request in made]
    flags = ["--kv-policy", POLICIES[policy], "--page-size", str(PAGE), "--max-total-tokens", str(POOL)]
    flags += ["--chunked-prefill-size", str(CHUNK)]
    if tiers != DEVICE:
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)]
        flags += ["--hicache-write-policy", tiers]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = serve(prompts, flags, at_a_time, folder)
        recording = open_trace(folder)
        pair = recorded_pair(recording)
        assert pair is not None
        compared = pair.comparison
        trace = read_trace(folder)
        tokens = int(trace.input_tokens.sum())  # with those of the request that warms the server up
        hits = compared.lru_hit_tokens if policy == "lru" else compared.other_hit_tokens
        computed = {
            "server": tokens - sum(found),
            "shadow": tokens - hits,
            **replayed(trace, policy, tiers, recording.header.capacity_tokens.get(Tier.HOST, 0) // PAGE),
        }
    assert compared.requests == trace.num_requests
    return {
        "workload": workload,
        "policy": policy,
        "tiers": tiers,
        "at_a_time": at_a_time,
        "requests": len(prompts),
        "prompt_tokens": tokens,
        **computed,
    }


def main(
    requests: Annotated[int, typer.Option(min=1, help="Of each workload.")] = 160,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that are there.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the results, row by row."""
    rows = rows_so_far(out or RESULTS / "agreement.json") if resume else []
    done = {(row["workload"], row["policy"], row["tiers"], row["at_a_time"]) for row in rows}
    for case in CASES:
        if case not in done:
            rows.append(measure(*case, requests))
            write_results("agreement", rows, out=out)
    print_rows("Computed tokens", rows)


if __name__ == "__main__":
    typer.run(main)

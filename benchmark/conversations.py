"""How much of recorded and made-up traffic goes on from an earlier turn with a longer prompt.

    python benchmark/conversations.py claude_code_sessions.jsonl.gz mooncake_conversation.jsonl agents

Where the share of late is a half or more, turns rank nodes though nobody tells how answers end
(``sgl_importance.reuse.conversations``). A row is a traffic, in its first order: its requests, that share
over all of them, and the share of requests whose turn ranks. No policy is replayed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from published import traffic
from results import RESULTS, print_rows, write_results

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmark.serving.replayed import as_trace
from benchmark.serving.workloads import make_workload
from sgl_importance_lab.replay.sessions import block_facts
from sgl_importance_lab.replay.trace import Trace
from sgl_importance_lab.replay.trace_turns import TraceTurns, longer_requests

PARAMETERS = Path(__file__).parent / "serving" / "parameters.json"


def traces(sessions_file: Path, mooncake: Path, folder: Path) -> Iterator[Trace]:
    for kind in traffic(sessions_file, mooncake, folder, 1):
        if kind.name != "agents":  # the same as those untold, but for what is told
            yield replace(kind.order(0), name=kind.name)
    parameters = json.loads(PARAMETERS.read_text())
    for name in parameters["workloads"]:
        yield as_trace(name, make_workload(name, parameters).requests, parameters["page_tokens"])


def main(
    sessions_file: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz, or a file like it.")],
    mooncake: Annotated[Path, typer.Argument(help="mooncake_conversation.jsonl.")],
    folder: Annotated[Path, typer.Argument(help="Folder with the folders miniswe and taubench.")],
    out: Annotated[Path, typer.Option(help="JSON file.")] = RESULTS / "conversations.json",
) -> None:
    rows: list[dict[str, Any]] = []
    for trace in traces(sessions_file, mooncake, folder):
        turns = TraceTurns(trace, block_facts(trace))
        rows.append(
            {
                "traffic": trace.name,
                "requests": trace.num_requests,
                "longer": round(float(np.mean(longer_requests(trace, turns.before))), 3),
                "ranked_by_turns": round(float(turns.ranks.mean()), 3),
            }
        )
    print_rows("Requests that go on with a longer prompt", rows)
    print(f"written: {write_results('conversations', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

"""What choosing by the last step's query costs a served model, beside the exact order.

    python benchmark/real_model/ahead_served.py --model .cache/models/smollm2

Two servers of tiered pages with ``bits``, one of which chooses each step's pages by the query of the step
before (``last_step/``). Both decode given continuations of windows of text, those of ``ahead.py``, one
request at a time; the first also reading everything. Tokens are forced by a logit processor, and their
distributions compared over the 20 likeliest. Intervals are bootstraps over windows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.real_model.ahead import KINDS, continued
from benchmark.results import print_rows, write_results
from benchmark.sparse.real.windows import default_texts, make_windows
from benchmark.sparse.real_model import PAGE
from sgl_importance_lab.agree.agreement import Step, kl
from sgl_importance_lab.agree.forced_answer import LEAD, processor_text, without_lead
from sgl_importance_lab.study.statistics import mean_of

from support.python_path import python_path
from support.served import script_server
from support.servers import ServerProcess

ARMS = {"exact": None, "last step": python_path(Path(__file__).parent / "last_step")}
ALIKE = 2
"""Steps of an answer that read alike: the prompt's pass, and one that no step was before."""


def forced(
    server: ServerProcess, prompt: list[int], answer: list[int], *, reads_all: bool = False
) -> list[Step]:
    """Steps of a given answer."""
    reply = server.post(
        "/generate",
        {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": len(answer),
                "ignore_eos": True,
                "custom_params": {"forced": answer, "lead": LEAD},
            },
            "custom_logit_processor": processor_text(),
            "return_logprob": True,
            "top_logprobs_num": 20,
            "kv_hints": {"selector": "all"} if reads_all else {},
        },
    )
    assert reply["output_ids"] == answer, "the server did not decode the answer that it was given"
    told, steps = reply["meta_info"], []
    for own, likeliest in zip(told["output_token_logprobs"], told["output_top_logprobs"], strict=True):
        found = {str(token): float(value) for value, token, *_ in (*reversed(likeliest), own)}
        steps.append(Step(str(own[1]), without_lead(found, str(own[1]))))
    return steps


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each length and order."""
    found = []
    for tokens, order in dict.fromkeys((row["tokens"], row["order"]) for row in rows):
        own = [row for row in rows if (row["tokens"], row["order"]) == (tokens, order)]
        numbers = {name: mean_of([row[name] for row in own]) for name in ("equal", *KINDS)}
        row = {"tokens": tokens, "order": order, "windows": len(own)}
        found.append(row | {name: asdict(value) for name, value in numbers.items()})
    return found


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint, as scripts/get_model.py prints it.")],
    tokens: Annotated[str, typer.Option(help="Of windows, separated by commas.")] = "2048,4096",
    windows: Annotated[int, typer.Option(min=1, help="Of each length and kind of text.")] = 1,
    scored: Annotated[int, typer.Option(min=3, help="Tokens of each continuation.")] = 64,
    share: Annotated[float, typer.Option(help="Of pages that are read.")] = 0.1,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    """Measures and writes the results."""
    model = model.absolute()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sizes = [int(size) for size in tokens.split(",")]
    texts = [
        continued(window, size, scored)
        for size in sizes
        for name, text in default_texts().items()
        for window in make_windows(
            tokenizer, name, text, tokens=size + scored + PAGE, count=windows, page_size=PAGE
        )
    ]
    texts.sort(key=lambda window: window.number)  # one of each kind and length before the second of any
    flags = (
        *("--kv-policy", "importance", "--kv-importance-source", "none", "--kv-residency", "tiered"),
        *("--kv-sparse-selector", "bits", "--kv-sparse-budget", str(share), "--kv-sparse-min-context", "0"),
        *("--max-total-tokens", str(2 * max(sizes)), "--kv-device-tokens", str(max(sizes))),
        *("--page-size", str(PAGE), "--max-running-requests", "2"),
        *("--enable-custom-logit-processor", "--disable-overlap-schedule"),
    )
    rows = []
    with ExitStack() as stack:
        servers = {
            arm: stack.enter_context(script_server(*flags, model=model, imports_anew=True, env=env))
            for arm, env in ARMS.items()
        }
        for window in track(texts, description="windows"):
            prompt = window.tokens.tolist()
            new = [
                {"source": window.source, "number": window.number, "tokens": len(prompt), "order": arm}
                | {"equal": 0.0}
                for arm in servers
            ]
            for task in window.tasks:
                asked = [*prompt, *task.cue], list(task.scored)
                dense = forced(servers["exact"], *asked, reads_all=True)
                for row, server in zip(new, servers.values(), strict=True):
                    steps = forced(server, *asked)
                    pairs = list(zip(dense, steps, strict=True))[ALIKE:]
                    row["equal"] += (
                        sum(a.likeliest == b.likeliest for a, b in pairs) / len(pairs) / len(KINDS)
                    )
                    row[task.kind] = sum(kl(a.logprobs, b.logprobs) for a, b in pairs) / len(pairs)
            rows += new
            found = summaries(rows)
            write_results("copies_ahead_served", found, out=out)
    shown = [
        {name: value["value"] if isinstance(value, dict) else value for name, value in row.items()}
        for row in found
    ]
    print_rows("Copies ahead, served", shown)


if __name__ == "__main__":
    typer.run(main)

"""Why recorded agents' prompts are computed: the account of misses over the real tree, by pool and policy.

    python benchmark/miss_reasons.py AGENTS TOKENIZER

``AGENTS`` is a folder of one of the LMCache agent traces (github.com/LMCache/lmcache-agent-trace) and
``TOKENIZER`` a tokenizer.json. All sessions are alive and take turns at random. Requests run one at a time,
without answers, in chunks of 2,048 tokens. Pools are parts of the unique tokens, which are counted in pages
of 16. A prompt that is longer than the pool is refused, as a server does. Reasons are those of the first
order of turns; ``computed_by_order`` has the computed tokens of each. The last row has the line in front with
which Claude Code begins its system prompt, and whose hash changes with each request.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from results import print_rows, write_results
from rich.progress import track
from tokenizers import Tokenizer
from volatile_beginnings import PAGE, Request, agent_prompts, billing_header, tokenized, with_field

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from sgl_importance.nodes.digests import iterate_chain, root_digest
from sgl_importance.options.importance_options import ImportanceOptions

from support.drivers.tree_driver import TreeDriver

CHUNK = 2048
PARTS = (8, 4, 2)
ANSWER_ROOM = 64
RECORDED, HEADED = "as recorded", "with a hash in front"
EVICTS_BY = {"observe": "LRU", "importance": "ours"}
FIGURE = ROOT / "docs/img/misses.png"


def unique_tokens(requests: list[Request]) -> int:
    """Tokens of all whole pages that differ in themselves or in what is in front of them."""
    return PAGE * len(
        {digest for each in requests for digest in iterate_chain(root_digest(), each.tokens, PAGE)}
    )


def accounted(requests: list[Request], policy: str, pool: int) -> dict[str, Any]:
    """Tokens by reason of all requests that the pool can hold."""
    longest = max(len(each.tokens) for each in requests)
    driver = TreeDriver(
        tokens=pool,
        page_size=PAGE,
        requests=4,
        max_context=longest + ANSWER_ROOM,
        options=ImportanceOptions(policy=policy),
    )
    refused = prompt_tokens = found = 0
    for each in requests:
        if len(each.tokens) + ANSWER_ROOM > pool:
            refused += 1
            continue
        request = driver.admit(list(each.tokens))
        prompt_tokens, found = prompt_tokens + len(each.tokens), found + request.prefix_len
        for stop in range(request.prefix_len + CHUNK, len(each.tokens), CHUNK):
            driver.prefill(request, up_to=stop)
        driver.prefill(request)
        driver.finish(request)
    missed = driver.component.state.counters.missed_tokens
    reasons = {str(reason): tokens for reason, tokens in missed.items() if tokens}
    assert found + sum(reasons.values()) == prompt_tokens, "the reasons add up"
    return {
        "requests": len(requests) - refused,
        "refused": refused,
        "prompt_tokens": prompt_tokens,
        "found_tokens": found,
        "missed": reasons,
    }


def random_turns(folder: Path, seed: int) -> list[tuple[float, str]]:
    """Every prompt, with the number of its turn for a time; those of a session stay in their order."""
    sessions = [agent_prompts([file]) for file in sorted(folder.glob("*.jsonl"))]
    turns = [number for number, prompts in enumerate(sessions) for _ in prompts]
    random.Random(seed).shuffle(turns)
    waiting = [iter(prompts) for prompts in sessions]
    return [(float(turn), next(waiting[number])[1]) for turn, number in enumerate(turns)]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar for each row: the share of the prompts' tokens that was found, and of each reason."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = ["found", *dict.fromkeys(reason for row in rows for reason in row["missed"])]
    names = [f"{row['beginning']}, 1/{row['part']} of unique, {EVICTS_BY[row['policy']]}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(9, 3.2))
    left = [0.0] * len(rows)
    for part in parts:
        tokens = [row["found_tokens"] if part == "found" else row["missed"].get(part, 0) for row in rows]
        shares = [each / row["prompt_tokens"] for each, row in zip(tokens, rows, strict=True)]
        axes.barh(names, shares, left=left, label=part.replace("_", " "))
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("share of the prompts' tokens")
    figure.legend(ncols=len(parts), fontsize=8, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))  # room for the legend
    figure.savefig(path, dpi=120)


def main(
    agents: Annotated[Path, typer.Argument(help="Folder of JSON lines, a file a session.")],
    tokenizer: Annotated[Path, typer.Argument(help="tokenizer.json")],
    orders: Annotated[int, typer.Option(min=1, help="Of turns.")] = 10,
    figure: Annotated[Path, typer.Option(help="Picture of the rows.")] = FIGURE,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures, and writes the JSON and the picture."""
    encode = Tokenizer.from_file(str(tokenizer))
    sent = [random_turns(agents, order) for order in range(orders)]
    headed = list(with_field(sent[0], billing_header))
    requests = {
        RECORDED: [list(tokenized(each, encode)) for each in sent],
        HEADED: [list(tokenized(headed, encode))],
    }
    unique = unique_tokens(requests[RECORDED][0])
    rows = []
    cells = [(RECORDED, part, policy) for part in PARTS for policy in EVICTS_BY]
    for beginning, part, policy in track([*cells, (HEADED, PARTS[-1], "importance")], "replaying"):
        row = {"prompts": agents.name, "beginning": beginning, "part": part, "policy": policy}
        found = [accounted(order, policy, unique // part) for order in requests[beginning]]
        computed = [sum(each["missed"].values()) for each in found]
        rows.append({**row, "unique_tokens": unique, **found[0], "computed_by_order": computed})
    print_rows("tokens", [{**row, "missed": sum(row["missed"].values())} for row in rows])
    draw(rows, figure)
    print(f"written: {write_results('miss_reasons', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

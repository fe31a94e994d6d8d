"""Which pages to keep on the device, where steps read chosen ones: loads by policy, and with a resident bias.

    python benchmark/sparse/residency.py

The embedded model, one request at a time, a tenth of the context chosen by ``rep``, slots for a fifth of it.
``questions`` about cached documents, which take turns in pairs; ``decode``: answers of 128 tokens. Counts of
pages only, so other work on the machine changes nothing.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.results import print_rows, write_results
from benchmark.sparse.page_counts import PageCounts
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance.sparse.device_plan import KvShape, plan_device
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document

from support.config_file import config_flags
from support.served import script_server
from support.servers import ServerProcess

SHAPE = KvShape(layers=4, kv_heads=2, key_dim=32, value_dim=32, item_bytes=4)
PAGE, REP_VECTORS = 16, 4
SELECTED, SLOTS = 0.1, 0.2
QUESTION_TOKENS, ANSWER_TOKENS, DECODE_TOKENS = 16, 8, 128
ARMS = tuple(("lru", bias) for bias in (0.0, 1.0, 3.0))


def device_tokens(pool_tokens: int, slots: int) -> int:
    """Device memory that holds so many slots beside all else."""
    tokens = slots * PAGE
    while True:
        plan = plan_device(
            SHAPE,
            page_size=PAGE,
            pool_tokens=pool_tokens,
            device_tokens=tokens,
            max_requests=1,
            kept_bytes=REP_VECTORS * SHAPE.key_dim,
        )
        if plan.num_slots >= slots:
            return tokens
        tokens += PAGE


def arm_flags(pool: int, room: int, policy: str, bias: float) -> tuple[str, ...]:
    """Of a server that keeps pages by a policy.

    Args:
        pool: tokens that it holds.
        room: device memory, in tokens.
        policy: of residency.
        bias: towards resident pages.
    """
    return (
        *("--kv-policy", "importance", "--kv-residency", "tiered", "--kv-device-tokens", str(room)),
        *("--max-total-tokens", str(pool), "--max-running-requests", "1", "--page-size", str(PAGE)),
        *("--kv-sparse-selector", "bits", "--kv-sparse-budget", str(SELECTED)),
        *("--kv-sparse-prompt-tokens", str(QUESTION_TOKENS)),
        *config_flags(tiered={"policy": policy}, sparse={"resident_bias": bias}),
    )


def questions(server: ServerProcess, documents: list[ProbeDocument], n: int) -> dict[str, Any]:
    draws = random.Random(1)
    asked = [(document, name) for document in documents for name in draws.sample(list(document.records), n)]
    # Two of a document in a row, as when somebody asks back.
    turns = [
        pair
        for at in range(0, n, 2)
        for first in range(len(documents))
        for pair in asked[first * n + at :][:2]
    ]
    for document in documents:
        server.chat(document.messages(next(iter(document.records))), max_tokens=1)
    traffic, right = PageCounts(server), 0
    for document, name in turns:
        reply = server.chat(document.messages(name), max_tokens=ANSWER_TOKENS)
        right += reply["choices"][0]["message"]["content"].strip() == document.records[name]
    return {"exact_match": right / len(turns), **traffic.since("selected", "loaded")}


def decode(server: ServerProcess, documents: list[ProbeDocument]) -> dict[str, Any]:
    selected = loaded = 0
    for document in documents:
        messages = document.messages(next(iter(document.records)))
        server.chat(messages, max_tokens=1)
        traffic = PageCounts(server)
        server.chat(messages, max_tokens=DECODE_TOKENS, ignore_eos=True)
        more = traffic.since("selected", "loaded")
        selected, loaded = selected + more["selected"], loaded + more["loaded"]
    return {"exact_match": None, "selected": selected, "loaded": loaded}


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of a document, separated by commas.")] = "8192,16384",
    documents: Annotated[int, typer.Option(help="Documents of each length.")] = 2,
    n: Annotated[int, typer.Option(help="Questions about each document.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there.")] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    for length in map(int, lengths.split(",")):
        pool = (documents + 1) * (length + 256) // PAGE * PAGE
        room = device_tokens(pool, int(SLOTS * length / PAGE))
        texts = [make_document(length - 64, seed) for seed in range(documents)]
        for policy, bias in track(ARMS, description=f"{length:,} tokens"):
            with script_server(*arm_flags(pool, room, policy, bias), model=checkpoint_path()) as server:
                parts = {"questions": questions(server, texts, n), "decode": decode(server, texts)}
            for what, found in parts.items():
                key = {"context": length, "what": what, "policy": policy, "bias": bias}
                rows.append({**key, **found, "loaded_share": found["loaded"] / found["selected"]})
            write_results("pages_residency", rows, out=out)
    for row in rows:
        (lru,) = (
            each["loaded_share"]
            for each in rows
            if all(each[name] == row[name] for name in ("context", "what"))
            and (each["policy"], each["bias"]) == ("lru", 0.0)
        )
        row["of_lru"] = row["loaded_share"] / lru
    write_results("pages_residency", rows, out=out)
    print_rows("Pages loaded of those chosen", rows)


if __name__ == "__main__":
    typer.run(main)

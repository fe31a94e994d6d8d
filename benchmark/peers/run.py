"""The same prompts to vLLM, stock sglang and ours: what each computes of them, and when first tokens come.

    python benchmark/peers/run.py --data DIR --model .cache/models/smollm2 --seeds 10 --resume

``DIR`` holds the public recordings that benchmark/peers/workloads.py reads. Environments of peers are made in
``.cache/peers``. One server at a time; pool, page, chunk, precision, answers' length and requests at a time
are the same for all, and each server is asked how large its pool is. Counts hang on token ids, pool and
scheduling, not on weights: they are taken on the first layers of the model (``--layers``), as
``--layers 0``, the whole model, would give them.

Ours is started anew for every row, so that it begins each without knowledge; the others, which learn
nothing, are emptied. The pool is a share (``--share``) of the different tokens of a workload's prompts.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from threading import Event
from typing import Annotated, Any, NamedTuple

import httpx
import msgspec
import numpy as np
import typer
from rich.progress import track
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
# ruff: noqa: E402
from benchmark.peers.arms import ARMS
from benchmark.peers.environments import PLACE
from benchmark.peers.served import Served
from benchmark.peers.slices import first_layers
from benchmark.peers.workloads import UNIQUE, WORKLOADS, Sent, Texts, make_workload, unique_tokens
from benchmark.results import RESULTS, rows_so_far, write_results

from support import warm_start

ANSWER_TOKENS = 2
SECONDS = 1800.0


class Key(NamedTuple):
    """What a row is of."""

    arm: str
    workload: str
    seed: int
    pool: int
    clients: int
    layers: int


def kept_workload(name: str, seed: int, texts: Callable[[], Texts]) -> list[Sent]:
    """Made once: tokenising the recordings takes a while."""
    file = PLACE / "workloads" / f"{name}-{seed}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(make_workload(name, texts(), seed)))
    return msgspec.json.decode(file.read_bytes(), type=list[Sent])


def ask(client: httpx.Client, served: Served, ids: list[int], session: str | None) -> dict[str, Any]:
    """One greedy answer: seconds to its first token, cached tokens, text.

    Args:
        session: that the request is told to belong to, where the server is told.
    """
    body = {
        "model": served.model,
        "prompt": ids,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if session is not None:
        body["session_id"] = session
    start = time.perf_counter()
    first, text, usage = None, "", None
    with client.stream("POST", f"{served.url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            if event["choices"]:
                first = first or time.perf_counter() - start
                text += event["choices"][0]["text"]
            usage = event.get("usage") or usage
    assert usage is not None
    assert usage["prompt_tokens"] == len(ids)
    details = usage.get("prompt_tokens_details") or {}
    return {"ttft": first, "cached": details.get("cached_tokens") or 0, "text": text}


def close_session(client: httpx.Client, served: Served, session: str) -> None:
    """Tells the server that nobody will go on with it."""
    client.post(f"{served.url}/close_session", json={"session_id": session}).raise_for_status()


def send(served: Served, requests: list[Sent], clients: int, title: str, tells: bool) -> list[dict[str, Any]]:
    """Closed loop: each client takes the next request, and waits for the one before it of its session.

    Args:
        tells: whether the server is told which session a request belongs to, and when one is over.
    """
    done = [Event() for _ in requests]
    before: dict[int, Event] = {}
    waits = []
    for request, event in zip(requests, done, strict=True):
        waits.append(before.get(request.session))
        before[request.session] = event

    def one(number: int) -> dict[str, Any]:
        earlier = waits[number]
        if earlier is not None:
            earlier.wait()
        request = requests[number]
        session = str(request.session) if tells else None
        try:
            answer = ask(client, served, request.ids, session)
            if session is not None and request.is_last:
                close_session(client, served, session)
            return answer
        finally:
            done[number].set()

    anew = httpx.Limits(max_keepalive_connections=0)  # llama.cpp closes a connection behind each stream
    with (
        httpx.Client(timeout=SECONDS, trust_env=False, limits=anew) as client,
        ThreadPoolExecutor(clients) as pool,
    ):
        return list(track(pool.map(one, range(len(requests))), total=len(requests), description=title))


def row_of(served: Served, requests: list[Sent], clients: int, title: str, tells: bool) -> dict[str, Any]:
    if tells and not any(request.is_last for request in requests):
        kept = PLACE / "workloads"
        raise typer.BadParameter(f"no session ends: leave out the told arms, or delete {kept} if it is old")
    start, cpu_seconds = time.perf_counter(), served.cpu_seconds()
    answers = send(served, requests, clients, title, tells)
    seconds = time.perf_counter() - start
    assert clients > 1 or answers[0]["cached"] == 0, "the server was not empty"
    prompt = sum(len(request.ids) for request in requests)
    cached = sum(answer["cached"] for answer in answers)
    texts = (hashlib.sha256(answer["text"].encode()).hexdigest()[:6] for answer in answers)
    ttfts = [answer["ttft"] for answer in answers]
    return {
        "requests": len(requests),
        "sessions": len({request.session for request in requests}),
        "cut_sessions": len({request.session for request in requests if request.is_cut}),
        "unique_tokens": unique_tokens(requests),
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "ttft_mean": fmean(ttfts),
        "ttft_p50": float(np.quantile(ttfts, 0.5)),
        "ttft_p95": float(np.quantile(ttfts, 0.95)),
        "seconds": seconds,
        "cpu_seconds": served.cpu_seconds() - cpu_seconds,
        "memory_bytes": served.memory_bytes(),
        "answers": " ".join(texts),
        "missed": served.missed(),
        "predicted": served.predicted(len(requests)),
        "flags": " ".join(served.flags),
    }


def main(
    data: Annotated[Path, typer.Option(help="Folder with agents/ and prompts/.")],
    model: Annotated[Path, typer.Option(help="Folder of a model, as scripts/get_model.py prints it.")],
    arms: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(ARMS),
    workloads: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(WORKLOADS),
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 10,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 1,
    share: Annotated[
        float, typer.Option(help="Of a workload's different tokens, that the pool holds.")
    ] = 0.25,
    clients: Annotated[int, typer.Option(min=1, help="Requests in flight, at most.")] = 1,
    layers: Annotated[int, typer.Option(min=0, help="The first so many of the model; 0 is all.")] = 1,
    resume: Annotated[bool, typer.Option(help="Measure only what the JSON lacks.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON.")] = RESULTS / "peers.json",
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers end with us
    warm_start.is_on = True  # starts are not measured
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    served_model = first_layers(model, layers, PLACE) if layers else model.absolute()
    rows = rows_so_far(out) if resume else []
    known = {Key(*(row[name] for name in Key._fields)) for row in rows}

    @cache
    def texts() -> Texts:
        return Texts(data, tokenizer)

    def measure(served: Served, key: Key, requests: list[Sent]) -> None:
        assert served.pool == key.pool, f"{key.arm} has a pool of {served.pool} tokens, not {key.pool}"
        title = f"{key.arm} {key.workload} {key.seed}"
        rows.append({**key._asdict(), **row_of(served, requests, clients, title, ARMS[key.arm].tells)})
        write_results("peers", rows, out=out)

    pools = {name: int(UNIQUE[name] * share) for name in workloads.split(",")}
    for arm, pool in product(arms.split(","), dict.fromkeys(pools.values())):
        wanted = [
            Key(arm, name, seed, pool, clients, layers)
            for name, own in pools.items()
            for seed in range(first_seed, first_seed + seeds)
            if own == pool
        ]
        missing = [key for key in wanted if key not in known]
        size = 1 if ARMS[arm].starts_anew else max(1, len(missing))
        for batch in (missing[at : at + size] for at in range(0, len(missing), size)):
            with ARMS[arm].started(served_model, pool) as served:
                for key in batch:
                    if len(batch) > 1:
                        served.empty()
                    measure(served, key, kept_workload(key.workload, key.seed, texts))


if __name__ == "__main__":
    typer.run(main)

"""Volatile beginnings in recorded prompts: which are found, and what looking for them costs the scheduler.

    python benchmark/volatile_beginnings.py AGENTS SESSIONS TOKENIZER

``AGENTS`` is a folder of the LMCache agent traces (github.com/LMCache/lmcache-agent-trace: JSON lines with
``timestamp``, ``input``, ``session_id``), ``SESSIONS`` the coding-agent sessions of kv-cache-tester
(github.com/callanjfox/kv-cache-tester: a JSON object a line, gzipped), ``TOKENIZER`` a tokenizer.json.

Prompts are run as they were sent, and once more with each of three planted fields: the line with which
Claude Code begins its system prompt, a clock, and the number of the request. The cache that they would have
met holds everything. The text of the sessions is not public: each block of 64 tokens stands as 64 numbers.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from results import print_rows, write_results
from tokenizers import Tokenizer

from sgl_importance.nodes.digests import iterate_chain, root_digest
from sgl_importance.observe.volatile.detector import VolatileBeginnings

PAGE = 16
BLOCK = 64


class Request(NamedTuple):
    """Attributes:
    seconds: since the first of all.
    tokens: of its prompt, int64.
    found_tokens: by a cache that holds everything; None where it has to be counted.
    """

    seconds: float
    tokens: array[int]
    found_tokens: int | None = None


def agent_prompts(files: Iterable[Path]) -> list[tuple[float, str]]:
    """Time in seconds and text of each prompt, in order of time."""
    lines = [json.loads(line) for file in files for line in file.open()]
    return sorted((line["timestamp"] / 1e6, line["input"]) for line in lines)


def tokenized(prompts: Iterable[tuple[float, str]], tokenizer: Tokenizer) -> Iterator[Request]:
    for seconds, text in prompts:
        yield Request(seconds, array("q", tokenizer.encode(text).ids))


def billing_header(number: int, seconds: float) -> str:
    digits = random.Random(number).randrange(16**5)
    return f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={digits:05x};\n"


def clock(number: int, seconds: float) -> str:
    return time.strftime("The time is %Y-%m-%d %H:%M:%S.\n", time.gmtime(seconds))


def counter(number: int, seconds: float) -> str:
    return f"Request {number}.\n"


FIELDS: dict[str, Callable[[int, float], str]] = {
    "billing header": billing_header,
    "clock": clock,
    "counter": counter,
}


def with_field(
    prompts: list[tuple[float, str]], make: Callable[[int, float], str]
) -> Iterator[tuple[float, str]]:
    for number, (seconds, text) in enumerate(prompts):
        yield seconds, "You are an agent. " + make(number, seconds) + text


def session_requests(file: Path, sessions: int) -> Iterator[Request]:
    """One session after the other: block ids are each session's own."""
    with gzip.open(file, "rt") as lines:
        for number, line in zip(range(sessions), lines, strict=False):
            seen = {0}
            for each in json.loads(line)["requests"]:
                if "hash_runs" not in each:
                    continue
                runs = zip(each["hash_runs"][::2], each["hash_runs"][1::2], strict=True)
                blocks = [start + index for start, count in runs for index in range(count)]
                chain, found = 0, 0
                for place, block in enumerate(blocks, 1):
                    chain = hash((chain, block))
                    if chain in seen:
                        found = place * BLOCK
                    seen.add(chain)
                first = (number << 16 | 1) * BLOCK
                ids = (first + block * BLOCK + offset for block in blocks for offset in range(BLOCK))
                yield Request(each["t"], array("q", ids), found)


def measured(name: str, requests: Iterable[Request]) -> dict[str, Any]:
    """One stream of prompts through a detector; processor time of the calling thread."""
    now = [0.0]
    beginnings = VolatileBeginnings(lambda: now[0])
    pages: set[bytes] = set()
    prompts = prompt_tokens = all_found = 0
    hits: list[tuple[array[int], int]] = []
    comparisons: list[float] = []
    for request in requests:
        now[0], tokens = request.seconds, request.tokens
        found = request.found_tokens
        if found is None:
            digests = list(iterate_chain(root_digest(), tokens, PAGE))
            found = PAGE * next((n for n, each in enumerate(digests) if each not in pages), len(digests))
            pages.update(digests)
        start = time.thread_time()
        beginnings.seen(None, tokens, found)
        seconds = time.thread_time() - start
        prompts, prompt_tokens, all_found = prompts + 1, prompt_tokens + len(tokens), all_found + found
        if 2 * found >= len(tokens):
            hits.append((tokens, found))
        else:
            comparisons.append(seconds)
    beginnings.check_integrity()
    return {
        "prompts": name,
        "requests": prompts,
        "prompt_tokens": prompt_tokens,
        "found_tokens": all_found,
        "lost_tokens": beginnings.lost_tokens,
        "places": [
            {key: place[key] for key in ("start_token", "end_token", "prompts", "lost_tokens", "share")}
            for place in beginnings.places()
        ],
        "compared": len(comparisons),
        "microseconds_of_a_hit": microseconds_of_a_hit(hits),
        "microseconds_of_a_comparison": round(statistics.median(comparisons) * 1e6, 1),
    }


def microseconds_of_a_hit(hits: list[tuple[array[int], int]]) -> float | None:
    """All of them at once: to read the clock takes longer than one."""
    beginnings = VolatileBeginnings()
    start = time.thread_time()
    for tokens, found in hits:
        beginnings.seen(None, tokens, found)
    return round((time.thread_time() - start) / len(hits) * 1e6, 2) if hits else None


def main(
    agents: Annotated[Path, typer.Argument(help="Folder with miniswe/ and taubench/.")],
    sessions: Annotated[Path, typer.Argument(help="claude_code_sessions.jsonl.gz")],
    tokenizer: Annotated[Path, typer.Argument(help="tokenizer.json")],
    num_sessions: Annotated[int, typer.Option(min=1, help="Coding-agent sessions to read.")] = 10,
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Measures and writes the JSON."""
    encode = Tokenizer.from_file(str(tokenizer))
    rows = []
    for name in ("miniswe", "taubench"):
        prompts = agent_prompts(sorted((agents / name).glob("*.jsonl")))
        rows.append(measured(name, tokenized(prompts, encode)))
        for field, make in FIELDS.items():
            planted = tokenized(with_field(prompts, make), encode)
            rows.append(measured(f"{name} with a planted {field}", planted))
    rows.append(measured("coding-agent sessions", session_requests(sessions, num_sessions)))
    print_rows("volatile beginnings", [{**row, "places": len(row["places"])} for row in rows])
    print(f"written: {write_results('volatile_beginnings', rows, out=out)}")


if __name__ == "__main__":
    typer.run(main)

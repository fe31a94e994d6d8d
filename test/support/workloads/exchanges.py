"""Greedy requests that share prefixes: documents with questions, dialogues that grow, exact repeats."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from support.servers import ServerProcess

VOCABULARY = range(10, 1000)
DOCUMENTS, QUESTIONS = 12, 10
DIALOGUES, TURNS = 24, 6
REPEATS = 40
# Six long answers overfill ``POOL_TOKENS``.
LONG_ANSWERS, LONG_ANSWER_TOKENS = 16, 300
CHUNK_TOKENS = 256

# What the compared servers share; prompts above CHUNK_TOKENS are prefilled in chunks. A new server admits a
# request although little of its answer would fit; with sglang's own caution, how far apart they come decides.
POOL_FLAGS = (
    *("--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK_TOKENS)),
    *("--schedule-conservativeness", "0.1"),
)
# Smaller than the working set by far; the host tier is twice as large, the file tier holds everything.
POOL_TOKENS = 2048
TIER_FLAGS = (
    *POOL_FLAGS,
    *("--max-total-tokens", str(POOL_TOKENS), "--enable-hierarchical-cache", "--hicache-ratio", "2"),
    *("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"),
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and the answer that must come: token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(slots=True)
class Replay:
    """What a server made of the exchanges it was sent.

    Attributes:
        differing: positions of the exchanges that were answered with other tokens.
        hit_tokens: cached prompt tokens by tier, as the answers report them.
        retractions: how often a running request lost its KV and had to start again.
    """

    differing: list[int]
    hit_tokens: Counter[str]
    retractions: int


def ask(server: ServerProcess, prompt: Sequence[int], answer_tokens: int) -> dict:
    # The models have no end token. ``ignore_eos`` would keep them from being retracted: from 0.5.22 on sglang
    # reserves the whole answer of a request that sets it.
    return server.generate(prompt, max_new_tokens=answer_tokens)


def ask_at_once(server: ServerProcess, exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
    """All in one request: on a busy machine threads come too far apart to overfill a pool together."""
    lengths = [{"temperature": 0, "max_new_tokens": len(exchange.answer)} for exchange in exchanges]
    prompts = [list(exchange.prompt) for exchange in exchanges]
    # Without ``ignore_eos``: see ``ask``.
    replies: list[dict[str, Any]] = server.post(
        "/generate", {"input_ids": prompts, "sampling_params": lengths}
    )
    return replies


def record_exchanges(server: ServerProcess, *, every: int = 1, seed: int = 0) -> list[Exchange]:
    """Asks everything once, dialogues turn by turn; the order to replay in.

    Args:
        server: which answers.
        every: 2 makes half as many documents, dialogues, repeats and long answers, and so on.
        seed: of the prompts.
    """
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.choices(VOCABULARY, k=rng.randint(low, high))

    system = tokens(40, 40)
    documents = [system + tokens(260, 700) for _ in range(DOCUMENTS // every)]
    questions = [document + tokens(8, 40) for document in documents for _ in range(QUESTIONS)]
    dialogues = [[tokens(20, 120) for _ in range(TURNS)] for _ in range(DIALOGUES // every)]
    long_answers = [tokens(60, 120) for _ in range(LONG_ANSWERS // every)]

    def answer(prompt: Sequence[int], answer_tokens: int) -> Exchange:
        reply = ask(server, prompt, answer_tokens)
        return Exchange(tuple(prompt), tuple(reply["output_ids"]))

    def converse(turns: list[list[int]]) -> list[Exchange]:
        history, spoken = list(system), []
        for turn in turns:
            spoken.append(answer(history + turn, 10))
            history = [*spoken[-1].prompt, *spoken[-1].answer]
        return spoken

    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda prompt: answer(prompt, 8), questions))
        spoken = list(pool.map(converse, dialogues))
        long = list(pool.map(lambda prompt: answer(prompt, LONG_ANSWER_TOKENS), long_answers))
    # Turns of a dialogue lie far apart and in order; questions about a document come in any order.
    waves = [[dialogue[turn] for dialogue in spoken] for turn in range(TURNS)]
    rng.shuffle(asked)
    share = len(asked) // TURNS
    ordered: list[Exchange] = []
    for turn, wave in enumerate(waves):
        mixed = wave + asked[turn * share : (turn + 1) * share]
        rng.shuffle(mixed)
        ordered += mixed
    ordered += rng.sample(ordered, REPEATS // every)
    # Long answers open the second half, which is replayed several at a time: together they overfill the pool.
    middle = (len(ordered) + len(long)) // 2
    return ordered[:middle] + long + ordered[middle:]


def replay(server: ServerProcess, exchanges: Sequence[Exchange], *, concurrency: int) -> Replay:
    """Sends the exchanges' prompts and compares what comes back."""
    with ThreadPoolExecutor(concurrency) as pool:
        return compared(exchanges, list(pool.map(lambda e: ask(server, e.prompt, len(e.answer)), exchanges)))


def replay_long_answers_at_once(server: ServerProcess, exchanges: Sequence[Exchange]) -> Replay:
    """They do not fit: some of them are retracted, on a server that has retracted none yet."""
    long = [exchange for exchange in exchanges if len(exchange.answer) == LONG_ANSWER_TOKENS]
    return compared(long, ask_at_once(server, long))


def compared(exchanges: Sequence[Exchange], replies: Sequence[Mapping[str, Any]]) -> Replay:
    hits: Counter[str] = Counter()
    for reply in replies:
        details = reply["meta_info"]["cached_tokens_details"] or {}
        hits.update({tier: details.get(tier, 0) for tier in ("device", "host", "storage")})
    pairs = enumerate(zip(exchanges, replies, strict=True))
    differing = [i for i, (e, reply) in pairs if tuple(reply["output_ids"]) != e.answer]
    retractions = sum(reply["meta_info"].get("num_retractions") or 0 for reply in replies)
    return Replay(differing, hits, retractions)

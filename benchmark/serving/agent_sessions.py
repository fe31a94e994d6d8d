"""Recorded sessions of coding agents as requests that a CPU can serve: the same shape, every length divided.

A recorded block of 512 tokens becomes 2 words, each one token of the embedded tokenizer, drawn by the block's
name: equal prefixes stay equal, and nothing else is. Only whole blocks count. An answer's length is divided
by 256 too and at least one; its text is not part of the next prompt, which has the recorded blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from benchmark.serving.workloads import Workload
from sgl_importance.placement.hints.hints import ANSWER_ENDS
from sgl_importance_lab.probe.vocabulary import word_pieces
from sgl_importance_lab.replay.formats.kv_cache_tester import Session, in_order, read_sessions
from sgl_importance_lab.replay.formats.line_reader import refuse_bad_record
from sgl_importance_lab.workload.workload_request import WorkloadRequest

BLOCK_TOKENS = 512
WORDS_PER_BLOCK = 2
SCALE = BLOCK_TOKENS // WORDS_PER_BLOCK
HINTED = {end: name for name, end in ANSWER_ENDS.items()}


def agent_sessions(file: Path, longest_tokens: int) -> list[Session]:
    """The odd lines of a kv-cache-tester file, without sessions of which a prompt is longer than that.

    On even lines the policy and the parameters were chosen.
    """
    _, sessions = read_sessions(file, BLOCK_TOKENS, refuse_bad_record)
    return [
        session
        for session in sessions
        if session.line % 2 and max(request.input_tokens for request in session.requests) <= longest_tokens
    ]


def agent_workload(sessions: Sequence[Session], shape: dict[str, Any], seed: int) -> Workload:
    """The requests that are served, in order of arrival; their seconds are as recorded.

    Args:
        sessions: to draw from.
        shape: ``agent_sessions`` of the parameters: so many sessions alive at a time, met behind ``skip``
            requests.
        seed: of the order in which sessions begin.
    """
    served = shape["warm_up"] + shape["requests"]
    merged = in_order(sessions, shape["alive"], seed)[shape["skip"] :][:served]
    requests = [
        WorkloadRequest(
            id=f"agents/{session}/{number}",
            kind="agents",
            session=f"agents/{session}",
            seconds=seconds - merged[0][0],
            max_tokens=max(1, math.ceil(request.output_tokens / SCALE)),
            prompt="".join(word for block in request.blocks for word in _words_of(block)),
            ignore_eos=True,
            hints={"answer_end": HINTED[request.answer_end]} if request.answer_end in HINTED else {},
        )
        for number, (seconds, session, request) in enumerate(merged)
    ]
    return Workload("agents", [request for request in requests if request.prompt])


def faster(requests: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """The same requests, all gaps divided by ``factor``."""
    return [
        msgspec.structs.replace(request, seconds=round(request.seconds / factor, 4)) for request in requests
    ]


def without_hints(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """As stock gets them."""
    return [msgspec.structs.replace(request, hints={}) for request in requests]


@cache
def _words() -> tuple[str, ...]:
    return tuple(piece for piece in word_pieces() if piece.endswith(" ") and piece.strip().isalpha())


@cache
def _words_of(block: object) -> tuple[str, ...]:
    words = _words()
    return tuple(
        words[xxh3_64_intdigest(f"{block}/{i}".encode()) % len(words)] for i in range(WORDS_PER_BLOCK)
    )

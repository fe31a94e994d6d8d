"""Recordings of page lists made by hand: which pages each token wanted is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sgl_importance.observe.trace.records import PageLists, RequestAdmitted, RequestFinished
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.observe.trace.writer import NO_PAGES, TraceWriter
from sgl_importance_lab.replay.residency.page_steps import PageRecording, load_page_steps

from support.workloads.recordings import PAGE_SIZE, make_header


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        document: whose tokens its prompt begins with.
        prompt_pages: pages of the prompt, the last tokens of which are not there yet.
        wants: mass of the pages of each generated token, for each layer and head; float
            [tokens, layers, heads, pages], of which a token looks at those that it sees.
        reads: pages that a selector chose, alike for each layer; of each token, or None.
        kind: what its request id begins with.
        room: tokens that the last page of the prompt has room for.
    """

    document: int
    prompt_pages: int
    wants: np.ndarray
    reads: Sequence[Sequence[int]] | None = None
    kind: str = "documents"
    room: int = 1

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_pages * PAGE_SIZE - self.room


def write_asked(directory: Path, asked: Sequence[Asked], *, share: float = 1.0, **header: Any) -> None:
    """Writes requests one after the other: a pass for the prompt, one for each generated token, the end."""
    writer = TraceWriter(directory, make_header(**header), max_bytes=1 << 26)
    forward_pass = 0
    for number, request in enumerate(asked):
        tokens = [1000 * request.document + at for at in range(request.prompt_tokens)]
        sequence = TokenSequence((None, None), tokens)
        rid = f"{request.kind}/{request.document}/{number}"
        admitted = RequestAdmitted(number, rid, number + 1, 0, 0, len(tokens), {"device": 0}, NO_PAGES)
        for at in range(-1, len(request.wants)):
            forward_pass += 1
            seq_len = len(tokens) + at + 1
            new = len(tokens) if at < 0 else 1
            writer.put(lists_of(request, number, forward_pass, seq_len, new, max(at, 0), share))
            if at == 0:  # under overlap scheduling the first decode step runs before the admission is told
                writer.put(admitted, sequence)
        # The token behind the last step was generated, too.
        end = TokenSequence((None, None), [*tokens, *range(10**6, 10**6 + len(request.wants) + 1)])
        writer.put(RequestFinished(number, number + 1, 0, "length", len(request.wants) + 1, NO_PAGES), end)
    writer.close()


def recorded(directory: Path, asked: Sequence[Asked], **header: Any) -> PageRecording:
    """Requests written, as ``write_asked`` does, and read back."""
    write_asked(directory, asked, **header)
    return load_page_steps(directory)


def lists_of(
    request: Asked, number: int, forward_pass: int, seq_len: int, new_tokens: int, at: int, share: float
) -> PageLists:
    num_pages = -(-seq_len // PAGE_SIZE)
    mass = request.wants[at][..., :num_pages]
    count = int(np.ceil(share * num_pages))
    order = np.argsort(-mass, axis=-1, kind="stable")[..., :count]
    layers, heads, _ = mass.shape
    chosen = None if request.reads is None or new_tokens > 1 else np.array(sorted(request.reads[at]))
    return PageLists(
        request=number,
        forward_pass=forward_pass,
        seq_len=seq_len,
        new_tokens=new_tokens,
        layers=tuple(range(layers)),
        kv_heads=heads,
        pages=order.astype(np.uint16).ravel(),
        mass=np.take_along_axis(mass, order, axis=-1).astype(np.float16).ravel(),
        num_read=(-1 if chosen is None else len(chosen),) * layers,
        read=np.tile([] if chosen is None else chosen, layers).astype(np.uint16),
        shares=np.ones(0 if chosen is None else layers * len(chosen), np.float32),
    )


def random_asked(
    seed: int,
    *,
    requests: int = 3,
    documents: int = 2,
    prompt_pages: int = 10,
    tokens: int = 6,
    layers: int = 2,
    heads: int = 1,
) -> list[Asked]:
    """Requests whose tokens look at pages of their own, at random, and again at those of the token before."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(requests):
        pages = prompt_pages + tokens // PAGE_SIZE + 2
        mass = rng.random((tokens, layers, heads, pages)) ** 8
        for at in range(1, tokens):
            mass[at] = 0.6 * mass[at - 1] + 0.4 * mass[at]
        mass /= mass.sum(axis=-1, keepdims=True)
        found.append(Asked(number % documents, prompt_pages, mass))
    return found


def looks_back(kind: str, number: int, distance: int, steps: int = 48, prompt_pages: int = 12) -> Asked:
    """An answer whose every token wants the page so many behind its own, and the first page."""
    pages = prompt_pages + steps // PAGE_SIZE + 2
    mass = np.full((steps, 1, 4, pages), 1e-6)
    for at in range(steps):
        own = (prompt_pages * PAGE_SIZE - 1 + at) // PAGE_SIZE
        mass[at, 0, :, max(0, own - distance - (at + number) % 3)] = 0.9
        mass[at, 0, :, 0] += 0.1
    return Asked(number, prompt_pages, mass, kind=kind)

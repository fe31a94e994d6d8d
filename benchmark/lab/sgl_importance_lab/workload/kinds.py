"""The kinds of traffic: what their prompts are made of, and what is asked.

Assistant turns in a prompt hold the right answers, not what a server said: the same workload sends the same
prompts to every server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from sgl_importance_lab.probe.document import Record, lay_out
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document, question_text, system_message
from sgl_importance_lab.probe.tokenizer import BEGIN
from sgl_importance_lab.probe.vocabulary import NAMES, held_out_values, word_pieces
from sgl_importance_lab.workload.popularity import Zipf
from sgl_importance_lab.workload.workload_request import Message, WorkloadError

ANSWER_TOKENS = 4
SYSTEM_TOKENS = 256
TOOL_TOKENS = 160
RECORDS_PER_TOOL = 6
COPY_START = 8  # tokens of the repeated block that say where to go on


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a workload; lengths in tokens of the embedded model.

    Attributes:
        sessions: conversations, agents or documents, most popular first.
        document_tokens: length of a document.
        turns: longest conversation or agent run.
        answer_tokens: length of free generation.
        document_skew: Zipf exponent of the popularity of documents.
        question_skew: Zipf exponent of the popularity of a document's records.
    """

    sessions: int = 16
    document_tokens: int = 1024
    turns: int = 8
    answer_tokens: int = 64
    document_skew: float = 1.0
    question_skew: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request before it has an id and an arrival time; fields as in ``WorkloadRequest``."""

    max_tokens: int
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    answer: str | None = None
    ignore_eos: bool = False


Session = Iterator[Turn]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _records(names: list[str], rng: Random) -> tuple[Record, ...]:
    return tuple((name, rng.choice(held_out_values(name))) for name in names)


def documents(shape: Shape, seed: int, index: int) -> Session:
    """Many questions about one document, each a request of its own; ends never."""
    document = make_document(shape.document_tokens, seed * 100_003 + index)
    rng = Random(f"documents/{seed}/{index}")
    names = rng.sample(sorted(document.records), len(document.records))
    popularity = Zipf(len(names), shape.question_skew)
    while True:
        name = popularity.choose(names, rng)
        yield Turn(ANSWER_TOKENS, messages=tuple(document.messages(name)), answer=document.records[name])


def chat(shape: Shape, seed: int, index: int) -> Session:
    """A conversation under a constraint in the system message that all conversations share.

    Each turn asks for a record of the constraint or of what the user said first; the prompt grows.
    """
    shared = make_document(SYSTEM_TOKENS, seed)
    rng = Random(f"chat/{seed}/{index}")
    constraint_names = sorted(shared.records)
    own = _own_notes(shape, shared, rng)
    constraint_popularity = Zipf(len(constraint_names), shape.question_skew)
    own_names = sorted(own.records)
    own_popularity = Zipf(len(own_names), shape.question_skew)
    system = {"role": "system", "content": f"{system_message()['content']} {shared.text}"}
    messages = [system]
    for turn in range(shape.turns):
        from_constraint = rng.random() < 0.5
        name = (
            constraint_popularity.choose(constraint_names, rng)
            if from_constraint
            else own_popularity.choose(own_names, rng)
        )
        answer = (shared if from_constraint else own).records[name]
        text = question_text(name)
        messages.append(_user(text if turn else f"{own.text} {text}"))
        yield Turn(ANSWER_TOKENS, messages=tuple(messages), answer=answer)
        messages.append(_assistant(answer))


def _own_notes(shape: Shape, shared: ProbeDocument, rng: Random) -> ProbeDocument:
    tokens = max(64, shape.document_tokens - SYSTEM_TOKENS)
    free = [name for name in NAMES if name not in shared.records]
    records = _records(rng.sample(free, max(2, min(len(free), tokens // 24))), rng)
    return ProbeDocument(lay_out(records, tokens, rng), records)


def agent(shape: Shape, seed: int, index: int) -> Session:
    """A tool-using run: a tool description that all runs share, then tool outputs that pile up.

    Each turn asks for a record of one of the outputs so far, the latest ones most often.
    """
    tools = make_document(SYSTEM_TOKENS, seed + 7919)
    rng = Random(f"agent/{seed}/{index}")
    messages = [{"role": "system", "content": f"{system_message()['content']} {tools.text}"}]
    free = [name for name in NAMES if name not in tools.records]
    rng.shuffle(free)
    outputs: list[ProbeDocument] = []
    for _ in range(min(shape.turns, len(free) // RECORDS_PER_TOOL)):
        records = _records([free.pop() for _ in range(RECORDS_PER_TOOL)], rng)
        outputs.append(ProbeDocument(lay_out(records, TOOL_TOKENS, rng), records))
        latest_first = outputs[::-1]
        asked = Zipf(len(latest_first), shape.document_skew).choose(latest_first, rng)
        names = sorted(asked.records)
        name = Zipf(len(names), shape.question_skew).choose(names, rng)
        messages.append(_user(f"{outputs[-1].text} {question_text(name)}"))
        yield Turn(ANSWER_TOKENS, messages=tuple(messages), answer=asked.records[name])
        messages.append(_assistant(asked.records[name]))


def generation(shape: Shape, seed: int, index: int) -> Session:
    """Free generation behind a shared block of words: the model goes on where the repetition began.

    The one long text that the embedded model can continue rightly is one that it has seen: each request
    starts the block again at another place, and the right answer is what followed there. Ends never.
    """
    rng = Random(f"generation/{seed}/{index}")
    block = _block(rng, shape.document_tokens)
    last_start = len(block) - COPY_START - shape.answer_tokens
    if last_start < 0:
        raise WorkloadError(
            f"a block of {len(block)} words cannot be continued for {shape.answer_tokens} tokens: "
            "lower --answer-tokens"
        )
    starts = Zipf(1 + last_start // 16, shape.question_skew)
    while True:
        start = 16 * starts.draw(rng)
        stop = start + COPY_START
        yield Turn(
            shape.answer_tokens,
            prompt=BEGIN + "".join(block + block[start:stop]),
            answer="".join(block[stop : stop + shape.answer_tokens]).strip(),
            ignore_eos=True,
        )


def _block(rng: Random, tokens: int) -> list[str]:
    """Distinct words, each with its own space: they stay single tokens when they are joined."""
    words = [piece for piece in word_pieces() if piece.endswith(" ") and piece.strip().isalpha()]
    return rng.sample(words, min(tokens, len(words)))


KINDS: dict[str, Callable[[Shape, int, int], Session]] = {
    "chat": chat,
    "documents": documents,
    "agent": agent,
    "generation": generation,
}

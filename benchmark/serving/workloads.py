"""The benchmark's requests, made from committed parameters alone: which prompts, in which order, and when.

``conversations`` (agents, chat) grow turn by turn. Each live session takes its next turn a log-normal gap
after its last one, in virtual time that no server influences, and one that ends makes room for a new one.
The first sessions are met in their midst, as by a server that joins running traffic. ``questions``
(documents, scans) are independent: about a popular document, or about one that nobody asks about again.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from sgl_importance_lab.probe.document import Record, lay_out
from sgl_importance_lab.probe.tasks import ProbeDocument, make_document, question_text, system_message
from sgl_importance_lab.probe.vocabulary import NAMES, held_out_values
from sgl_importance_lab.workload.kinds import ANSWER_TOKENS, Shape, documents
from sgl_importance_lab.workload.popularity import Zipf
from sgl_importance_lab.workload.workload_request import Message, WorkloadRequest

PARAMETERS = Path(__file__).with_name("parameters.json")
RECORDS_PER_TURN = 2
TURN_TOKENS = (16, 512)  # shortest and longest text of a turn
ONE_OFF = 10_000  # documents from this number on are asked about once


def load_parameters(path: Path = PARAMETERS) -> dict[str, Any]:
    parameters: dict[str, Any] = json.loads(path.read_text())
    return parameters


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, and to which kind of server.

    Attributes:
        requests: in order of arrival.
        tiers: "device", "host" or "storage": the lowest tier that the server has.
        restart_after: requests after which the server is started anew; None where it is not.
    """

    name: str
    requests: list[WorkloadRequest]
    tiers: str = "device"
    restart_after: int | None = None


def make_workload(name: str, parameters: dict[str, Any]) -> Workload:
    """The workload of that name; the same parameters, the same requests.

    Raises:
        KeyError: the parameters name no such workload.
    """
    shape = parameters["workloads"][name]
    stream = shape.get("stream", name)  # the same requests under another configuration of the server
    rng = Random(f"{parameters['seed']}/{stream}")
    kinds = {"conversations": _conversations, "questions": _questions}
    requests = list(islice(kinds[shape["kind"]](stream, shape, parameters, rng), shape["requests"]))
    return Workload(
        name, _at_rate(requests, shape["rate"]), shape.get("tiers", "device"), shape.get("restart_after")
    )


def at(request: WorkloadRequest, seconds: float) -> WorkloadRequest:
    """The same request at another time of arrival."""
    return msgspec.structs.replace(request, seconds=round(seconds, 4))


def _at_rate(requests: list[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Virtual time stretched so that ``rate`` requests arrive per second on average."""
    first, last = requests[0].seconds, requests[-1].seconds
    scale = (len(requests) - 1) / rate / (last - first) if last > first else 0.0
    return [at(request, (request.seconds - first) * scale) for request in requests]


# ---- conversations ----


def _conversations(
    name: str, shape: dict[str, Any], parameters: dict[str, Any], rng: Random
) -> Iterator[WorkloadRequest]:
    seed = parameters["seed"]
    system = make_document(shape["system_tokens"], seed)
    sessions = count()

    def start(*, midway: bool) -> tuple[int, Iterator[tuple[list[Message], str]]]:
        number = next(sessions)
        turns = rng.randint(*shape["turns"])
        turn = _conversation(shape, system, turns, Random(f"{seed}/{name}/{number}"))
        if midway:
            for _ in islice(turn, rng.randrange(turns)):
                pass
        return number, turn

    # (time of the next turn, tie-breaker, session)
    live = [
        (rng.lognormvariate(0, shape["gap_sigma"]) * rng.random(), place, start(midway=True))
        for place in range(shape["sessions"])
    ]
    heapq.heapify(live)
    for number in count():
        seconds, place, (session, turns) = heapq.heappop(live)
        turn = next(turns, None)
        if turn is None:
            session, turns = start(midway=False)
            turn = next(turns)
        messages, answer = turn
        yield WorkloadRequest(
            id=f"{name}/{session}/{number}",
            kind=name,
            session=f"{name}/{session}",
            seconds=seconds,
            max_tokens=ANSWER_TOKENS,
            messages=messages,
            answer=answer,
        )
        gap = rng.lognormvariate(0, shape["gap_sigma"])
        heapq.heappush(live, (seconds + gap, place, (session, turns)))


def _conversation(
    shape: dict[str, Any], system: ProbeDocument, turns: int, rng: Random
) -> Iterator[tuple[list[Message], str]]:
    """Prompt and right answer of each turn; asks for what one of the turns said, the latest most often."""
    messages = [{"role": "system", "content": f"{system_message()['content']} {system.text}"}]
    free = [name for name in NAMES if name not in system.records]
    rng.shuffle(free)
    said: list[ProbeDocument] = []
    for turn in range(turns):
        tokens = shape["turn_tokens"] * rng.lognormvariate(
            -(shape["turn_sigma"] ** 2) / 2, shape["turn_sigma"]
        )
        tokens = (
            shape["first_tokens"] if turn == 0 else round(min(max(tokens, TURN_TOKENS[0]), TURN_TOKENS[1]))
        )
        records: tuple[Record, ...] = tuple(
            (name, rng.choice(held_out_values(name)))
            for name in (free.pop() for _ in range(RECORDS_PER_TURN))
        )
        said.append(ProbeDocument(lay_out(records, tokens, rng), records))
        asked = Zipf(len(said), 1.0).choose(said[::-1], rng)
        name, answer = rng.choice(asked.record_list)
        messages.append({"role": "user", "content": f"{said[-1].text} {question_text(name)}"})
        yield list(messages), answer
        messages.append({"role": "assistant", "content": answer})


# ---- questions ----


def _questions(
    name: str, shape: dict[str, Any], parameters: dict[str, Any], rng: Random
) -> Iterator[WorkloadRequest]:
    seed = parameters["seed"]
    popular = [
        documents(
            Shape(document_tokens=shape["document_tokens"], question_skew=shape["question_skew"]), seed, index
        )
        for index in range(shape["documents"])
    ]
    popularity = Zipf(len(popular), shape["document_skew"])
    one_offs = count(ONE_OFF)
    seconds = 0.0
    for number in count():
        if rng.random() < shape["one_off"]:
            document = next(one_offs)
            turn = next(documents(Shape(document_tokens=shape["one_off_tokens"]), seed, document))
        else:
            document = popularity.draw(rng)
            turn = next(popular[document])
        yield WorkloadRequest(
            id=f"{name}/{document}/{number}",
            kind=name,
            session=f"{name}/{number}",
            seconds=seconds,
            max_tokens=shape["answer_tokens"],
            messages=list(turn.messages),
            answer=turn.answer,
            ignore_eos=True,
        )
        seconds += rng.expovariate(1.0)


def document_of(request: WorkloadRequest) -> int:
    """Number of the document that a question is about; ``ONE_OFF`` and above are asked about once."""
    return int(request.id.split("/")[-2])


# ---- what was made ----


def prefix_pages(tokens: Sequence[int], page_tokens: int) -> list[tuple[int, ...]]:
    """The prefixes that end at whole pages: a name for each page and all before it."""
    return [tuple(tokens[:end]) for end in range(page_tokens, len(tokens) + 1, page_tokens)]

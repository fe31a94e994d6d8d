"""What is sent: token ids of real text, in one order for every server.

``agents`` are recorded coding agents and customer service in turn, whose prompts grow turn by turn; a session
is cut at the turn that would pass ``LONGEST`` tokens. ``documents`` are windows of recorded text, asked about
by popularity (Zipf). ``chat`` are recorded dialogues behind one instruction. ``scan`` asks about three
documents while prompts pass by that nobody sends again. ``mix`` draws from all four.

Each is made until its prompts hold ``UNIQUE`` different tokens (pages, counted from the first token on).
Twice as many of ``agents`` took 95 s a server and seed on two shared cores: too long for ten seeds.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, count, islice
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from benchmark.peers.recorded import Cut, Ids, Session, coding, cut, service
from sgl_importance_lab.workload.popularity import Zipf

PAGE = 32
UNIQUE = {"agents": 32_768, "documents": 16_384, "chat": 16_384, "scan": 16_384, "mix": 32_768}
LONGEST = 8_000
AGENTS_ALIVE = 4
WAIT_SIGMA = 1.0
"""Of the log-normal that a session's waits are drawn from; their median is 1."""
CHATS_ALIVE, INSTRUCTION_TOKENS, CHAT_LONGEST = 12, 192, 2_800
DOCUMENT_TOKENS, QUESTION_TOKENS, ONE_OFF_TOKENS = 1_024, 80, 640
HOT, ONE_OFF_SHARE = 3, 0.6


@dataclass(frozen=True)
class Sent:
    """One request: requests of a session are sent one behind the other.

    Attributes:
        is_cut: whether the recording of its session goes on where the session here ends.
        time: when, in medians of a session's waits, where sessions take turns.
        is_last: of its session, where sessions take turns.
    """

    session: int
    ids: Ids
    is_cut: bool = False
    time: float = 0.0
    is_last: bool = False


def unique_tokens(requests: Sequence[Sent]) -> int:
    """Tokens of different whole pages, each named by all before it."""
    pages = set()
    for request in requests:
        ids = tuple(request.ids)
        pages.update(hash(ids[:end]) for end in range(PAGE, len(ids) + 1, PAGE))
    return PAGE * len(pages)


class Texts:
    """Recorded texts of a folder with public data, in the model's tokens."""

    def __init__(self, data: Path, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        # Tokenising takes a while, and every seed asks for the same.
        self.sessions = cache(self._sessions)
        self.running_text = cache(self._running_text)
        self.dialogues = cache(self._dialogues)

    def _ids(self, text: str) -> Ids:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _sessions(self, recorded: Callable[[Path, Tokenizer], Iterator[Session]]) -> list[Cut]:
        return [cut(session, LONGEST) for session in recorded(self._data, self._tokenizer)]

    def _running_text(self) -> Ids:
        """Recorded agents' longest prompts, one behind the other."""
        files = sorted((self._data / "agents" / "miniswe").glob("*.jsonl"))
        last = (json.loads(file.read_text().splitlines()[-1])["input"][:60_000] for file in files)
        return list(chain.from_iterable(map(self._ids, last)))

    def _dialogues(self) -> list[list[Ids]]:
        """Turns of recorded dialogues: what the user says, and what was answered."""
        lines = (self._data / "prompts" / "mtbench101.jsonl").read_text().splitlines()
        histories = (json.loads(line)["history"] for line in lines)
        return [
            [self._ids(f"User: {turn['user']}\nAssistant: {turn['bot']}\n") for turn in history]
            for history in histories
            if len(history) > 2
        ]


def in_turns(sessions: Iterator[list[Ids]], alive: int, rng: Random) -> Iterator[Sent]:
    """Sessions beside each other: each goes on a log-normal while after its last turn; one that ends makes
    room for the next."""
    waiting: list[tuple[float, int, list[Ids]]] = []
    numbers = count()
    now = 0.0
    while True:
        for session in islice(sessions, alive - len(waiting)):
            heapq.heappush(waiting, (now + rng.random(), next(numbers), session))
        if not waiting:
            return
        now, number, (prompt, *later) = heapq.heappop(waiting)
        yield Sent(number, prompt, time=now, is_last=not later)
        if later:
            heapq.heappush(waiting, (now + rng.lognormvariate(0, WAIT_SIGMA), number, later))


def agents(texts: Texts, rng: Random, begun: int = 0, alive: int = AGENTS_ALIVE) -> Iterator[Sent]:
    """
    Args:
        begun: sessions in whose place later ones of the same order are sent.
    """
    kinds = [texts.sessions(recorded) for recorded in (coding, service)]
    shuffled = [rng.sample(sessions, len(sessions)) for sessions in kinds]
    mixed = [session for pair in zip(*shuffled, strict=False) for session in pair][begun:]
    for request in in_turns((each.prompts for each in mixed), alive, rng):
        is_cut = mixed[request.session].left_out > 0  # sessions are numbered as they begin
        yield replace(request, session=begun + request.session, is_cut=is_cut)


def chat(texts: Texts, rng: Random) -> Iterator[Sent]:
    instruction = texts.running_text()[:INSTRUCTION_TOKENS]
    recorded = texts.dialogues()
    dialogues = rng.sample(recorded, len(recorded))

    def grown() -> Iterator[list[Ids]]:
        for dialogue in dialogues:
            prompts = [
                [*instruction, *chain.from_iterable(dialogue[: turn + 1])] for turn in range(len(dialogue))
            ]
            yield [prompt for prompt in prompts if len(prompt) <= CHAT_LONGEST]

    return in_turns(grown(), CHATS_ALIVE, rng)


def windows(text: Ids, tokens: int, rng: Random) -> Iterator[Ids]:
    """Parts of a text that do not overlap, in random order."""
    starts = list(range(0, len(text) - tokens, tokens))
    rng.shuffle(starts)
    return (text[start : start + tokens] for start in starts)


def documents(texts: Texts, rng: Random) -> Iterator[Sent]:
    text = texts.running_text()
    cut = len(text) // 2
    shelf = list(windows(text[:cut], DOCUMENT_TOKENS, rng))[: UNIQUE["documents"] * 3 // 4 // DOCUMENT_TOKENS]
    popularity = Zipf(len(shelf), 1.0)
    for number, question in enumerate(windows(text[cut:], QUESTION_TOKENS, rng)):
        yield Sent(number, [*shelf[popularity.draw(rng)], *question])


def scan(texts: Texts, rng: Random) -> Iterator[Sent]:
    text = texts.running_text()
    parts = len(text) // 3
    hot = list(windows(text[:parts], DOCUMENT_TOKENS, rng))[:HOT]
    passing = windows(text[parts : 2 * parts], ONE_OFF_TOKENS, rng)
    for number, question in enumerate(windows(text[2 * parts :], QUESTION_TOKENS, rng)):
        if rng.random() >= ONE_OFF_SHARE:
            yield Sent(number, [*rng.choice(hot), *question])
        elif one_off := next(passing, None):
            yield Sent(number, one_off)
        else:
            return


def mix(texts: Texts, rng: Random) -> Iterator[Sent]:
    kinds = [make(texts, rng) for make in (agents, documents, chat, scan)]
    while True:
        kind = rng.randrange(len(kinds))
        if (request := next(kinds[kind], None)) is None:
            return
        yield Sent(len(kinds) * request.session + kind, request.ids, request.is_cut)


WORKLOADS: dict[str, Callable[[Texts, Random], Iterator[Sent]]] = {
    each.__name__: each for each in (agents, documents, chat, scan, mix)
}


def make_workload(name: str, texts: Texts, seed: int) -> list[Sent]:
    """Requests of that kind and seed, until they hold so many different tokens, or there are no more."""
    return until_unique(WORKLOADS[name](texts, Random(f"{name}/{seed}")), UNIQUE[name])


def until_unique(sent: Iterator[Sent], tokens: int) -> list[Sent]:
    """The first requests, until they hold so many different tokens, or there are no more."""
    requests: list[Sent] = []
    pages: set[int] = set()
    for request in sent:
        requests.append(request)
        ids = tuple(request.ids)
        pages.update(hash(ids[:end]) for end in range(PAGE, len(ids) + 1, PAGE))
        if PAGE * len(pages) >= tokens:
            break
    return requests

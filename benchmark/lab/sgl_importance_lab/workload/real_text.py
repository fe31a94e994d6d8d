"""Requests made of real text, for any model: records planted in it, passages that it repeats.

The text goes on with the answer, without a chat: a model that follows no instructions is asked too. A record
is asked for by the beginning of its sentence, a passage by its first tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from sgl_importance_lab.workload.popularity import Zipf
from sgl_importance_lab.workload.workload_request import WorkloadError, WorkloadRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PLACES = (
    *(
        "Oslo",
        "Lima",
        "Cairo",
        "Quito",
        "Delhi",
        "Tunis",
        "Paris",
        "Seoul",
        "Dakar",
        "Perth",
        "Havana",
        "Lisbon",
    ),
    *("Vienna", "Dublin", "Prague", "Athens", "Boston", "Zurich", "Manila", "Nairobi", "Toronto", "Warsaw"),
)
CUE_TOKENS = 16
EARLY = 0.7  # of a document: where passages stand that it repeats


@dataclass(frozen=True, slots=True)
class TextShape:
    """The shape of a workload; lengths in tokens of the model that is asked.

    Attributes:
        documents: windows of the text, most popular first.
        document_tokens: length of a window, before records are planted in it.
        records: planted in each.
        answer_tokens: length of what follows the beginning of a repeated passage.
        document_skew: Zipf exponent of the popularity of documents.
        question_skew: Zipf exponent of the popularity of a document's records.
    """

    documents: int = 4
    document_tokens: int = 1024
    records: int = 6
    answer_tokens: int = 12
    document_skew: float = 1.0
    question_skew: float = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, what rightly follows it, and the character at which that stands already, behind spaces."""

    prompt: str
    answer: str
    stands_at: int


def model_tokenizer(folder: Path) -> Tokenizer:
    """
    Raises:
        WorkloadError: the folder holds no tokenizer.json that can be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WorkloadError(f"no tokenizer.json in {folder}: --model takes the folder of a model")
    from tokenizers import Tokenizer  # only this command needs it

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # of no type of its own
        raise WorkloadError(f"{file}: {error}: --model takes the folder of a model") from error


def text_at_hand() -> list[Path]:
    """Prose and code that is on every machine that runs this: the longest modules of Python's library."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name)
    return [path for path in modules if path.stat().st_size > 60_000]


def read_text(paths: Sequence[Path]) -> str:
    """All files, one behind the other.

    Raises:
        WorkloadError: one is no text.
    """
    found = []
    for path in paths:
        try:
            found.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise WorkloadError(f"{path}: {error}: --text takes files in UTF-8") from error
    return "\n\n".join(found)


class Documents:
    """Windows of a text, as far apart as it allows, each with its records."""

    def __init__(self, text: str, tokenizer: Tokenizer, shape: TextShape, seed: int) -> None:
        self.tokenizer, self.shape = tokenizer, shape
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        spare = len(offsets) - shape.document_tokens
        if spare < shape.documents - 1:
            raise WorkloadError(
                f"the text has {len(offsets)} tokens, too few for {shape.documents} documents of "
                f"{shape.document_tokens}: give more in --text"
            )
        if not 1 <= shape.records <= len(PLACES):
            raise WorkloadError(f"{shape.records} records in a document: --records takes 1 to {len(PLACES)}")
        starts = [at * spare // max(1, shape.documents - 1) for at in range(shape.documents)]
        self.texts: list[str] = []
        self.records: list[dict[str, str]] = []
        for number, start in enumerate(starts):
            end = offsets[start + shape.document_tokens - 1][1]
            rng = Random(f"real text/{seed}/{number}")
            records = {place: f"{rng.randrange(1000, 10_000)}" for place in rng.sample(PLACES, shape.records)}
            self.texts.append(_planted(text[offsets[start][0] : end], records, rng))
            self.records.append(records)

    def record(self, number: int, rng: Random) -> Asked:
        """A question for one of the records of a document."""
        places = list(self.records[number])
        return self._asked(number, Zipf(len(places), self.shape.question_skew).choose(places, rng))

    def all_records(self, number: int) -> list[Asked]:
        """A question for each record of a document."""
        return [self._asked(number, place) for place in self.records[number]]

    def _asked(self, number: int, place: str) -> Asked:
        begin, text = _begin(place), self.texts[number]
        at = text.index(f"{begin} ") + len(begin)
        return Asked(f"{text}\n\n{begin}", f" {self.records[number][place]}", at + 1)

    def repeat(self, number: int, rng: Random) -> Asked:
        """The beginning of a passage that stands in the document."""
        text = self.texts[number]
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        last = int(EARLY * len(offsets)) - CUE_TOKENS - self.shape.answer_tokens
        if last < 1:
            raise WorkloadError(
                f"a document of {len(offsets)} tokens repeats no passage of {CUE_TOKENS} and "
                f"{self.shape.answer_tokens}: raise --document-tokens"
            )
        first = rng.randrange(last)
        behind = first + CUE_TOKENS
        # A tokenizer may leave the space before a word out of its offsets: it belongs to what follows.
        begin = offsets[first][0]
        middle = offsets[behind - 1][1]
        answer = text[middle : offsets[behind + self.shape.answer_tokens - 1][1]]
        spaces = len(answer) - len(answer.lstrip())
        return Asked(f"{text}\n\n{text[begin:middle]}", answer, middle + spaces)


KINDS: dict[str, Callable[[Documents, int, Random], Asked]] = {
    "records": Documents.record,
    "repeats": Documents.repeat,
}


def make_text_workload(
    text: str,
    tokenizer: Tokenizer,
    kinds: Sequence[str],
    count: int,
    *,
    shape: TextShape | None = None,
    seed: int = 0,
    rate: float = 4.0,
) -> Iterator[WorkloadRequest]:
    """``count`` requests of the given kinds, in equal shares on average; the same seed, the same requests.

    Args:
        text: real text; documents are windows of it.
        tokenizer: of the model that is asked; each request says where, in its tokens, the answer stands.
        kinds: names in ``KINDS``.
        count: number of requests.
        shape: of every kind.
        seed: of every choice.
        rate: arrivals per second on average, exponentially spaced.

    Raises:
        WorkloadError: a kind is unknown, or the text is too short.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise WorkloadError(f"unknown kind {', '.join(unknown) or '(none)'}: choose from {', '.join(KINDS)}")
    if not rate > 0:
        raise WorkloadError(f"a rate of {rate:g} requests per second never ends: raise --rate")
    shape = shape or TextShape()
    documents = Documents(text, tokenizer, shape, seed)
    popularity = Zipf(shape.documents, shape.document_skew)
    rng = Random(f"real text/{seed}/{','.join(kinds)}")
    seconds = 0.0
    for number in range(count):
        kind = rng.choice(kinds)
        document = popularity.draw(rng)
        asked = KINDS[kind](documents, document, rng)
        name = f"{kind}/{document}/{number}"
        encoded = tokenizer.encode(asked.prompt)
        answered = tokenizer.encode(asked.prompt + asked.answer)
        yield WorkloadRequest(
            id=name,
            kind=kind,
            session=name,  # many users ask about one document
            seconds=round(seconds, 3),
            max_tokens=len(answered.ids) - len(encoded.ids),
            prompt=asked.prompt,
            answer=asked.answer.strip(),
            ignore_eos=True,
            answer_token=encoded.char_to_token(asked.stands_at),
        )
        seconds += rng.expovariate(rate)


def _begin(place: str) -> str:
    return f"The secret number of {place} is"


def _planted(text: str, records: dict[str, str], rng: Random) -> str:
    """The text with a sentence for each record, between lines or words of it."""
    breaks = [at for at, letter in enumerate(text) if letter == "\n"]
    if len(breaks) < len(records):
        breaks = [at for at, letter in enumerate(text) if letter.isspace()]
    if len(breaks) < len(records):
        raise WorkloadError("a document has no room between its words for records: give other text in --text")
    places = sorted(rng.sample(breaks, len(records)))
    parts, before = [], 0
    for at, (place, number) in zip(places, records.items(), strict=True):
        parts += [text[before:at], f"\n{_begin(place)} {number}."]
        before = at
    return "".join([*parts, text[before:]])

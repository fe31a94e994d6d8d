"""Where planted records stand in a window of text: easy to find, or hard."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Tokens = Sequence[int]
RECORDS_IN = 0.9
"""Of a window: behind it no record stands."""
FIRST = 64
"""Tokens of the text before a record, at least: no sink."""
MENTIONS = 4
"""Of each place in ``decoys``."""


@dataclass(frozen=True)
class Planted:
    """A record, and what may stand elsewhere to mislead.

    Attributes:
        record: its sentence.
        number_at: tokens of it before its number.
        mention: a sentence that names the place without a number.
    """

    record: Tokens
    number_at: int
    mention: Tokens


@dataclass(frozen=True)
class Text:
    """What records are planted in.

    Attributes:
        tokens: of the text, and more than a window.
        line_ends: where a line begins, ascending.
        size: tokens of a window.
        page_size: tokens of a page.
    """

    tokens: Tokens
    line_ends: Sequence[int]
    size: int
    page_size: int


Insertion = tuple[int, Tokens]
"""Tokens that stand before a token of the text."""
Layout = Callable[[Text, Sequence[Planted], random.Random], list[Insertion]]


def spread(text: Text, planted: Sequence[Planted], draws: random.Random) -> list[Insertion]:
    """Over the window, each at the beginning of a line."""
    stretch = int(RECORDS_IN * text.size) // len(planted)
    done, last = 0, 0
    found: list[Insertion] = []
    for at, each in enumerate(planted):
        wanted = at * stretch + draws.randrange(FIRST, stretch) - done
        last = _nearest([end for end in text.line_ends if end > last], wanted)
        found.append((last, each.record))
        done += len(each.record)
    return found


def crowded(text: Text, planted: Sequence[Planted], draws: random.Random) -> list[Insertion]:
    """One behind the other, so that their pages hold little else."""
    room = sum(len(each.record) for each in planted)
    wanted = draws.randrange(FIRST, int(RECORDS_IN * text.size) - room)
    return [(_nearest(text.line_ends, wanted), each.record) for each in planted]


def split(text: Text, planted: Sequence[Planted], draws: random.Random) -> list[Insertion]:
    """Spread, each number the beginning of a page, and its place on the page before."""
    stretch = int(RECORDS_IN * text.size) // len(planted)
    done = 0
    found: list[Insertion] = []
    for at, each in enumerate(planted):
        number = at * stretch + draws.randrange(FIRST, stretch)
        number = max(number // text.page_size * text.page_size, FIRST)
        found.append((number - each.number_at - done, each.record))
        done += len(each.record)
    return found


def decoys(text: Text, planted: Sequence[Planted], draws: random.Random) -> list[Insertion]:
    """Spread, and every place is named elsewhere, too, without its number."""
    within = replace(text, size=text.size - MENTIONS * sum(len(each.mention) for each in planted))
    lines = [end for end in text.line_ends if FIRST < end < RECORDS_IN * within.size]
    mentions = [(draws.choice(lines), each.mention) for each in planted for _ in range(MENTIONS)]
    return sorted([*spread(within, planted, draws), *mentions], key=lambda insertion: insertion[0])


LAYOUTS: dict[str, Layout] = {each.__name__: each for each in (spread, crowded, split, decoys)}


def inserted(text: Text, insertions: Sequence[Insertion]) -> tuple[list[int], list[bool]]:
    """The text with what was planted, and which tokens were."""
    tokens: list[int] = []
    is_planted: list[bool] = []
    last = 0
    for place, planted in insertions:
        tokens += [*text.tokens[last:place], *planted]
        is_planted += [False] * (place - last) + [True] * len(planted)
        last = place
    return [*tokens, *text.tokens[last:]], [*is_planted, *[False] * (len(text.tokens) - last)]


def _nearest(places: Sequence[int], wanted: int) -> int:
    return min(places, key=lambda place: abs(place - wanted))

"""Finds prompts that part early, again and again at the same place, and go on alike behind it."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

import numpy as np

from sgl_importance.observe.volatile.parting import MIN_RUN, Ids, Parting, parting, token_ids
from sgl_importance.observe.volatile.volatile_place import MIN_PARTINGS, VolatilePlace

MAX_PLACES = 4


@dataclass(slots=True)
class PromptKind:
    """Attributes:
    last: the last prompt of the kind.
    anchors: by which it is found.
    places: where its prompts have parted, the last one last.
    partings: of its prompts, at whatever place.
    """

    last: Ids
    anchors: list[tuple[Hashable, int]]
    places: list[VolatilePlace] = field(default_factory=list)
    partings: int = 0

    def parted(self, ids: Ids, there: Parting, now: float, prompt_tokens: int) -> int:
        """A prompt has parted from the last one.

        Args:
            now: in seconds, of any clock that does not go back.
            prompt_tokens: of all prompts of the server before.

        Returns:
            Tokens found to be lost behind a volatile beginning, that this prompt adds to those known before.
        """
        place = next((each for each in self.places if each.takes(there)), None)
        if place is None:
            place = VolatilePlace(there.start, there.start, there.end, there.start, now, prompt_tokens)
            self.places = [*self.places[1 - MAX_PLACES :], place]
        before = place.lost_tokens if place.is_known else 0
        if not place.parted(ids, self.last, there, now):
            return 0
        self.partings += 1
        for each in self.places:
            each.starts += each.starts_at(there.start)
        place.is_known = place.is_known or self._is_volatile(place)
        return place.lost_tokens - before if place.is_known else 0

    def _is_volatile(self, place: VolatilePlace) -> bool:
        """Prompts that part at random places part at each of them a few times, too."""
        elsewhere = self.partings - place.starts
        return place.partings >= MIN_PARTINGS and place.partings >= 3 * elsewhere


HEAD = 512
"""Tokens whose runs are hashed."""
GRAM = 16
HASHES = 8

_BASE = 0x9E3779B97F4A7C15  # odd, without a pattern in its bits
_MASK = (1 << 64) - 1
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def sketch(ids: Ids) -> list[int]:
    """At most HASHES distinct hashes that prompts with mostly the same beginning share, wherever they part.

    The smallest of the runs of GRAM tokens in the head of a prompt: two prompts share each of them with the
    probability that one of their runs is in both (Broder, On the resemblance and containment of documents,
    1997). A prefix would not do, since text that changes may stand in front of everything. None of fewer than
    GRAM tokens.
    """
    hashes = ids[:HEAD].astype(np.uint64) + np.uint64(1)
    width, factor = 1, _BASE
    while width < GRAM:  # runs of twice the width are made of two neighbours
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        width, factor = 2 * width, factor * factor & _MASK
    if not len(hashes):
        return []
    hashes ^= hashes >> np.uint64(31)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(29)
    few = min(2 * HASHES, len(hashes))  # some may be the same
    smallest: set[int] = set(np.partition(hashes, few - 1)[:few].tolist())
    return sorted(smallest)[:HASHES]


MAX_KINDS = 256
MAX_KEPT_TOKENS = 1 << 21
"""Of the last prompts of all kinds: 8 MiB."""
MAX_PROMPT_TOKENS = 1 << 16
"""Tokens of a prompt that are compared; what is lost behind them is not counted."""
MIN_SHARE = 0.01
"""Share of the server's prompt tokens that a place must cost before it is reported."""
MIN_SHARED_ANCHORS = 2
MAX_TOLD = 32
"""Places that are compared when an operator asks: a scheduler waits for that."""

_DAY = 86_400.0


class VolatileBeginnings:
    """Follows prompts online, in bounded memory.

    Only a prompt of which the cache had less than half is looked at: text that changes further behind is no
    beginning, and a prompt whose own text there was still cached has lost nothing by it.

    Args:
        now: seconds, of a clock that does not go back.

    Attributes:
        lost_tokens: computed again behind volatile beginnings, as far as these are known; only grows.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.lost_tokens = 0
        self._now = now
        self._prompt_tokens = 0
        self._kinds: OrderedDict[int, PromptKind] = OrderedDict()
        self._by_anchor: dict[tuple[Hashable, int], int] = {}
        self._kept_tokens = 0
        self._serial = 0

    def seen(self, namespace: Hashable, tokens: Sequence[int], found_tokens: int) -> None:
        """A request was answered.

        Args:
            namespace: prompts of others never share KV with this one, and are never compared.
            tokens: of its prompt.
            found_tokens: of these, found in any tier.
        """
        prompt_tokens = self._prompt_tokens
        self._prompt_tokens += len(tokens)
        if len(tokens) < 2 * MIN_RUN or 2 * found_tokens >= len(tokens):
            return
        ids = token_ids(tokens, MAX_PROMPT_TOKENS)
        anchors: list[tuple[Hashable, int]] = [(namespace, each) for each in sketch(ids)]
        number = self._find(anchors)
        if number is None:
            self._serial += 1
            number, kind = self._serial, PromptKind(ids, [])
        else:
            kind = self._forget(number)
            there = parting(ids, kind.last)
            if there is not None and 2 * there.start < len(ids) and found_tokens <= there.end:
                self.lost_tokens += kind.parted(ids, there, self._now(), prompt_tokens)
        self._keep(number, kind, ids, anchors)

    def places(self) -> list[dict[str, Any]]:
        """What to tell the operator, the dearest first: ``VolatilePlace.describe`` of each place."""
        now = self._now()
        known = [
            place
            for kind in self._kinds.values()
            for place in kind.places
            if place.is_known and now - place.last_seconds <= _DAY
        ]
        fields: list[VolatilePlace] = []
        dearest = nlargest(MAX_TOLD, known, key=lambda each: each.lost_tokens)
        for place in sorted(dearest, key=lambda each: each.start):  # what is in front of the first is in all
            same = next((n for n, each in enumerate(fields) if place.is_field_of(each)), None)
            if same is None:
                fields.append(place)
            else:
                fields[same] = fields[same].with_kind(place)
        fields.sort(key=lambda each: each.lost_tokens, reverse=True)
        shares = [each.lost_tokens / (self._prompt_tokens - each.prompt_tokens_before) for each in fields]
        return [
            {**each.describe(now), "share": share}
            for each, share in zip(fields, shares, strict=True)
            if share >= MIN_SHARE
        ]

    # ---- kinds ----

    def _find(self, anchors: list[tuple[Hashable, int]]) -> int | None:
        """The kind that has most of these; None where none has enough of them."""
        votes = Counter(self._by_anchor[each] for each in anchors if each in self._by_anchor)
        number, shared = max(votes.items(), key=lambda vote: vote[1], default=(0, 0))
        return number if shared >= MIN_SHARED_ANCHORS else None

    def _keep(self, number: int, kind: PromptKind, ids: Ids, anchors: list[tuple[Hashable, int]]) -> None:
        kind.last, kind.anchors = ids, anchors
        self._kinds[number] = kind
        self._kept_tokens += len(ids)
        for each in anchors:
            self._by_anchor[each] = number
        while len(self._kinds) > MAX_KINDS or self._kept_tokens > MAX_KEPT_TOKENS:
            self._forget(next(iter(self._kinds)))

    def _forget(self, number: int) -> PromptKind:
        kind = self._kinds.pop(number)
        self._kept_tokens -= len(kind.last)
        for each in kind.anchors:
            if self._by_anchor.get(each) == number:
                del self._by_anchor[each]
        return kind

    def check_integrity(self) -> None:
        """Asserts that the bounds hold, and that what finds a kind is as they are."""
        assert len(self._kinds) <= MAX_KINDS
        assert self._kept_tokens == sum(len(kind.last) for kind in self._kinds.values()) <= MAX_KEPT_TOKENS
        assert set(self._by_anchor.values()) <= self._kinds.keys()
        assert len(self._by_anchor) <= sum(len(kind.anchors) for kind in self._kinds.values())

"""A place in the prompts of one kind where text changes with each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_importance.observe.volatile.parting import Ids, Parting

MIN_PARTINGS = 8
"""Prompts with a text of their own there, beside the first, before a place is one."""
NEAR = 4
"""Tokens between fields that are one: of a clock sometimes the seconds change, sometimes the hour."""
MAX_SPREAD = 32
"""Tokens over which the starts of one field may be spread."""
MAX_VARIANTS = 64
CONTEXT = 12
"""Tokens of an example on both sides of the field."""
SHOWN = 32
"""Tokens of a field that an example shows."""

_DAY = 86_400.0
_SHORTEST = 3600.0  # a rate from less time would be one of a burst


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of the last two prompts that parted there, as JSON takes them."""

    before: list[int]
    variants: tuple[list[int], list[int]]
    after: list[int]


@dataclass(slots=True)
class VolatilePlace:
    """Attributes:
    anchor: where the first difference began.
    start: the first token that has differed.
    end: the end of the field, where it was longest.
    latest_start: the last token at which a difference began.
    first_seconds: when prompts parted there first.
    prompt_tokens_before: prompt tokens of the server until then.
    last_seconds: when they did last.
    partings: prompts whose text there was new.
    starts: partings that begin there, of wider or narrower fields too, since it is looked at.
    lost_tokens: tokens of these behind the field that the prompt before had too.
    example: of the last of them.
    is_known: whether it has been found volatile.
    lead: token ids in front of the field, at most CONTEXT + MAX_SPREAD.
    """

    anchor: int
    start: int
    end: int
    latest_start: int
    first_seconds: float
    prompt_tokens_before: int
    last_seconds: float = 0.0
    partings: int = 0
    starts: int = 0
    lost_tokens: int = 0
    example: Example | None = None
    is_known: bool = False
    lead: list[int] = field(default_factory=list)
    _variants: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def is_wide(self) -> bool:
        return self.end - self.start > MAX_SPREAD

    def takes(self, there: Parting) -> bool:
        """Whether the field of a parting is this one.

        Prompts of two sessions may part at the clock and go on alike behind their first question only: that
        is another field.
        """
        return (
            self.starts_at(there.start)
            and (there.end - there.start > MAX_SPREAD) is self.is_wide
            and there.start <= max(self.end, self.latest_start) + NEAR
            and there.end >= self.start - NEAR
        )

    def starts_at(self, token: int) -> bool:
        """Whether a field that begins with this token may be this one."""
        return max(self.latest_start, token) - min(self.start, token) <= MAX_SPREAD

    def parted(self, ids: Ids, known: Ids, there: Parting, now: float) -> bool:
        """Takes a parting in; whether the prompt's text there was new."""
        self.start, self.latest_start = min(self.start, there.start), max(self.latest_start, there.start)
        self.end = max(self.end, there.end)
        self._remember(known)
        if not self._remember(ids):
            return False
        self.last_seconds = now
        self.partings += 1
        self.lost_tokens += there.run
        self.lead = ids[max(0, self.start - CONTEXT - MAX_SPREAD) : self.start].tolist()
        self.example = Example(
            before=self.lead[-CONTEXT:],
            variants=(
                known[self.start : there.known_end][:SHOWN].tolist(),
                ids[self.start : there.end][:SHOWN].tolist(),
            ),
            after=ids[there.end : there.end + CONTEXT].tolist(),
        )
        return True

    def _remember(self, ids: Ids) -> bool:
        """Whether the text around the field is none of the last MAX_VARIANTS."""
        # Always the same span, so that a text is known again whatever it is compared with. What is behind the
        # field there is alike in all of them: MIN_RUN tokens are.
        text = hash(ids[max(0, self.anchor - MAX_SPREAD) : self.anchor + 2 * MAX_SPREAD].tobytes())
        is_new = text not in self._variants
        self._variants[text] = None
        self._variants.move_to_end(text)
        if len(self._variants) > MAX_VARIANTS:
            self._variants.popitem(last=False)
        return is_new

    def is_field_of(self, other: VolatilePlace) -> bool:
        """Whether the same text is in front of both: prompts of several kinds may begin with one line."""
        start = min(self.start, other.start)
        mine, theirs = self._in_front_of(start), other._in_front_of(start)
        return abs(self.start - other.start) <= MAX_SPREAD and mine == theirs

    def _in_front_of(self, start: int) -> list[int]:
        until = len(self.lead) - (self.start - start)
        return self.lead[max(0, until - CONTEXT) : max(0, until)]

    def with_kind(self, other: VolatilePlace) -> VolatilePlace:
        """This place and the same one in prompts of another kind, together."""
        return replace(
            self,
            start=min(self.start, other.start),
            end=max(self.end, other.end),
            first_seconds=min(self.first_seconds, other.first_seconds),
            prompt_tokens_before=min(self.prompt_tokens_before, other.prompt_tokens_before),
            partings=self.partings + other.partings,
            lost_tokens=self.lost_tokens + other.lost_tokens,
        )

    def describe(self, now: float) -> dict[str, Any]:
        """As JSON, with token ids for text."""
        assert self.example is not None
        seconds = now - self.first_seconds
        return {
            "start_token": self.start,
            "end_token": self.end,
            "prompts": self.partings,
            "lost_tokens": self.lost_tokens,
            "seconds": seconds,
            "lost_tokens_per_day": round(self.lost_tokens * _DAY / max(seconds, _SHORTEST)),
            "before_ids": self.example.before,
            "variants_ids": list(self.example.variants),
            "after_ids": self.example.after,
        }


CURE = "move it behind the text that stays the same, or strip it in the client"


def sentence(place: Mapping[str, Any]) -> str:
    """One place in one line.

    Args:
        place: of ``VolatileBeginnings.places``, with ``variants`` as texts.
    """
    one, other = (" ".join(text.split()) for text in place["variants"])
    return (
        f"prompts part at token {place['start_token']:,} ({one!r}, then {other!r}) and go on alike: "
        f"{place['lost_tokens']:,} tokens behind it computed again in {place['prompts']:,} prompts, "
        f"{place['lost_tokens_per_day']:,} a day at this rate"
    )

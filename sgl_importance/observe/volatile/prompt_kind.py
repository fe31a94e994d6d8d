"""Prompts with mostly the same beginning: the last of them, and the places where they part."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sgl_importance.observe.volatile.parting import Parting
from sgl_importance.observe.volatile.token_ids import Ids
from sgl_importance.observe.volatile.volatile_place import MIN_PARTINGS, VolatilePlace

MAX_PLACES = 4


@dataclass(slots=True)
class PromptKind:
    """Attributes:
    last: the last prompt of the kind.
    anchors: by which it is found.
    places: where its prompts have parted, the last one last.
    partings: of its prompts, at whatever place, by whether the field was wide.
    """

    last: Ids
    anchors: list[tuple[Hashable, int]]
    places: list[VolatilePlace] = field(default_factory=list)
    partings: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

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
        self.partings[place.is_wide] += 1
        place.is_known = place.is_known or self._is_volatile(place)
        return place.lost_tokens - before if place.is_known else 0

    def _is_volatile(self, place: VolatilePlace) -> bool:
        """Prompts that part at random places part at each of them a few times, too."""
        return place.partings >= MIN_PARTINGS and 4 * place.partings >= 3 * self.partings[place.is_wide]

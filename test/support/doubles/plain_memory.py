"""The memory of paths and its accounts once more, page by page and without a tree."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_importance.misses.account import LOOKED_AT, NAMESPACES_LOOKED_AT
from sgl_importance.misses.reason import Fate, Reason

Path = tuple[int, ...]


@dataclass
class Page:
    fate: Fate | None
    stamp: int
    rid: str
    born: int


class PlainMemory:
    """Every known page by namespace and by all tokens up to its end."""

    def __init__(self, page_size: int, *, gone_pages: int, max_marks: int) -> None:
        self.page_size = page_size
        self.gone_pages = gone_pages
        self.max_marks = max_marks
        self.pages: dict[tuple[str, Path], Page] = {}
        self.marks: dict[tuple[str, Path], float] = {}
        self.events = 0

    def prefixes(self, tokens: Path) -> list[Path]:
        return [tokens[:end] for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def known(self, namespace: str, tokens: Path) -> list[Page]:
        found = []
        for prefix in self.prefixes(tokens):
            if (namespace, prefix) not in self.pages:
                break
            found.append(self.pages[namespace, prefix])
        return found

    def asked(self, namespace: str, tokens: Path, rid: str) -> None:
        self.events += 1
        for page in self.known(namespace, tokens):
            page.stamp, page.rid = self.events, rid

    def holds(self, namespace: str, tokens: Path, rid: str, *, from_token: int) -> None:
        self._enter(namespace, tokens, None, rid, from_token)

    def not_kept(self, namespace: str, tokens: Path, fate: Fate, rid: str) -> None:
        if self.prefixes(tokens):
            self._enter(namespace, tokens, fate, rid, 0)
            self._forget(fate.time)

    def _enter(self, namespace: str, tokens: Path, fate: Fate | None, rid: str, from_token: int) -> None:
        self.events += 1
        for prefix in self.prefixes(tokens):
            place = namespace, prefix
            page = self.pages.setdefault(place, Page(fate, 0, rid, self.events))
            page.stamp = self.events
            self.marks.pop(place, None)
            if len(prefix) > from_token:
                page.rid = rid
                if fate is None or page.fate is not None:
                    page.fate = fate

    def gone(self, namespace: str, tokens: Path, from_token: int, fate: Fate) -> None:
        for prefix in self.prefixes(tokens):
            if len(prefix) > from_token:
                self.pages[namespace, prefix].fate = fate
        self._forget(fate.time)

    def flushed(self, fate: Fate) -> None:
        for page in self.pages.values():
            page.fate = page.fate or fate
        self._forget(fate.time)

    def _forget(self, now: float) -> None:
        while True:
            gone = [(page.stamp, -len(place[1]), place) for place, page in self.pages.items() if page.fate]
            if len(gone) <= self.gone_pages:
                break
            namespace, path = min(gone)[2]
            del self.pages[namespace, path]
            below = len(path) + self.page_size
            self.marks = {
                place: time
                for place, time in self.marks.items()
                if not (place[0] == namespace and len(place[1]) == below and place[1][: len(path)] == path)
            }
            self.marks[namespace, path] = now
        while len(self.marks) > self.max_marks:
            del self.marks[next(iter(self.marks))]

    # ---- the account ----

    def reasons(self, namespace: str, prompt: Path, found: int) -> list[Reason]:
        """The reason of each token behind those found."""
        size = self.page_size
        usable = max(len(prompt) - 1, 0) // size * size
        own = self.known(namespace, prompt[:usable])
        known = len(own) * size
        unknown, _ = self.leaves(namespace, prompt)
        elsewhere = 0 if unknown is Reason.FORGOTTEN else self._elsewhere(namespace, prompt[:usable])
        reasons = []
        for token in range(found, len(prompt)):
            if token >= usable:
                reasons.append(Reason.SHORT)
            elif token < known:
                fate = own[token // size].fate
                reasons.append(Reason.UNUSED if fate is None else fate.reason)
            elif token < elsewhere:
                reasons.append(Reason.OTHER_NAMESPACE)
            else:
                reasons.append(unknown)
        return reasons

    def leaves(self, namespace: str, prompt: Path) -> tuple[Reason, tuple[int, str] | None]:
        """The reason of what the namespace does not know; the token where the prompt parts, and from whom."""
        size = self.page_size
        usable = max(len(prompt) - 1, 0) // size * size
        known = len(self.known(namespace, prompt[:usable])) * size
        if known >= usable:
            return Reason.NEVER_SEEN, None
        if (namespace, prompt[: known + size]) in self.marks:
            return Reason.FORGOTTEN, None
        next_pages = [
            (page.born, path[known:], page.rid)
            for (each, path), page in self.pages.items()
            if each == namespace and len(path) == known + size and path[:known] == prompt[:known]
        ]
        latest = sorted(next_pages, reverse=True)[:LOOKED_AT]
        shares = [(_common(tokens, prompt[known:]), rid) for _, tokens, rid in latest]
        most = max((common for common, _ in shares), default=-1)
        if most < (0 if known else 1):
            return Reason.NEVER_SEEN, None
        rid = next(rid for common, rid in shares if common == most)
        return Reason.PARTED, (known + most, rid)

    def _elsewhere(self, namespace: str, prompt: Path) -> int:
        first = prompt[: self.page_size]
        sharing = sorted(
            (
                (page.stamp, each)
                for (each, path), page in self.pages.items()
                if path == first and each != namespace
            ),
            reverse=True,
        )
        most = 0
        for _, other in sharing[:NAMESPACES_LOOKED_AT]:
            held = 0
            for page in self.known(other, prompt):
                if page.fate is not None:
                    break
                held += self.page_size
            most = max(most, held)
        return most


def _common(left: Path, right: Path) -> int:
    return next(
        (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
        min(len(left), len(right)),
    )

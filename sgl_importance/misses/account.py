"""The account of one prompt: where its tokens were found, and the one reason for each that was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from sgl_importance.misses.path_memory import Namespace, PathMemory
from sgl_importance.misses.path_tree import (
    TOKEN_BYTES,
    KnownPath,
    PathNode,
    common_tokens,
    unpacked,
    walk,
)
from sgl_importance.misses.reason import Fate, PathVisit, Reason
from sgl_importance.tiers import Tier

LOOKED_AT = 8
"""Latest paths that go on from a place, of which the nearest is taken."""
NAMESPACES_LOOKED_AT = 4
"""Other namespaces that share a prompt's first page, the last that were asked for."""
TOKENS_BEFORE = 12
"""Tokens of both paths that are shown in front of the place where they part."""
TOKENS_BEHIND = 200


class Part(NamedTuple):
    """Tokens of a prompt that were not found, next to each other and for one reason.

    Attributes:
        start: the first.
        stop: behind the last.
        fate: what became of them; None where they were not known.
        since: of FORGOTTEN: Unix time when they were forgotten.
    """

    reason: Reason
    start: int
    stop: int
    fate: Fate | None = None
    since: float | None = None

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class PathParting(NamedTuple):
    """Where a prompt left the nearest path of its namespace.

    Attributes:
        token: index of the first token that differs.
        visit: the last request that asked for that path.
        before: packed tokens in front of the place, the same in both.
        asked: packed tokens of the prompt from there on.
        known: packed tokens of the path from there on.
    """

    token: int
    visit: PathVisit | None
    before: bytes
    asked: bytes
    known: bytes


class MissAccount(NamedTuple):
    """Of one prompt. ``found`` and the parts add up to its tokens.

    Attributes:
        tokens: of the prompt.
        found: tokens that were not computed, by the tier that held them.
        parts: of the rest, in order.
        unknown: the namespace's own reason for what it does not know: NEVER_SEEN, PARTED or FORGOTTEN.
        parting: None where the prompt left no known path.
    """

    tokens: int
    found: Mapping[Tier, int]
    parts: tuple[Part, ...]
    unknown: Reason
    parting: PathParting | None

    def missed(self) -> dict[Reason, int]:
        """Tokens by reason, those that occur."""
        missed: dict[Reason, int] = {}
        for part in self.parts:
            missed[part.reason] = missed.get(part.reason, 0) + part.tokens
        return missed


class AccountedRequest(NamedTuple):
    """A request and its account."""

    visit: PathVisit
    namespace: Namespace
    account: MissAccount


def account_of(
    memory: PathMemory, namespace: Namespace, prompt: bytes, known_path: KnownPath, found: Mapping[Tier, int]
) -> MissAccount:
    """Accounts for a prompt, ahead of ``PathMemory.asked`` and of its own way into the cache.

    Args:
        prompt: packed tokens.
        known_path: what is known of them, by ``PathMemory.path``.
        found: tokens that were not computed, by the tier that held them.
    """
    looked_up = len(prompt) // TOKEN_BYTES
    tokens = looked_up + memory.ahead
    usable = max(looked_up - 1, 0) // memory.page_size * memory.page_size
    path, known = _up_to(known_path, usable)
    parting, since = _end_of(memory, namespace, prompt, path, known, usable)
    unknown = Reason.NEVER_SEEN
    if since is not None:
        unknown = Reason.FORGOTTEN
    elif parting is not None:
        unknown = Reason.PARTED

    parts: list[Part] = []
    start = min(sum(found.values()), tokens)

    def add(stop: int, reason: Reason, fate: Fate | None = None, since: float | None = None) -> None:
        nonlocal start
        if stop <= start:
            return
        last = parts[-1] if parts else None
        if last is not None and (last.reason, last.fate) == (reason, fate):
            parts[-1] = Part(reason, last.start, stop, fate, since)
        else:
            parts.append(Part(reason, start, stop, fate, since))
        start = stop

    end = 0
    for node, matched in path:
        end += matched
        add(end, Reason.UNUSED if node.fate is None else node.fate.reason, node.fate)
    if since is None and start < usable:
        add(_held_elsewhere(memory, namespace, prompt[: usable * TOKEN_BYTES]), Reason.OTHER_NAMESPACE)
    add(usable, unknown, since=since)
    add(tokens, Reason.SHORT)
    return MissAccount(tokens, found, tuple(parts), unknown, parting)


def _up_to(path: KnownPath, usable: int) -> tuple[KnownPath, int]:
    """The path without what lies behind ``usable`` tokens, and its tokens."""
    known = sum(matched for _, matched in path)
    if known <= usable:
        return path, known
    # A prompt of whole pages: the last of them is computed always.
    node, matched = path[-1]
    left = matched - (known - usable)
    return [*path[:-1], (node, left)] if left else path[:-1], usable


def _end_of(
    memory: PathMemory,
    namespace: Namespace,
    prompt: bytes,
    path: KnownPath,
    known: int,
    usable: int,
) -> tuple[PathParting | None, float | None]:
    """Where the prompt leaves what its namespace knows: the nearest path that goes on differently, and the
    time when what would have gone on there was forgotten."""
    if known >= usable:
        return None, None
    page = prompt[known * TOKEN_BYTES : known * TOKEN_BYTES + memory.page_bytes]
    root = memory.root(namespace)
    node, matched = path[-1] if path else (root, 0)
    if node is None:
        return None, None
    if matched < node.length:
        return _parting(memory, prompt, known, node, matched), None
    if (since := memory.marked(node, page)) is not None:
        return None, since
    nearest = _nearest(node, page, is_beginning=not known)
    return None if nearest is None else _parting(memory, prompt, known, nearest, 0), None


def _nearest(node: PathNode, page: bytes, *, is_beginning: bool) -> PathNode | None:
    """What follows a node and begins most like a page, the latest of several."""
    nearest, shared = None, 0  # at the very beginning, a path is near if it shares a token
    for first_page in islice(reversed(node.children), LOOKED_AT):
        if nearest is None and not is_beginning:
            nearest = first_page
        if first_page.startswith(page[:TOKEN_BYTES]) and (common := common_tokens(page, first_page)) > shared:
            nearest, shared = first_page, common
    return None if nearest is None else node.children[nearest]


def _parting(memory: PathMemory, prompt: bytes, known: int, node: PathNode, matched: int) -> PathParting:
    """
    Args:
        known: tokens that the prompt shares with known paths, in whole pages; they part within the next one.
        node: the nearest path goes on in it.
        matched: tokens of the node that are among those.
    """
    page = prompt[known * TOKEN_BYTES :][: memory.page_bytes]
    differing = node.tokens[matched * TOKEN_BYTES :][: memory.page_bytes]
    same = common_tokens(page, differing)
    if memory.ahead and unpacked(page)[same] == unpacked(differing)[same]:
        same += 1  # only the one behind it is another
    token = known + same
    at = token * TOKEN_BYTES
    behind = TOKENS_BEHIND * TOKEN_BYTES
    return PathParting(
        token=token,
        visit=node.visit,
        before=prompt[max(at - TOKENS_BEFORE * TOKEN_BYTES, 0) : at],
        asked=prompt[at : at + behind],
        known=b"".join(_onwards(node, matched + token - known, behind)),
    )


def _onwards(node: PathNode, skipped: int, wanted: int) -> Iterator[bytes]:
    """Bytes of a path from within a node on, along the latest of what follows."""
    start = skipped * TOKEN_BYTES
    while True:
        part = node.tokens[start : start + wanted]
        yield part
        wanted, start = wanted - len(part), 0
        if wanted <= 0 or not node.children:
            return
        node = next(reversed(node.children.values()))


def _held_elsewhere(memory: PathMemory, namespace: Namespace, prompt: bytes) -> int:
    """Tokens that another namespace's paths in the cache begin with, in whole pages."""
    others = (each for each in memory.sharing(prompt[: memory.page_bytes]) if each != namespace)
    most = 0
    for other in islice(others, NAMESPACES_LOOKED_AT):
        held = 0
        root = memory.root(other)
        assert root is not None
        for node, matched in walk(root, prompt, memory.page_bytes):
            if node.fate is not None:
                break
            held += matched
        most = max(most, held)
    return most

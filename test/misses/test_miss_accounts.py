"""Accounts of misses, held to the same account without a tree over random histories."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.misses.account import account_of
from sgl_importance.misses.path_memory import PathMemory
from sgl_importance.misses.path_tree import PathNode, common_tokens, packed, unpacked
from sgl_importance.misses.reason import Fate, PathVisit, Reason
from sgl_importance.tiers import Tier

from support.doubles.plain_memory import Path, PlainMemory

NAMESPACES = {name: (None, name or None) for name in ("", "a", "b", "c", "d", "e", "f")}
LOST = (Reason.EVICTED, Reason.STORAGE, Reason.SESSION_OVER)


class History:
    """Drives both memories as a cache does, which holds paths and gives up their ends."""

    def __init__(self, page_size: int, gone_pages: int, max_marks: int) -> None:
        bounds = {"gone_pages": gone_pages, "max_marks": max_marks}
        self.memory = PathMemory(page_size, **bounds)
        self.plain = PlainMemory(page_size, **bounds)
        self.page_size = page_size
        self.held: dict[tuple[str, Path], PathNode] = {}
        """Handles of the ends of held paths."""
        self.clock = 0

    def fate(self, reason: Reason) -> Fate:
        self.clock += 1
        return Fate(reason, self.clock, float(self.clock))

    def visit(self) -> PathVisit:
        self.clock += 1
        return PathVisit(str(self.clock), self.clock, float(self.clock))

    def whole(self, tokens: Path) -> Path:
        return tokens[: len(tokens) // self.page_size * self.page_size]

    def ask(self, name: str, tokens: Path) -> None:
        self.judge(name, tokens)
        visit = self.visit()
        namespace, prompt = NAMESPACES[name], packed(tokens)
        self.memory.asked(namespace, prompt, self.memory.path(namespace, prompt), visit)
        assert visit.rid is not None
        self.plain.asked(name, tokens, visit.rid)

    def hold(self, name: str, tokens: Path) -> None:
        """The cache takes a path in behind the longest beginning of it that it holds."""
        tokens = self.whole(tokens)
        start, parent = 0, None
        for end in range(len(tokens), 0, -self.page_size):
            if (handle := self.handle(name, tokens[:end])) is not None:
                start, parent = end, handle
                break
        if start == len(tokens):
            return
        visit = self.visit()
        end_node = self.memory.holds(parent, NAMESPACES[name], packed(tokens[start:]), visit)
        self.held.pop((name, tokens[:start]), None)
        self.held[name, tokens] = end_node
        assert visit.rid is not None
        self.plain.holds(name, tokens, visit.rid, from_token=start)

    def handle(self, name: str, tokens: Path) -> PathNode | None:
        """The end of a held path, cut there where it goes on."""
        for (each, path), node in self.held.items():
            if each == name and path[: len(tokens)] == tokens:
                behind = len(path) - len(tokens)
                return self.memory.cut(node, behind) if behind else node
        return None

    def lose(self, index: int, pages: int, reason: Reason) -> None:
        """The cache gives up the last pages of a held path that no other one needs."""
        if not self.held:
            return
        (name, path), node = list(self.held.items())[index % len(self.held)]
        others = [other for (each, other) in self.held if each == name and other != path]
        shared = max((common(path, other) for other in others), default=0)
        keep = max(len(path) - pages * self.page_size, shared // self.page_size * self.page_size)
        if keep >= len(path):
            return
        front = self.memory.cut(node, len(path) - keep) if keep else None
        del self.held[name, path]
        if front is not None and not any(other[:keep] == path[:keep] for other in others):
            self.held[name, path[:keep]] = front
        fate = self.fate(reason)
        self.memory.gone(node, len(path) - keep, fate)
        self.plain.gone(name, path, keep, fate)

    def drop(self, name: str, tokens: Path) -> None:
        fate, visit = self.fate(Reason.NOT_KEPT), self.visit()
        self.memory.not_kept(NAMESPACES[name], packed(tokens), fate, visit)
        assert visit.rid is not None
        self.plain.not_kept(name, self.whole(tokens), fate, visit.rid)

    def flush(self) -> None:
        fate = self.fate(Reason.FLUSHED)
        self.memory.flushed(fate)
        self.plain.flushed(fate)
        self.held.clear()

    def judge(self, name: str, tokens: Path, found: int | None = None) -> None:
        """Compares the accounts of a prompt."""
        own = self.plain.known(name, tokens)
        held = next((index for index, page in enumerate(own) if page.fate is not None), len(own))
        most = min(held * self.page_size, max(len(tokens) - 1, 0) // self.page_size * self.page_size)
        found = most if found is None else min(found, most)
        namespace, prompt = NAMESPACES[name], packed(tokens)
        path = self.memory.path(namespace, prompt)
        account = account_of(self.memory, namespace, prompt, path, {Tier.DEVICE: found})
        reasons = [part.reason for part in account.parts for _ in range(part.tokens)]
        assert reasons == self.plain.reasons(name, tokens, found)
        assert found + sum(account.missed().values()) == len(tokens) == account.tokens
        unknown, parting = self.plain.leaves(name, tokens)
        assert account.unknown is unknown
        if parting is None:
            assert account.parting is None
            return
        assert account.parting is not None
        assert account.parting.visit is not None
        assert (account.parting.token, account.parting.visit.rid) == parting
        at = account.parting.token
        assert unpacked(account.parting.asked) == list(tokens[at : at + 200])
        known_path = (*tokens[:at], *unpacked(account.parting.known))
        assert self.plain.known(name, known_path[: (at // self.page_size + 1) * self.page_size])


def common(left: Path, right: Path) -> int:
    return common_tokens(packed(left), packed(right))


paths = st.lists(st.integers(0, 2), max_size=10).map(tuple)
names = st.sampled_from(list(NAMESPACES))
steps = st.one_of(
    st.tuples(st.just("ask"), names, paths),
    st.tuples(st.just("hold"), names, paths),
    st.tuples(st.just("lose"), st.integers(0, 20), st.integers(1, 4), st.sampled_from(LOST)),
    st.tuples(st.just("drop"), names, paths),
    st.tuples(st.just("judge"), names, paths, st.integers(0, 10)),
    st.just(("flush",)),
)


@settings(max_examples=150, deadline=None)
@given(
    page_size=st.integers(1, 3),
    gone_pages=st.integers(0, 12),
    max_marks=st.integers(0, 6),
    history=st.lists(steps, max_size=40),
    probes=st.lists(st.tuples(names, paths), max_size=6),
)
def test_accounts_agree_with_those_without_a_tree(page_size, gone_pages, max_marks, history, probes):
    both = History(page_size, gone_pages, max_marks)
    for kind, *arguments in history:
        getattr(both, kind)(*arguments)
        both.memory.check_integrity()
        assert len(both.memory) == sum(page.fate is not None for page in both.plain.pages.values())
    for name, tokens in probes:
        both.judge(name, tokens)


def test_long_histories_agree_and_meet_every_reason():
    chance = random.Random(7)
    met: Counter[Reason] = Counter()
    for _ in range(60):
        both = History(chance.randint(1, 3), chance.randint(2, 12), chance.randint(1, 6))
        for _ in range(60):
            name = chance.choice(list(NAMESPACES)[: chance.choice((1, 2, 7))])
            known = [path for _, path in both.plain.pages] or [()]
            tokens = (*chance.choice(known), *(chance.randint(0, 2) for _ in range(chance.randint(0, 6))))
            step = chance.choice(("ask", "hold", "hold", "lose", "lose", "drop", "judge", "flush"))
            if step == "flush" and chance.random() < 0.8:
                continue
            match step:
                case "lose":
                    both.lose(chance.randrange(20), chance.randint(1, 4), chance.choice(LOST))
                case "flush":
                    both.flush()
                case "judge":
                    both.judge(name, tokens, found := chance.randint(0, 4))
                    met.update(both.plain.reasons(name, tokens, min(found, len(tokens))))
                case _:
                    getattr(both, step)(name, tokens)
            both.memory.check_integrity()
    assert met.keys() == set(Reason), met

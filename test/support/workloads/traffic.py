"""Prompts of mixed traffic: growing chats, shared prefixes under salts, one-off scans, cut prompts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

VOCABULARY = 5_000
SALTS = (None, None, None, "tenant-a", "tenant-b")
MAX_CHATS = 40


@dataclass
class Chat:
    """A conversation; its next prompt is all that was said."""

    tokens: list[int]
    salt: str | None
    turns: int = 0


@dataclass
class Traffic:
    """Draws prompts.

    Args:
        rng: decides everything.
        max_tokens: of a prompt.

    Attributes:
        drawn: prompts by kind.
    """

    rng: random.Random
    max_tokens: int
    chats: list[Chat] = field(default_factory=list)
    drawn: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._system = [self._words(self.rng.randrange(8, self.max_tokens // 3)) for _ in range(6)]

    def draw(self) -> tuple[list[int], Chat]:
        """A prompt, and the chat that its answer belongs to."""
        (kind,) = self.rng.choices(("turn", "new chat", "scan", "cut"), (10, 4, 3, 2))
        if not self.chats and kind in ("turn", "cut"):
            kind = "new chat"
        self.drawn[kind] += 1
        if kind == "scan":
            length = self.rng.randrange(self.max_tokens // 2, self.max_tokens)
            return self._asked(Chat(self._words(length), self.rng.choice(SALTS)))
        if kind == "new chat":
            chat = Chat(list(self.rng.choice(self._system)), self.rng.choice(SALTS))
            self.chats.append(chat)
            if len(self.chats) > MAX_CHATS:
                self.chats.pop(self.rng.randrange(len(self.chats)))
        else:
            # Mostly who spoke last goes on.
            chat = self.chats[-1 - min(int(self.rng.expovariate(0.15)), len(self.chats) - 1)]
        if kind == "cut":
            return self._asked(Chat(chat.tokens[: self.rng.randrange(2, len(chat.tokens) + 1)], chat.salt))
        if len(chat.tokens) > self.max_tokens - 24:
            chat.tokens = list(self.rng.choice(self._system))
        chat.tokens = chat.tokens + self._words(self.rng.randrange(1, 20))
        return self._asked(chat)

    def answered(self, chat: Chat, tokens: list[int]) -> None:
        """The chat goes on behind what was generated."""
        chat.tokens = list(tokens)
        chat.turns += 1

    @staticmethod
    def _asked(chat: Chat) -> tuple[list[int], Chat]:
        return list(chat.tokens), chat

    def _words(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

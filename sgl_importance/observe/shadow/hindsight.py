"""What it would be worth that sessions say when they are over: a shadow of importance that looks ahead."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.observe.shadow.comparison import Comparison
from sgl_importance.observe.shadow.shadow_cache import MAX_RUNNING, ShadowCache
from sgl_importance.reuse.answer_end import AnswerEnd

REQUESTS_AHEAD = 1024
"""A session that none of so many later requests names counts as over."""
BYTES_AHEAD = 64 << 20
"""Of events that wait: where pages are short and prompts long, they are of fewer requests."""
_EVENT_BYTES = 256
"""Of an event, beside its page digests."""


class _Waiting(NamedTuple):
    """An event that the shadow has yet to follow."""

    follow: Callable[[], None]
    num_bytes: int
    is_admission: bool


class _Admitted(NamedTuple):
    """A request that the shadow has admitted."""

    prompt: list[bytes]
    session: SessionName | None


class Hindsight:
    """A shadow cache some requests behind its server, to which each session says that it is over.

    A session says so with its last answer: where no request names it among those that wait by then. One that
    comes back later has said so too early and finds less, so true ends would save what is counted here, or
    more. Where none of the first requests names a session, nothing is followed.

    Args:
        cache: of importance, as large as LRU's.
        comparison: of it with LRU, over the requests that were followed.
    """

    def __init__(self, cache: ShadowCache, comparison: Comparison) -> None:
        self._cache = cache
        self._comparison = comparison
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = self._waiting_requests = 0
        self._prompt_pages: OrderedDict[str, int] = OrderedDict()  # by request that the server runs
        self._running: OrderedDict[str, _Admitted] = OrderedDict()  # by request that the shadow runs
        self._to_end: Counter[SessionName] = Counter()  # requests that wait for their end here
        self._is_followed = True

    # ---- where the server is ----

    def admit(
        self, request: str, pages: list[bytes], tokens: int, session: SessionName | None, lru_hits: int
    ) -> None:
        """A request starts, of which LRU found ``lru_hits`` tokens; the rest as for ``ShadowCache.admit``."""
        if not self._is_followed:
            return
        if session is not None:
            self._to_end[session] += 1
        self._prompt_pages[request] = len(pages)
        if len(self._prompt_pages) > MAX_RUNNING:
            self._prompt_pages.popitem(last=False)
        packed, size = _packed(pages)
        self._wait(
            lambda: self._admit(request, _unpacked(packed, size), tokens, session, lru_hits),
            len(packed),
            is_admission=True,
        )

    def finish(self, request: str, pages: list[bytes], tokens: int, answer_end: AnswerEnd) -> None:
        """A request ended; as for ``ShadowCache.finish``."""
        if (prompt_pages := self._prompt_pages.pop(request, None)) is None:
            return
        packed, size = _packed(pages[prompt_pages:])
        self._wait(lambda: self._finish(request, _unpacked(packed, size), tokens, answer_end), len(packed))

    def gone(self, request: str) -> None:
        """A request will not be finished."""
        if self._prompt_pages.pop(request, None) is not None:
            self._wait(lambda: self._gone(request))

    def told(self, request: str, answer_end: AnswerEnd) -> None:
        """It became known how the answer of a finished request had ended."""
        self._wait(lambda: self._cache.told(request, answer_end))

    def session_over(self, name: SessionName) -> None:
        """A session said that it is over."""
        self._wait(lambda: self._cache.session_over(name))

    def _wait(self, follow: Callable[[], None], num_bytes: int = 0, *, is_admission: bool = False) -> None:
        if not self._is_followed:
            return
        num_bytes += _EVENT_BYTES
        self._waiting.append(_Waiting(follow, num_bytes, is_admission))
        self._waiting_bytes += num_bytes
        self._waiting_requests += is_admission
        while self._waiting_requests > REQUESTS_AHEAD or self._waiting_bytes > BYTES_AHEAD:
            if not self._comparison.requests and not self._to_end:
                self._give_up()
                return
            earliest = self._waiting.popleft()
            self._waiting_bytes -= earliest.num_bytes
            self._waiting_requests -= earliest.is_admission
            earliest.follow()

    def _give_up(self) -> None:
        self._is_followed = False
        self._waiting.clear()
        self._prompt_pages.clear()

    # ---- where the shadow is ----

    def _admit(
        self, request: str, pages: list[bytes], tokens: int, session: SessionName | None, lru_hits: int
    ) -> None:
        self._gone(request)  # an earlier one of this name, of whose end nobody told
        hits = self._cache.admit(request, pages, tokens, session)
        assert hits is not None, "what LRU's pool holds this one does"
        self._comparison.add(tokens, lru_hits, hits)
        self._running[request] = _Admitted(pages, session)
        if len(self._running) > MAX_RUNNING:
            self._gone(next(iter(self._running)))

    def _finish(self, request: str, answer: list[bytes], tokens: int, answer_end: AnswerEnd) -> None:
        if (running := self._running.pop(request, None)) is not None:
            self._cache.finish(request, running.prompt + answer, tokens, answer_end)
            self._ended(running.session)

    def _gone(self, request: str) -> None:
        if (running := self._running.pop(request, None)) is not None:
            self._cache.gone(request)
            self._ended(running.session)

    def _ended(self, session: SessionName | None) -> None:
        if session is None:
            return
        self._to_end[session] -= 1
        if not self._to_end[session]:
            del self._to_end[session]
            self._cache.session_over(session)


def _packed(pages: list[bytes]) -> tuple[bytes, int]:
    """Digests one behind the other, and the length of one: a list of them takes four times the memory."""
    return b"".join(pages), len(pages[0]) if pages else 1


def _unpacked(packed: bytes, size: int) -> list[bytes]:
    return [packed[at : at + size] for at in range(0, len(packed), size)]

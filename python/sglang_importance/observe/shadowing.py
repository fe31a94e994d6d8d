"""Feeds the shadow caches of an observing server, on a thread of their own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_batch import Req

from sgl_importance.background.batch_worker import BatchWorker
from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.observe.shadow.shadow_cache import MAX_RUNNING
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.observe.shadow.tiered_shadow import HostWrites
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.reuse.answer_end import AnswerEnd
from sgl_importance.tiers import Tier
from sglang_importance.metrics.scheduler_counters import Counters
from sglang_importance.observe.request_tokens import prompt_and_output_of, prompt_of
from sglang_importance.upstream.request_record import found_tokens, session_name_of

QUEUE_BYTES = 32 << 20
_EVENT_BYTES = 256


class _ShadowEvent(NamedTuple):
    """What happened. Without a request a session was over or, without that too, the cache was flushed.

    Attributes:
        request: its name.
        tokens: at its admission those of its prompt, at its end those of its answer too; else None.
        answer_end: how its answer ended, UNKNOWN without tokens if it will not end; None at its admission.
        session: that it names at its admission, or that was over.
        server_hit_tokens: of its prompt, that the server found on device and host; 0 but at its admission.
    """

    request: str = ""
    tokens: TokenSequence | None = None
    answer_end: AnswerEnd | None = None
    session: SessionName | None = None
    server_hit_tokens: int = 0


class Shadowing:
    """Hands the shadow caches the events of each request, from the scheduler's thread; never waits.

    Args:
        pair: the caches; nobody else may touch them.
        host_pages: says the size of the host tier, which sglang makes later; 0 where there is none.
        writes: when the host gets its copies.
    """

    def __init__(
        self,
        pair: ShadowPair,
        host_pages: Callable[[], int] = lambda: 0,
        writes: HostWrites = HostWrites.WRITE_THROUGH,
    ) -> None:
        self._pair = pair
        self._writes = writes
        self._host_pages: Callable[[], int] | None = host_pages  # None once it was asked
        self._lock = threading.Lock()
        self._busy_seconds = 0.0
        self._server_hit_tokens = 0
        self._retracted: set[str] = set()
        self._given_up: str | None = None  # of which sglang may give the memory back next
        self._dropped = 0
        # Small events that found no room; what they tell is to be heard before anything that came later.
        self._owed: deque[_ShadowEvent] = deque(maxlen=MAX_RUNNING)
        self._worker: BatchWorker[_ShadowEvent] = BatchWorker(
            "importance-shadow",
            self._work,
            max_bytes=QUEUE_BYTES,
            last_words="The comparison under observe ends here; the server goes on",
            batch_items=1,  # waiting events are counted one by one
        )
        self._worker.start()

    # ---- the scheduler's thread ----

    def admitted(self, req: Req) -> None:
        if self._host_pages is not None:  # by the first request all tiers exist
            if pages := self._host_pages():
                with self._lock:
                    self._pair.add_host(pages, self._writes)
            self._host_pages = None
        found = found_tokens(req)
        hits = found[Tier.DEVICE] + found[Tier.HOST]
        self._offer(
            _ShadowEvent(req.rid, prompt_of(req), session=session_name_of(req), server_hit_tokens=hits)
        )

    def finished(self, req: Req, answer_end: AnswerEnd) -> None:
        """The request ended; one that was only retracted goes on for the shadows.

        Whom sglang gives up it does not finish: it sets ``to_finish`` of who finds no room, and lets go of
        who waits with its KV already transferred behind ``gone``.
        """
        given_up, self._given_up = self._given_up, None
        if req.finished():
            self._retracted.discard(req.rid)
            self._offer(_ShadowEvent(req.rid, prompt_and_output_of(req), answer_end))
        elif req.to_finish is not None or req.rid == given_up:
            self._retracted.discard(req.rid)
            self._offer(_ShadowEvent(req.rid, None, AnswerEnd.UNKNOWN))
        else:
            self._retracted.add(req.rid)

    def gone(self, rid: str) -> None:
        """The request was given up while it waited; shadows know of it if it had been retracted."""
        if rid in self._retracted:
            self._retracted.remove(rid)
            self._offer(_ShadowEvent(rid, None, AnswerEnd.UNKNOWN))
        else:
            self._given_up = rid

    def told(self, rid: str, answer_end: AnswerEnd) -> None:
        """It became known how the answer of a finished request had ended."""
        self._offer(_ShadowEvent(rid, None, answer_end))

    def session_over(self, name: SessionName) -> None:
        """A session said that it is over."""
        self._offer(_ShadowEvent(session=name))

    def reset(self) -> None:
        self._offer(_ShadowEvent())

    def _offer(self, event: _ShadowEvent) -> None:
        """Hands an event over, behind what is owed; where there is no room, tokens are dropped."""
        while self._owed and self._has_taken(self._owed[0]):
            self._owed.popleft()
        if not self._owed and self._has_taken(event):
            return
        if event.tokens is not None:
            self._dropped += 1
            if event.answer_end is None:
                return
            # Without a word of its end, the shadows would keep the request's pages for good.
            event = _ShadowEvent(event.request, None, AnswerEnd.UNKNOWN)
        self._owed.append(event)

    def _has_taken(self, event: _ShadowEvent) -> bool:
        tokens = 0 if event.tokens is None else len(event.tokens.tokens)
        return self._worker.offer(event, _EVENT_BYTES + 8 * tokens)

    def count(self, counters: Counters) -> None:
        """Copies what is compared so far to where metrics are published from."""
        compared = self._pair.comparison
        counters.shadow_prompt_tokens = compared.prompt_tokens
        counters.shadow_hit_tokens["lru"] = compared.lru_hit_tokens
        counters.shadow_hit_tokens["importance"] = compared.other_hit_tokens

    def document(self) -> dict[str, Any]:
        """The comparison so far; see ``docs/operate.md``."""
        with self._lock:
            return {
                **self._pair.document(),
                "server_hit_tokens": self._server_hit_tokens,
                "waiting_events": self._worker.unfinished,
                "dropped_events": self._dropped,
                "busy_seconds": self._busy_seconds,
                "failed": self._worker.has_failed,
            }

    # ---- the thread of the shadows ----

    def _work(self, events: list[_ShadowEvent], _dropped: int) -> None:
        for event in events:
            start = time.thread_time()
            self._follow(event)
            with self._lock:
                self._busy_seconds += time.thread_time() - start

    def _follow(self, event: _ShadowEvent) -> None:
        request, sequence, answer_end, session, server_hit_tokens = event
        if sequence is None:
            with self._lock:
                if answer_end is AnswerEnd.UNKNOWN:
                    self._pair.gone(request)
                elif answer_end is not None:
                    self._pair.told(request, answer_end)
                elif session is not None:
                    self._pair.session_over(session)
                else:
                    self._pair.reset()
            return
        digests = sequence.digests(self._pair.page_size)
        with self._lock:
            if answer_end is not None:
                self._pair.finish(request, digests, len(sequence.tokens), answer_end)
            elif self._pair.admit(request, digests, len(sequence.tokens), session) is not None:
                self._server_hit_tokens += server_hit_tokens

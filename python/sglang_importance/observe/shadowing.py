"""Feeds the shadow caches of an observing server, on a thread of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_batch import Req

from sgl_importance.background.batch_worker import BatchWorker
from sgl_importance.nodes.named_sessions import SessionName
from sgl_importance.observe.shadow.shadow_pair import ShadowPair
from sgl_importance.observe.shadow.tiered_shadow import HostWrites
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.reuse.answer_end import AnswerEnd
from sglang_importance.metrics.scheduler_counters import Counters
from sglang_importance.observe.request_tokens import prompt_and_output_of, prompt_of
from sglang_importance.upstream.request_record import session_name_of

QUEUE_BYTES = 32 << 20
_EVENT_BYTES = 256


class _ShadowEvent(NamedTuple):
    """What happened. Without a request a session was over or, without that too, the cache was flushed.

    Attributes:
        request: its name.
        tokens: at its admission those of its prompt, at its end those of its answer too; else None.
        answer_end: how its answer ended, UNKNOWN without tokens if it will not end; None at its admission.
        session: that it names at its admission, or that was over.
    """

    request: str = ""
    tokens: TokenSequence | None = None
    answer_end: AnswerEnd | None = None
    session: SessionName | None = None


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
        self._server_hit_tokens += req.cached_tokens_device + req.cached_tokens_host
        if self._host_pages is not None:  # by the first request all tiers exist
            if pages := self._host_pages():
                with self._lock:
                    self._pair.add_host(pages, self._writes)
            self._host_pages = None
        self._offer(_ShadowEvent(req.rid, prompt_of(req), session=session_name_of(req)))

    def finished(self, req: Req, answer_end: AnswerEnd) -> None:
        """The request ended; one that was only retracted goes on for the shadows."""
        if not req.finished():
            self._retracted.add(req.rid)
            return
        self._retracted.discard(req.rid)
        self._offer(_ShadowEvent(req.rid, prompt_and_output_of(req), answer_end))

    def gone(self, rid: str) -> None:
        """The request was given up while it waited; shadows know of it if it had been retracted."""
        if rid in self._retracted:
            self._retracted.remove(rid)
            self._offer(_ShadowEvent(rid, None, AnswerEnd.UNKNOWN))

    def told(self, rid: str, answer_end: AnswerEnd) -> None:
        """It became known how the answer of a finished request had ended."""
        self._offer(_ShadowEvent(rid, None, answer_end))

    def session_over(self, name: SessionName) -> None:
        """A session said that it is over."""
        self._offer(_ShadowEvent(session=name))

    def reset(self) -> None:
        self._offer(_ShadowEvent())

    def _offer(self, event: _ShadowEvent) -> None:
        tokens = 0 if event.tokens is None else len(event.tokens.tokens)
        self._worker.offer(event, _EVENT_BYTES + 8 * tokens)

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
                "dropped_events": self._worker.dropped,
                "busy_seconds": self._busy_seconds,
                "failed": self._worker.has_failed,
            }

    def settle(self, seconds: float = 10.0) -> None:
        """Waits until what was told so far is counted; for tests.

        Raises:
            TimeoutError: it takes longer than ``seconds``, or the comparison has failed.
        """
        self._worker.settle(seconds)

    def close(self) -> None:
        self._worker.close()

    # ---- the thread of the shadows ----

    def _work(self, events: list[_ShadowEvent], _dropped: int) -> None:
        for event in events:
            start = time.thread_time()
            self._follow(event)
            with self._lock:
                self._busy_seconds += time.thread_time() - start

    def _follow(self, event: _ShadowEvent) -> None:
        request, sequence, answer_end, session = event
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
            else:
                self._pair.admit(request, digests, len(sequence.tokens), session)

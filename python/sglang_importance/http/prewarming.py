"""Brings prefixes into the cache by requests that nobody reads: in the HTTP process, behind all others.

A pre-warm takes upstream's own way through storage, host and prefill: one request of one token for each step
of a path. Only one step is under way at any time, it is sized to about ``STEP_SECONDS``, and no step begins
while a request waits for its first token, so a request waits for at most the rest of one step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_importance.placement.prewarm.ledger_plan import WarmPath
from sglang_importance.http.adapter_namespaces import adapters_by_id, split_namespace
from sglang_importance.http.prewarm_metrics import count
from sglang_importance.http.requests.user_requests import is_of_user
from sglang_importance.placement.prewarm_request import new_rid

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

logger = logging.getLogger(__name__)

STEP_SECONDS = 0.05
"""A step that took longer than this is followed by a smaller one."""
MAX_STEP_TOKENS = 8192
POLL_SECONDS = 0.01
RESERVE = 0.1
"""Share of the device tier that pre-warms nobody asked for leave free, so that they make no request evict."""


class State(StrEnum):
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass
class Job:
    """One pre-warm.

    Attributes:
        job_id: names it.
        origin: "start", "idle", "ledger" or "prompt".
        asked_for: whether somebody named the prompt: it may evict what is worth least, as any request may;
            others stop where free room ends and wait for the server to be idle.
        max_seconds: after which it ends.
        state: how far it is.
        detail: why not everything was brought in; empty where it was.
        total_tokens: to be brought in.
        done_tokens: of these, brought in or found.
        hit_tokens: of these, by the tier that held them; what was in none was computed.
        computed_tokens: that no tier held.
        refused_tokens: of paths that the server does not take, too long ones say.
        seconds: since it began, or that it took.
    """

    job_id: str
    origin: str
    asked_for: bool
    max_seconds: float
    state: State = State.RUNNING
    detail: str = ""
    total_tokens: int = 0
    done_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "storage": 0})
    computed_tokens: int = 0
    refused_tokens: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    task: asyncio.Task[None] | None = None

    def end(self, state: State, detail: str = "") -> None:
        """Ends the job; what a step has written down as its detail stays where none is given."""
        self.state, self.detail, self.ended = state, detail or self.detail, time.monotonic()

    def describe(self) -> dict[str, Any]:
        """The document of ``GET /kv_importance/prewarm/{job_id}``."""
        return {
            "job_id": self.job_id,
            "origin": self.origin,
            "state": self.state.value,
            "detail": self.detail,
            "total_tokens": self.total_tokens,
            "done_tokens": self.done_tokens,
            "hit_tokens": dict(self.hit_tokens),
            "computed_tokens": self.computed_tokens,
            "refused_tokens": self.refused_tokens,
            "seconds": round((self.ended or time.monotonic()) - self.began, 3),
            "max_seconds": self.max_seconds,
        }


class StepSize:
    """Tokens of the next step, so that it takes about ``STEP_SECONDS``.

    Args:
        minimum: tokens that a step has at least.
    """

    def __init__(self, minimum: int) -> None:
        self.minimum = minimum
        self.tokens = minimum

    def took(self, seconds: float) -> None:
        if seconds > STEP_SECONDS:
            self.tokens = max(self.tokens // 2, self.minimum)
        elif seconds < STEP_SECONDS / 2:
            self.tokens = min(self.tokens * 2, max(MAX_STEP_TOKENS, self.minimum))


class Prewarmer:
    """Carries out pre-warms of one server, a step at a time.

    Args:
        manager: sends requests to the scheduler.
        room: asks a data-parallel rank for ``prewarm_facts.room``.
        page_size: tokens per page.
        min_step_tokens: smallest step; a storage tier looks at no fewer tokens than its threshold.
    """

    def __init__(
        self,
        manager: TokenizerManager,
        room: Callable[[int], Awaitable[dict[str, Any]]],
        *,
        page_size: int,
        min_step_tokens: int,
    ) -> None:
        self._manager = manager
        self._room = room
        self._page_size = page_size
        self._steps = StepSize(-(-min_step_tokens // page_size) * page_size)
        self._turn = asyncio.Lock()

    async def run(self, job: Job, paths_of: Sequence[Sequence[WarmPath]]) -> None:
        """Brings paths in until all are in or something ends the job; never raises.

        Args:
            paths_of: by data-parallel rank, best first.
        """
        planned = sum(len(path.token_ids) - path.start for paths in paths_of for path in paths)
        job.total_tokens += planned
        count("prewarm_planned_tokens_total", amount=planned)
        try:
            async with asyncio.timeout(job.max_seconds - (time.monotonic() - job.began)):
                for rank, paths in enumerate(paths_of):
                    await self._warm_rank(job, paths, rank if len(paths_of) > 1 else None)
            job.end(State.DONE)
        except TimeoutError:
            job.end(State.DONE, f"{job.max_seconds:g} seconds were over")
        except asyncio.CancelledError:
            job.end(State.CANCELLED)
        except Exception as error:
            logger.exception("KV importance pre-warm %s", job.job_id)
            job.end(State.FAILED, f"{type(error).__name__}: {error}")

    async def _warm_rank(self, job: Job, paths: Sequence[WarmPath], dp_rank: int | None) -> None:
        for path in paths:
            if not await self._warm(job, path, dp_rank):
                break

    async def _warm(self, job: Job, path: WarmPath, dp_rank: int | None) -> bool:
        """Brings a path in, or what the server takes of it; False where something ends the work on this rank.
        The job's detail names what was in the way.

        Args:
            dp_rank: data-parallel rank; None where there is one only.
        """
        position = path.start
        while position < len(path.token_ids):
            await self._wait_for_requests(job)
            async with self._turn:
                if self._is_busy(any_request=not job.asked_for):
                    continue  # since then, while another job had its turn
                if self._manager.gracefully_exit:  # which waits until no request is left
                    job.detail = "the server is stopping"
                    return False
                stop = self._next_stop(path, position)
                if not job.asked_for and not await self._has_room(stop - position, dp_rank or 0):
                    job.detail = "no free room is left"
                    return False
                began = time.monotonic()
                try:
                    found = await self._step(path, stop, dp_rank)
                except ValueError as refused:  # too long for this server, say
                    self._refuse(job, len(path.token_ids) - position, str(refused))
                    return True
                self._steps.took(time.monotonic() - began)
            self._account(job, position, stop, found)
            position = stop
        return True

    def _next_stop(self, path: WarmPath, position: int) -> int:
        """The token at which the next step ends: a node's end, unless the step were too short or too long."""
        shortest, longest = position + self._steps.minimum, position + self._steps.tokens
        end = next((end for end in path.ends if end >= shortest), path.ends[-1])
        if end - longest < self._steps.minimum:
            return end
        return longest // self._page_size * self._page_size

    async def _step(self, path: WarmPath, stop: int, dp_rank: int | None) -> dict[str, int]:
        """Has a path's first ``stop`` tokens cached; returns the tokens that each tier held of them."""
        token_ids = path.token_ids[:stop].tolist()
        if self._page_size > 1:
            # The last token of a prompt is always computed: one more, and the pages are hit whole. It is
            # in no whole page, so nothing is kept of it.
            token_ids.append(token_ids[-1])
        extra_key, cache_salt = path.namespace
        extra_key, adapter = split_namespace(extra_key, adapters_by_id(self._manager))
        request = GenerateReqInput(
            input_ids=token_ids,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
            rid=new_rid(),
            extra_key=extra_key,
            cache_salt=cache_salt,
            lora_path=adapter,
            routed_dp_rank=dp_rank,
            no_logs=True,
        )
        answer: dict[str, Any] = {}
        try:
            async for part in self._manager.generate_request(request, None):
                answer = part
        except BaseException:
            self._manager.abort_request(str(request.rid))
            raise
        facts = answer["meta_info"]
        if facts["finish_reason"]["type"] == "abort":
            raise ValueError(facts["finish_reason"].get("message", "the server refused"))
        return facts.get("cached_tokens_details") or {"device": facts.get("cached_tokens", 0)}

    def _refuse(self, job: Job, tokens: int, problem: str) -> None:
        job.detail = problem
        job.refused_tokens += tokens
        count("prewarm_refused_tokens_total", amount=tokens)
        logger.info("KV importance pre-warm %s: %s", job.job_id, problem)

    def _account(self, job: Job, position: int, stop: int, found: dict[str, int]) -> None:
        rest = stop - position
        job.done_tokens += rest
        # What is on the device comes first on a path, then host, then storage.
        before = position
        for tier in ("device", "host", "storage"):
            tokens = found.get(tier, 0)
            hit = min(max(tokens - before, 0), rest)
            before = max(before - tokens, 0)
            job.hit_tokens[tier] += hit
            count("prewarm_done_tokens_total", tier, amount=hit)
            rest -= hit
        job.computed_tokens += rest
        count("prewarm_done_tokens_total", "computed", amount=rest)

    async def _has_room(self, tokens: int, dp_rank: int) -> bool:
        room = await self._room(dp_rank)
        return bool(room["free_tokens"] - tokens >= RESERVE * room["total_tokens"])

    async def _wait_for_requests(self, job: Job) -> None:
        while self._is_busy(any_request=not job.asked_for):
            await asyncio.sleep(POLL_SECONDS)

    def _is_busy(self, *, any_request: bool) -> bool:
        """Whether a request waits for its first token; ``any_request``: or runs at all."""
        under_way = requests_under_way(self._manager)
        return any(any_request or not state.time_stats.first_token_time for state in under_way)


def requests_under_way(manager: TokenizerManager) -> Iterator[ReqState]:
    """Requests of users that the scheduler has got and has not finished.

    Not every entry of ``rid_to_state`` is one: a request for several samples (``n``) enters its prompts there
    under ids that are never sent, and samples each prompt under new ids. Nor does a request count that is
    still being tokenized: should a step begin meanwhile, the request waits for the rest of that step. A
    health check that comes while anything runs is never finished, and stays for a second.
    """
    for rid, state in manager.rid_to_state.items():
        if state.dispatched and not state.finished and is_of_user(rid):
            yield state

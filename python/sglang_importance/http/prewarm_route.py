"""``/kv_importance/prewarm``: prefixes brought into the cache before anyone asks for them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import Field
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager

from sgl_importance.options.importance_options import ImportanceOptions
from sgl_importance.placement.ledger.ledger import Ledger
from sgl_importance.placement.ledger.ledger_database import LedgerError
from sgl_importance.placement.ledger.ledger_place import named_place
from sgl_importance.placement.prewarm.ledger_plan import WarmPath, plan_from_ledger
from sgl_importance.policy.cost_model import CostModel
from sglang_importance.http import openapi, prewarm_metrics
from sglang_importance.http.prewarming import RESERVE, Job, Prewarmer, State, requests_under_way
from sglang_importance.http.prompt_tokens import Prompt, prompt_tokens
from sglang_importance.http.requests.user_requests import user_requests
from sglang_importance.http.scheduler_client import ask, ask_each, document_of, json_body, validated
from sglang_importance.http.server_state import server_arguments, tokenizer_manager, wants_key

logger = logging.getLogger(__name__)

MAX_SECONDS = 3600.0
KEPT_JOBS = 64  # the oldest that have ended make room
MAX_RUNNING = 64
"""Pre-warms that callers have begun and that have not ended: each holds its prompt."""
_UNASKED = ("start", "idle")
IDLE_SECONDS = 2.0
"""Without any request of a user, before something is brought in unasked."""
STORAGE_STEP_TOKENS = 256  # fewer are not looked for in storage, by default
COMPUTED_STEP_TOKENS = 64


class PrewarmRequest(Prompt):
    """Body of ``POST /kv_importance/prewarm``; without a prompt, the ledger chooses what is brought in."""

    max_seconds: float | None = Field(
        None,
        gt=0,
        le=MAX_SECONDS,
        description="After which the job ends; without it, what the server was started with.",
    )

    def check_form(self) -> None:
        if self.has_prompt:
            super().check_form()
        elif named := [
            name for name in ("tools", "cache_salt", "extra_key") if getattr(self, name) is not None
        ]:
            raise ValueError(f"{' and '.join(named)} without text, messages or input_ids")

    @property
    def has_prompt(self) -> bool:
        return any(value is not None for value in (self.text, self.messages, self.input_ids))


class Jobs:
    """The pre-warms of this process.

    Args:
        options: what the operator chose.
    """

    def __init__(self, options: ImportanceOptions) -> None:
        self._options = options
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._prewarmer: Prewarmer | None = None

    def begin(self, origin: str, max_seconds: float | None = None, path: WarmPath | None = None) -> Job:
        """Starts a job: one path, or the ledger's choice.

        Raises:
            HTTPException: 503, a caller asks, and too many have not ended.
        """
        running = sum(each.state is State.RUNNING for each in self._jobs.values())
        if origin not in _UNASKED and running >= MAX_RUNNING:
            problem = f"{running} pre-warms have not ended: wait for one of them, or cancel it"
            raise HTTPException(status_code=503, detail=problem)
        job = Job(
            job_id=uuid.uuid4().hex[:12],
            origin=origin,
            asked_for=path is not None,
            max_seconds=max_seconds or float(self._options.prewarm.seconds),
        )
        self._jobs[job.job_id] = job
        prewarm_metrics.count("prewarm_started_total")
        job.task = asyncio.create_task(self._run(job, path))
        for job_id in [key for key, each in self._jobs.items() if each.state is not State.RUNNING]:
            if len(self._jobs) <= KEPT_JOBS:
                break
            del self._jobs[job_id]
        return job

    def find(self, job_id: str) -> Job:
        """The job of an id.

        Raises:
            HTTPException: 404, there is no such job.
        """
        job = self._jobs.get(job_id)
        if job is None:
            raise HTTPException(status_code=404, detail=f"job_id: there is no pre-warm {job_id}")
        return job

    async def cancel(self, job: Job) -> None:
        """Ends a job and waits for its end; the step under way is aborted."""
        if job.task is not None and not job.task.done():
            job.task.cancel()
            await asyncio.wait([job.task])

    def describe(self) -> list[dict[str, Any]]:
        return [job.describe() for job in self._jobs.values()]

    async def _run(self, job: Job, path: WarmPath | None) -> None:
        try:
            replies = await ask_each("prewarm_facts", {})
            facts_of = [document_of(reply) for reply in replies]
            facts = facts_of[0]
            paths_of = [[path] if path is not None else await self._plan(job, each) for each in facts_of]
            if self._prewarmer is None:
                self._prewarmer = Prewarmer(
                    tokenizer_manager(),
                    lambda rank: ask("prewarm_room", {}, rank),
                    page_size=facts["page_size"],
                    min_step_tokens=STORAGE_STEP_TOKENS if facts["has_storage"] else COMPUTED_STEP_TOKENS,
                )
            await self._prewarmer.run(job, paths_of)
        except asyncio.CancelledError:
            job.end(State.CANCELLED)
        except HTTPException as refused:
            job.end(State.FAILED, str(refused.detail))
        except Exception as error:
            logger.exception("KV importance pre-warm %s", job.job_id)
            job.end(State.FAILED, f"{type(error).__name__}: {error}")
        prewarm_metrics.count("prewarm_ended_total", job.state.value)
        if job.origin in _UNASKED and job.total_tokens:
            logger.info("KV importance pre-warm: %s", job.describe())

    async def _plan(self, job: Job, facts: dict[str, Any]) -> list[WarmPath]:
        if facts["ledger"] is None or not facts["keeps_token_ids"]:
            job.detail = "the server has no ledger" if facts["ledger"] is None else "no token ids are kept"
            return []
        try:
            return await asyncio.to_thread(_plan, facts, job.max_seconds)
        except LedgerError as problem:
            job.detail = str(problem)
            return []


def _plan(facts: dict[str, Any], max_seconds: float) -> list[WarmPath]:
    max_tokens = int(facts["free_tokens"] - RESERVE * facts["total_tokens"])
    if max_tokens < facts["page_size"]:
        return []  # to read a large ledger takes a while
    ledger = Ledger(named_place(facts["ledger"]), bytes.fromhex(facts["model"]), page_size=facts["page_size"])
    try:
        return plan_from_ledger(
            ledger,
            CostModel(**facts["cost"]),
            use_importance=facts["use_importance"],
            has_storage=facts["has_storage"],
            present=[bytes.fromhex(digest) for digest in facts["present"]],
            max_tokens=max_tokens,
            max_seconds=max_seconds,
        )
    finally:
        ledger.close()


# ---- routes ----


def _jobs(request: Request) -> Jobs:
    if (mode := server_arguments().disaggregation_mode) != "null":  # a prompt goes through two servers
        raise HTTPException(status_code=501, detail=f"a {mode} server does not pre-warm: send it requests")
    jobs: Jobs | None = getattr(request.app.state, "kv_importance_prewarm", None)
    if jobs is None:  # one of several processes would not know when requests of the others wait
        problem = "a server with several tokenizer workers does not pre-warm: use --tokenizer-worker-num 1"
        raise HTTPException(status_code=501, detail=problem)
    return jobs


@wants_key
async def post_prewarm(request: Request) -> dict[str, Any]:
    """Starts to bring a prompt's prefix, or what the ledger values most, into the cache.

    Answers ``job_id``, and the ``tokens`` of a prompt. An empty body is as good as ``{}``. 503 while 64 have
    not ended. 501, as of all these routes, where the server has several tokenizer workers, or is one for
    prefill or decode only.
    """
    chosen = validated(PrewarmRequest, await json_body(request) if await request.body() else {})
    jobs = _jobs(request)
    if not chosen.has_prompt:
        return {"job_id": jobs.begin("ledger", chosen.max_seconds).job_id}
    tokens = await prompt_tokens(chosen, request)
    path = WarmPath.of_prompt(chosen.namespace, tokens)
    return {"job_id": jobs.begin("prompt", chosen.max_seconds, path).job_id, "tokens": len(tokens)}


@wants_key
async def list_prewarm(request: Request) -> dict[str, Any]:
    """The pre-warms of this server, oldest first: ``jobs``. The one of the start has ``origin`` ``start``."""
    return {"jobs": _jobs(request).describe()}


@wants_key
async def get_prewarm(request: Request, job_id: str) -> dict[str, Any]:
    """How far a pre-warm is.

    Answers ``state`` (``running``, ``done``, ``cancelled``, ``failed``) with its ``detail``,
    ``total_tokens``, ``done_tokens``, ``hit_tokens`` by tier, ``computed_tokens``, ``refused_tokens`` (of
    prompts that the server refused) and ``seconds``. 404 where there is no such job; the last 64 that
    have ended are kept.
    """
    return _jobs(request).find(job_id).describe()


@wants_key
async def delete_prewarm(request: Request, job_id: str) -> dict[str, Any]:
    """Cancels a pre-warm, and answers how far it got. What it brought in stays."""
    job = _jobs(request).find(job_id)
    await _jobs(request).cancel(job)
    return job.describe()


def add_prewarm_routes(routes: APIRouter) -> None:
    """Adds the routes, below ``/kv_importance``."""
    routes.post("/prewarm", openapi_extra=openapi.json_body(PrewarmRequest, required=False))(post_prewarm)
    routes.get("/prewarm")(list_prewarm)
    routes.get("/prewarm/{job_id}")(get_prewarm)
    routes.delete("/prewarm/{job_id}")(delete_prewarm)


def install_prewarm(app: FastAPI, options: ImportanceOptions) -> None:
    """Gives the routes their jobs, and the server what runs by itself."""
    jobs = app.state.kv_importance_prewarm = Jobs(options)
    is_unasked = options.prewarm.at != "off" and options.policy == "importance" and options.ledger_place
    serve = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        prewarm_metrics.export()  # not before: the server sets up what its processes share while it starts
        async with serve(app) as state:
            if not is_unasked:
                yield state
                return
            unasked = asyncio.create_task(_prewarm_unasked(jobs, again=options.prewarm.at == "idle"))
            yield state
            unasked.cancel()

    app.router.lifespan_context = lifespan


async def _prewarm_unasked(jobs: Jobs, *, again: bool) -> None:
    manager = tokenizer_manager()
    while manager.server_status is ServerStatus.Starting:
        await asyncio.sleep(0.1)
    users = user_requests(manager)
    served = users.noted
    job = jobs.begin("start")
    while again:
        if job.task is not None:
            await asyncio.wait([job.task])
        # What requests have brought since may have left room for more, or for what they pushed out.
        while users.noted == served or not _is_idle(manager):
            await asyncio.sleep(IDLE_SECONDS / 4)
        served = users.noted
        job = jobs.begin("idle")


def _is_idle(manager: TokenizerManager) -> bool:
    is_quiet = user_requests(manager).quiet_seconds >= IDLE_SECONDS
    return is_quiet and not any(requests_under_way(manager))

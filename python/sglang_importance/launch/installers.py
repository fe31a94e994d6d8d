"""Every part of ours that is installed into a process of sglang, and the process where it belongs.

All are imported late and only under ``observe`` and ``importance``. A part that fails stops the launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.launch.modes.loaded_model import model_refusals
from sglang_importance.upstream.hooks import install_hooks
from sglang_importance.upstream.refusal import LaunchRefused, cure
from sglang_importance.upstream.server_options import RADIX_CACHE_BACKEND, importance_options

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_importance.cache.importance_cache import ImportanceRadixCache

T = TypeVar("T")


def _messages(_: object) -> None:
    from sglang_importance.operations.messages import register_messages

    register_messages()


def _routes(options: ImportanceOptions, *, is_alone: bool = True) -> None:
    # An engine without an HTTP server never imports it.
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is None:
        return
    from sglang_importance.http import answer_reports
    from sglang_importance.http.requests import billing_header, conversions
    from sglang_importance.http.requests.checked_routes import check_routes
    from sglang_importance.http.requests.route_guards import guard_routes
    from sglang_importance.http.requests.short_errors import shorten_errors
    from sglang_importance.http.routes import install_routes
    from sglang_importance.http.told_arguments import hide_keys

    hide_keys(server.app)
    guard_routes(server.app)
    check_routes(server.app)
    shorten_errors(server.app)
    install_routes(server.app, options, is_alone=is_alone)
    install_hooks(answer_reports.HOOKS | conversions.HOOKS | billing_header.HOOKS)


def _hints(_: object) -> None:
    from sglang_importance.http.requests.request_hints import HOOKS

    install_hooks(HOOKS)


def _reports(_: object) -> None:
    from sglang_importance.placement.hint_reports import HOOKS

    install_hooks(HOOKS)


def _scheduler_guards(_: object) -> None:
    from sglang_importance.scheduler import chunk_room, grammars, impossible_tokens, preempted

    install_hooks(chunk_room.HOOKS | grammars.HOOKS | impossible_tokens.HOOKS | preempted.HOOKS)


def _misses(options: ImportanceOptions) -> None:
    if options.misses.memory:
        from sglang_importance.cache.room import HOOKS

        install_hooks(HOOKS)


def _radix_cache(_: object) -> None:
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(RADIX_CACHE_BACKEND) is None:
        register_radix_cache_backend(RADIX_CACHE_BACKEND, build_radix_cache)


def _attention(options: ImportanceOptions) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_importance.attention import install

    before = dict(ATTENTION_BACKENDS)
    install(options)
    if options.is_tiered:
        from sglang_importance.sparse.install import install_before_scheduler

        install_before_scheduler(options)
    if options.trace.pages:
        from sglang_importance.attention.page_lists import install_page_lists

        install_page_lists(options.trace.pages)
    for name, create in ATTENTION_BACKENDS.items():
        if create is not before.get(name):
            ATTENTION_BACKENDS[name] = _refusing(create)


def _refusing(create: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that finds model and options at odds says so by ValueError, deep inside sglang's start."""

    @wraps(create)
    def create_or_refuse(*args: Any, **kwargs: Any) -> Any:
        try:
            return create(*args, **kwargs)
        except ValueError as error:
            raise LaunchRefused([_one_line(error)]) from error

    return create_or_refuse


def _weight_watch(options: ImportanceOptions) -> None:
    if options.ledger_place and not options.store.directory:
        from sglang_importance.storage.guards import WEIGHT_HOOKS

        install_hooks(WEIGHT_HOOKS)


def _ledger(scheduler: Scheduler) -> None:
    component = _cache(scheduler).importance
    options = component.state.options
    if not options.ledger_place:
        return
    from sglang_importance.placement.ledger_feed import open_ledger_feed

    pins = component.pins if options.policy == "importance" else None
    if (feed := open_ledger_feed(component.state, pins, scheduler)) is not None:
        component.attach_ledger(feed)


def _answer_ends(scheduler: Scheduler) -> None:
    from sglang_importance.placement.answer_ends import AnswerEnds, answer_markers

    arguments: Any = scheduler.server_args  # sglang puts its fields together at import
    if arguments.disaggregation_mode == "prefill":
        return  # where each answer has one token, and ends elsewhere
    markers = answer_markers(arguments.tool_call_parser, scheduler.tokenizer)
    if markers is not None:
        component = _cache(scheduler).importance
        refresh = component.leaves.refresh
        component.requests.answer_ends = AnswerEnds(markers, component.state.tree, refresh)


def _message_handlers(scheduler: Scheduler) -> None:
    from sglang_importance.operations.handlers import handle_messages
    from sglang_importance.scheduler.idle_messages import wait_for_idleness
    from sglang_importance.scheduler.message_intake import guard_messages

    guard_messages(scheduler)
    wait_for_idleness(scheduler)
    handle_messages(scheduler)


def _deferred_work(scheduler: Scheduler) -> None:
    deferred = _cache(scheduler).importance.deferred_work
    wrapped = deferred.around(scheduler.process_batch_result)
    scheduler.process_batch_result = wrapped  # type: ignore[method-assign]  # on this instance


def _tiered_pages(scheduler: Scheduler) -> None:
    cache = _cache(scheduler)
    if cache.importance.state.options.is_tiered:
        pool = cache.token_to_kv_pool_allocator.get_kvcache()
        cache.importance.state.counters.page_traffic = pool.slots.traffic


def _cache(scheduler: Scheduler) -> ImportanceRadixCache:
    from sglang_importance.cache.importance_cache import ImportanceRadixCache

    cache = scheduler.tree_cache
    assert isinstance(cache, ImportanceRadixCache), "sglang built another cache"
    return cache


# In the launcher, before it starts a scheduler and builds the tokenizer manager.
IN_LAUNCHER: dict[str, Callable[[ImportanceOptions], None]] = {
    "control messages": _messages,
    "HTTP routes": _routes,
    "hints": _hints,
}
# In each of several tokenizer workers, before it builds its tokenizer manager.
IN_WORKER: dict[str, Callable[[ImportanceOptions], None]] = {
    **IN_LAUNCHER,
    "HTTP routes": partial(_routes, is_alone=False),
}
# In the launcher of several tokenizer workers: it passes messages on between them and the schedulers.
IN_ROUTER: dict[str, Callable[[ImportanceOptions], None]] = {"control messages": _messages}
# In each scheduler process, before the scheduler is built.
BEFORE_SCHEDULER: dict[str, Callable[[ImportanceOptions], None]] = {
    "control messages": _messages,
    "radix cache": _radix_cache,
    "attention": _attention,
    "reports": _reports,
    "scheduler guards": _scheduler_guards,
    "misses": _misses,
    "weight watch": _weight_watch,
}
# In each scheduler process, on the scheduler that has just been built.
ON_SCHEDULER: dict[str, Callable[[Scheduler], None]] = {
    "message handlers": _message_handlers,
    "ledger": _ledger,
    "ends of answers": _answer_ends,
    "deferred work": _deferred_work,
    "tiered pages": _tiered_pages,
}


def build_radix_cache(ctx: TreeCacheBuildContext) -> BasePrefixCache:
    """The factory behind ``--radix-cache-backend importance``.

    Raises:
        LaunchRefused: the loaded model is none that we have tested.
    """
    from sglang_importance.cache.cache_factory import create_importance_cache

    options = importance_options(ctx.server_args)
    assert options is not None, "sglang chose our cache without our options"
    if lines := model_refusals(ctx, options):
        raise LaunchRefused(lines)
    return create_importance_cache(ctx)


def install_in_launcher(options: ImportanceOptions, *, has_workers: bool = False) -> None:
    _install(IN_ROUTER if has_workers else IN_LAUNCHER, options)


def install_in_worker(options: ImportanceOptions) -> None:
    _install(IN_WORKER, options)


def install_before_scheduler(options: ImportanceOptions) -> None:
    _install(BEFORE_SCHEDULER, options)


def install_on_scheduler(scheduler: Scheduler) -> None:
    _install(ON_SCHEDULER, scheduler)


def _install(parts: dict[str, Callable[[T], None]], argument: T) -> None:
    for name, install in parts.items():
        try:
            install(argument)
        except LaunchRefused:
            raise
        except Exception as error:
            raise LaunchRefused(
                [f"could not install {name}: {type(error).__name__}: {_one_line(error)}; {cure()}"]
            ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

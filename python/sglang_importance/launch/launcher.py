"""The launcher's side of a launch under ``observe`` or ``importance``, or with a store."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import zmq

from sgl_importance.options.importance_options import ImportanceOptions
from sglang_importance.launch.flags import select_cache
from sglang_importance.launch.installers import install_in_launcher
from sglang_importance.launch.modes.arguments import check_modes
from sglang_importance.launch.modes.loaded_model import config_refusals
from sglang_importance.launch.modes.tiered_pages import page_list_refusals, warn_of_dummy_weights
from sglang_importance.launch.preflight import check_control, check_inputs, check_recording
from sglang_importance.launch.source_choice import settle_source
from sglang_importance.launch.state_pages import HOOKS as STATE_PAGES
from sglang_importance.launch.tokenizer_workers import has_workers, reach_workers
from sglang_importance.storage.store_launch import mount, store_model_refusals, store_refusals
from sglang_importance.upstream.hooks import HookType, install_hooks
from sglang_importance.upstream.refusal import SCHEDULER_REFUSED_EXIT_CODE, LaunchRefused, cure, exit_refused
from sglang_importance.upstream.server_keys import unprinted_keys
from sglang_importance.upstream.server_options import attach_options, importance_options, store_options
from sglang_importance.upstream.symbol_check import check_sglang

LAUNCH_TARGET = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
PROOF_KEY = "sgl_importance"  # in the report that a scheduler sends when it is ready
SCHEDULER_PIDS = "scheduler_pids"  # in the report of a data-parallel controller
PROOF_FOLDER = "KV_IMPORTANCE_PROOFS"
"""Variable with the folder where a scheduler leaves its proof, named by its process: sglang's data-parallel
controller sends a report of its own, which only names the processes. Of names in SGL_ sglang warns."""
REFUSAL = "refusal"  # file in that folder: a scheduler has said why it stopped


def prepare_launch(args: argparse.Namespace, options: ImportanceOptions, *, serves_http: bool = True) -> None:
    """Checks what can be checked before sglang resolves ``args``, selects our cache and hooks the launch.

    Args:
        args: sglang's arguments as given; changed in place.
        options: what the operator chose.
        serves_http: whether a server will listen, rather than an engine inside a program.

    Raises:
        LaunchRefused: the chosen policy cannot run here.
    """
    check_modes(args, options, serves_http=serves_http)
    if options.is_stock and not options.store.directory:
        return
    check_sglang()
    check_inputs(args, serves_http=serves_http)
    check_control(options)
    check_recording(options)
    if options.store.directory:
        mount(args, options)
    select_cache(args, options)
    warn_of_dummy_weights(args, options)
    install_hooks({LAUNCH_TARGET: (_around_launch, HookType.AROUND), **STATE_PAGES})


def _around_launch(
    launch: Callable[..., Any], engine_class: type, server_args: Any, *args: Any, **kwargs: Any
) -> Any:
    options = importance_options(server_args) or store_options(server_args)
    if options is None:
        return launch(engine_class, server_args, *args, **kwargs)
    children = multiprocessing.active_children()
    try:
        options = _check_resolved(server_args, options)
        if not options.is_stock:
            install_in_launcher(options, has_workers=has_workers(server_args))
            if has_workers(server_args):
                reach_workers(server_args, options)
        with tempfile.TemporaryDirectory(prefix="sgl-importance-") as folder:
            os.environ[PROOF_FOLDER] = folder
            try:
                is_embedded = server_args.launch_command is None
                with unprinted_keys(server_args), nullcontext() if is_embedded else _ending_together():
                    launched = _launch(Path(folder), launch, engine_class, server_args, *args, **kwargs)
            finally:
                del os.environ[PROOF_FOLDER]
            _check_proofs(launched, Path(folder))
    except LaunchRefused as refused:
        _end_children(but=children)
        # A command line ends in one line; a program that embeds an engine gets the exception.
        if server_args.launch_command is None:
            raise
        exit_refused(refused)
    return launched


def _check_resolved(server_args: Any, options: ImportanceOptions) -> ImportanceOptions:
    """Checks what sglang made of the arguments; the options that every process of the server gets."""
    from sglang.srt.arg_groups.overrides import resolving_view

    server_args.resolve_once()
    resolved = resolving_view(server_args)
    options = settle_source(resolved, options)
    attach_options(server_args, options)
    check_modes(resolved, options)
    if lines := [*page_list_refusals(resolved, options), *_model_refusals(server_args, options)]:
        raise LaunchRefused(lines)
    if options.store.directory and (lines := store_refusals(resolved, options)):
        raise LaunchRefused(lines)
    return options


def _model_refusals(server_args: Any, options: ImportanceOptions) -> list[str]:
    """What the model's config tells; a scheduler asks again once it is loaded."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(server_args)
    # Without a policy of ours there is a store.
    return store_model_refusals(config) if options.is_stock else config_refusals(config, options)


def _launch(folder: Path, launch: Callable[..., Any], engine_class: type, *args: Any, **kwargs: Any) -> Any:
    try:
        return launch(engine_class, *args, **kwargs)
    except RuntimeError as error:
        _close_sockets(error)
        refused = f"exit code: {SCHEDULER_REFUSED_EXIT_CODE})" in str(error) or (folder / REFUSAL).exists()
        if not refused:
            raise
        raise LaunchRefused(["a scheduler refused to start, for the reason above"]) from error


def _close_sockets(error: BaseException) -> None:
    """Closes the sockets of a tokenizer manager that waited for a scheduler in vain.

    Only the frames of ``error`` still hold it. Messages that nobody will receive keep its zmq context from
    ending, which would block the program at its next garbage collection.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        manager = frame.f_locals.get("tokenizer_manager")
        for value in list(getattr(manager, "__dict__", {}).values()):
            if isinstance(value, zmq.Socket):
                value.context.destroy(linger=0)


@contextmanager
def _ending_together() -> Iterator[None]:
    """SIGTERM ends those that are being started, too, which end with their parent from their first step on.

    One whose parent is gone before would load its model and keep its memory for ever.
    """
    from sglang.srt.utils.common import kill_process_tree

    def end(*_: object) -> NoReturn:
        kill_process_tree(os.getpid(), include_parent=False)
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_children(*, but: Iterable[BaseProcess]) -> None:
    """Ends the processes that a refused launch has left behind."""
    for child in set(multiprocessing.active_children()) - set(but):
        child.kill()
        child.join()


def leave_proof(live: dict[str, bool]) -> None:
    """Writes a scheduler's proof where its launcher looks for it."""
    if folder := os.environ.get(PROOF_FOLDER):
        (Path(folder) / str(os.getpid())).write_text(json.dumps(live))


def end_controller() -> None:
    """Ends the data-parallel controller of a scheduler that refuses to start, for which it would wait."""
    if folder := os.environ.get(PROOF_FOLDER):
        (Path(folder) / REFUSAL).touch()
    os.kill(os.getppid(), signal.SIGTERM)


def _check_proofs(launched: tuple[Any, ...], folder: Path) -> None:
    """Demands from every scheduler the proof that our parts are live in it."""
    infos = next(part for part in launched if hasattr(part, "scheduler_infos")).scheduler_infos
    proofs = [proof for info in infos for proof in _proofs(info, folder)]
    if not proofs or not all(proof and all(proof.values()) for proof in proofs):
        raise LaunchRefused(
            [f"a scheduler reported ready without proof that importance is live in it: see its log, {cure()}"]
        )


def _proofs(info: dict[str, Any], folder: Path) -> list[dict[str, bool]]:
    """Of the schedulers that a report speaks for; an empty one where it is missing."""
    if SCHEDULER_PIDS not in info:
        return [info.get(PROOF_KEY, {})]
    files = [folder / str(pid) for pid in info[SCHEDULER_PIDS]]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]

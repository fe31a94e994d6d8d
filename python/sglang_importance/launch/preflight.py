"""Looks, before anything is loaded, for what would make a launch fail late: the port, the checkpoint."""

from __future__ import annotations

import argparse
import errno
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from sgl_importance.json_text import BadJson, read_json
from sgl_importance.laboratory import MissingControlError, load_control
from sgl_importance.options.importance_options import ImportanceOptions, name_of
from sgl_importance.options.tiered_options import CONTROL_SELECTORS
from sgl_importance.storage.private_files import make_folder, try_writing
from sglang_importance.upstream.refusal import LaunchRefused, cannot_record


def check_inputs(args: argparse.Namespace, *, serves_http: bool = True) -> None:
    """Checks the local checkpoint, the size of pages, and the port where a server will listen.

    Args:
        args: sglang's arguments as given; with host and port where a server will listen.
        serves_http: whether one will, rather than an engine inside a program.

    Raises:
        LaunchRefused: the server could not start with them; one line for each problem.
    """
    problems = [*checkpoint_problems(args.model_path)]
    if (page_size := getattr(args, "page_size", None)) is not None and page_size < 1:
        problems.append(f"--page-size {page_size}: a page has at least one token")
    if serves_http:
        problems += port_problems(args.host, args.port)
    if problems:
        raise LaunchRefused(problems)


def check_recording(options: ImportanceOptions) -> None:
    """Makes the directory of a recording where it is missing.

    Raises:
        LaunchRefused: nothing can be written into it.
    """
    if options.trace.directory:
        folder = Path(options.trace.directory).expanduser()
        try:
            make_folder(folder)
            try_writing(folder)
        except OSError as error:
            raise cannot_record(options.trace.directory, error) from error


def check_control(options: ImportanceOptions) -> None:
    """Loads the control arms that the operator chose, if any.

    Raises:
        LaunchRefused: one is not installed.
    """
    controls = {"signal.g": ("shuffled",), "sparse.selector": CONTROL_SELECTORS}
    for place in (place for place, arms in controls.items() if options.at(place) in arms):
        try:
            load_control(options.at(place))
        except MissingControlError as missing:
            raise LaunchRefused([f"{name_of(place)} {options.at(place)}: {missing}"]) from missing


def port_problems(host: str, port: int) -> Iterator[str]:
    """One line if nobody can listen there, or somebody else does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = f"cannot listen on {host}:{port}"
    cure = "--host must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server itself will: connections of an ended server that linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OverflowError:
            yield f"{reason}: --port must be a number up to 65535"
        except (TypeError, UnicodeError):  # a name beyond ASCII, of which a part is empty or too long
            yield f"{reason}: {cure}"
        except OSError as error:
            reason = f"{reason} ({error.strerror})"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                yield f"{reason}: {cure}"
            elif error.errno == errno.EACCES:
                yield f"{reason}: choose a --port above 1023"
            else:
                yield f"{reason}: stop what runs there or choose another --port"


def check_config_is_read(args: argparse.Namespace, options: ImportanceOptions) -> None:
    """sglang reads a file of flags that stands behind ``--config`` as a word of its own, and drops any other.

    Raises:
        LaunchRefused: one was dropped, with flags of ours in it or beside it.
    """
    path = getattr(args, "config", None)
    if path is not None and not (options.is_stock and not may_name_our_flags(path)):
        raise LaunchRefused([f"--config={path} is not read by sglang: write --config {path}, in two words"])


def may_name_our_flags(path: str) -> bool:
    """Whether one of our flags stands in a file of flags, or nobody can know."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return True
    return re.search(r"^[\"']?kv[-_](policy|importance)", text, re.MULTILINE) is not None


def config_problem(path: str, error: Exception) -> str:
    """One line about a file of flags that sglang could not read."""
    if not Path(path).is_file():
        return f"--config {path}: there is no such file"
    said = " ".join(str(error).split())
    return f"--config {path}: {said}: give a YAML file of flags, named .yaml or .yml"


def checkpoint_problems(model_path: str) -> Iterator[str]:
    """One line for each file of a local checkpoint that is missing, cut off or no safetensors file.

    Reads headers only. A path that is no local folder is left to sglang, which may find it on a hub.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        yield f"{folder} has no config.json: give --model-path the folder of a Hugging Face checkpoint"
        return
    from safetensors import SafetensorError, safe_open

    expected = set()
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            expected = {str(name) for name in read_json(index.read_bytes())["weight_map"].values()}
        except (BadJson, KeyError, TypeError, AttributeError) as error:
            yield f"{index} is damaged ({type(error).__name__}: {error}): download the checkpoint again"
    for name in sorted(expected | {file.name for file in folder.glob("*.safetensors")}):
        file = folder / name
        if not os.path.isfile(file):  # False, too, where an index names what no disk can hold
            yield f"{file} is missing: download the checkpoint again"
            continue
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            yield f"{file} is cut off or damaged ({error}): download the checkpoint again"

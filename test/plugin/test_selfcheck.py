"""The self-check knows every symbol of sglang that we use, and says what is wrong in one line."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.unified_cache.components import FullComponent
from sglang.srt.server_args import ServerArgs

import sglang_importance
from sglang_importance.upstream.refusal import LaunchRefused
from sglang_importance.upstream.symbol_check import (
    check_sglang,
    parameters,
    symbol_problems,
    version_problem,
)
from sglang_importance.upstream.symbols import SYMBOLS

PACKAGE = Path(sglang_importance.__file__).parent
CURE = "install sglang==0.5.21 or use --kv-policy default"
# CPU shims look for upstream's defects themselves; what is offline serves tests, studies and benchmarks.
NOT_IN_A_SERVER = {"cpu", "offline"}


def _sources() -> list[Path]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [file for file in files if file.relative_to(PACKAGE).parts[0] not in NOT_IN_A_SERVER]


def _run_time_imports(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "sglang":
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from _run_time_imports(child)


def test_the_installed_sglang_passes() -> None:
    assert version_problem() is None
    assert symbol_problems() == []
    check_sglang()


def test_every_import_from_sglang_is_checked() -> None:
    def is_checked(name: str) -> bool:
        return any(symbol == name or symbol.startswith(f"{name}.") for symbol in SYMBOLS)

    unchecked = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in _sources()
        for name in _run_time_imports(ast.parse(file.read_text()))
        if not is_checked(name)
    ]
    assert unchecked == []


def _our_subclasses() -> list[tuple[type, type]]:
    from sglang_importance.attention.torch_native import EmittingTorchNativeBackend
    from sglang_importance.cache.component import ImportanceComponent
    from sglang_importance.cache.importance_cache import ImportanceRadixCache

    ours = (EmittingTorchNativeBackend, ImportanceRadixCache, ImportanceComponent)
    bases = [next(b for b in cls.__mro__ if b.__module__.startswith("sglang.")) for cls in ours]
    return list(zip(ours, bases, strict=True))


def test_every_overridden_method_is_checked() -> None:
    checked = set()
    for path in SYMBOLS:
        owner = path.rpartition(".")[0]
        try:
            checked.add((pkgutil.resolve_name(owner), path.rpartition(".")[2]))
        except (AttributeError, ImportError):
            continue
    unchecked = [
        f"{ours.__name__}.{name}"
        for ours, base in _our_subclasses()
        for name, member in vars(ours).items()
        if inspect.isfunction(member)
        and hasattr(base, name)
        and (name == "__init__" or name not in vars(object))
        and (base, name) not in checked
    ]
    assert unchecked == []


def test_a_missing_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FullComponent, "_evict_device_start")
    # The abstract base still has one, with the same parameters: inheriting is no loss.
    assert symbol_problems() == []
    monkeypatch.delattr(Scheduler, "get_init_info")
    (line,) = symbol_problems()
    assert line == (
        "sglang has no sglang.srt.managers.scheduler.Scheduler.get_init_info "
        f"(type object 'Scheduler' has no attribute 'get_init_info'): {CURE}"
    )


def test_a_missing_module_is_named() -> None:
    (line,) = symbol_problems({"sglang.srt.moved.away": None})
    assert line.startswith("sglang has no sglang.srt.moved.away (")
    assert line.endswith(CURE)


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def _evict_device_next_node(self, tracker, frees): ...

    monkeypatch.setattr(FullComponent, "_evict_device_next_node", _evict_device_next_node)
    (line,) = symbol_problems()
    assert line == (
        "sglang's sglang.srt.mem_cache.unified_cache.components.FullComponent._evict_device_next_node takes "
        "(self, tracker, frees), not (self, tracker, device_frees, host_frees) or "
        f"(self, tracker, device_frees, host_frees, cache_actions): {CURE}"
    )


def test_a_symbol_that_became_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "get_init_info", 3)
    (line,) = symbol_problems()
    assert line == f"sglang's sglang.srt.managers.scheduler.Scheduler.get_init_info is no function: {CURE}"


def test_a_release_that_nobody_has_tested_is_admitted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for release in ("0.5.21", "0.5.22", "0.5.23"):
        monkeypatch.setattr(metadata, "version", lambda name, release=release: release)
        check_sglang()
    assert caplog.text == ""
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.99")
    check_sglang()
    (record,) = caplog.records
    assert record.getMessage() == (
        "sglang 0.5.99 has every symbol that sgl-importance needs, but nobody has tested them together; "
        "tested are 0.5.21, 0.5.22, 0.5.23"
    )


def test_a_release_without_a_symbol_is_refused_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.99")
    monkeypatch.delattr(Scheduler, "get_init_info")
    with pytest.raises(LaunchRefused, match=r"sglang has no .*Scheduler\.get_init_info"):
        check_sglang()


def test_where_releases_differ_one_of_the_names_must_be_there() -> None:
    assert symbol_problems({}, [("sglang.srt.server_args.gone", "sglang.srt.server_args.ServerArgs")]) == []
    (line,) = symbol_problems({}, [("sglang.srt.server_args.gone", "sglang.srt.moved")])
    assert line == f"sglang has none of sglang.srt.server_args.gone, sglang.srt.moved: {CURE}"


def test_a_mismatch_ends_the_command_line(
    parse, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(Scheduler, "init_request_dispatcher")
    assert isinstance(parse("--kv-policy", "default"), ServerArgs)
    with pytest.raises(SystemExit) as stop:
        parse("--kv-policy", "importance")
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "sgl-importance: error: sglang has no sglang.srt.managers.scheduler.Scheduler.init_"
    )


def test_parameters_are_rendered_as_in_a_signature() -> None:
    def function(a, b=1, *, c, d=2, **rest): ...

    def variadic(*args, option): ...

    assert parameters(function) == "a, b, *, c, d, **rest"
    assert parameters(variadic) == "*args, option"

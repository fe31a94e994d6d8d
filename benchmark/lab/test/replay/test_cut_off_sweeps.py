"""Every resumable command, cut off at each of its writes and repeated, gives what an undisturbed one does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sgl_importance_lab.replay.cli import app
from sgl_importance_lab.replay.report.journal import journal_file

from support.workloads.session_trace import write_session_trace

COMMANDS: dict[str, tuple[object, ...]] = {
    "sweep": ("--policies", "fifo,random", "--capacity-blocks", "4,8"),
    "tiers": ("--policies", "lru,random", "--device-blocks", 4, "--host-blocks", 6),
    "chain": ("--tiers", "chain.toml", "--capacity-fraction", "0.2,0.5", "--policies", "lru"),
}
CHAIN = """
[[tier]]
kind = "dram"
capacity = "1MB"
bytes_per_second = "64GB"

[[tier]]
kind = "nvme"
folder = "/nowhere"
capacity = "3MB"
bytes_per_second = "8GB"
latency_us = 100
"""


class Died(BaseException):
    """The process is gone: no handler of ours runs."""


class Disk:
    """Counts writes below a folder, and lets the process die in the midst of one of them.

    A write is one call that changes a file; a rename or a removal is two, for the process may die before and
    behind it. Of the bytes of a write half are there.
    """

    def __init__(self, folder: Path, dies_at: int) -> None:
        self.writes = 0
        self._folder = folder
        self._dies_at = dies_at

    def _step(self) -> bool:
        self.writes += 1
        return self.writes == self._dies_at

    @contextmanager
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        replace, unlink, write_text, open_file = Path.replace, Path.unlink, Path.write_text, Path.open

        def around(call: Any, path: Path, *args: Any, **named: Any) -> Any:
            is_ours = path.is_relative_to(self._folder)
            if is_ours and self._step():
                raise Died
            done = call(path, *args, **named)
            if is_ours and self._step():
                raise Died
            return done

        def half_written(path: Path, text: str, **named: Any) -> int:
            if path.is_relative_to(self._folder) and self._step():
                write_text(path, text[: len(text) // 2], **named)
                raise Died
            return write_text(path, text, **named)

        def opened(path: Path, *args: Any, **named: Any) -> Any:
            file = open_file(path, *args, **named)
            is_written = args[:1] == ("wb",) and path.is_relative_to(self._folder)
            return HalfWritten(file, self._step) if is_written else file

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", lambda path, to: around(replace, path, to))
            patched.setattr(Path, "unlink", lambda path, **named: around(unlink, path, **named))
            patched.setattr(Path, "write_text", half_written)
            patched.setattr(Path, "open", opened)
            yield


class HalfWritten:
    """A file that gets half of the bytes of the write at which the process dies."""

    def __init__(self, file: Any, step: Any) -> None:
        self._file = file
        self._step = step

    def write(self, content: bytes) -> int:
        if self._step():
            self._file.write(content[: len(content) // 2])
            self._file.close()
            raise Died
        return int(self._file.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_was_cut_off_at_any_write_goes_on(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write_session_trace(tmp_path / "sessions.jsonl", 30)
    (tmp_path / "chain.toml").write_text(CHAIN)
    monkeypatch.chdir(tmp_path)

    def run(out: Path) -> None:
        given = [str(each) for each in (trace, *COMMANDS[command], "--jobs", 1, "--json", out)]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == 0, result.output

    whole = tmp_path / "whole.json"
    run(whole)
    cut_offs = 0
    while True:
        folder = tmp_path / str(cut_offs)
        folder.mkdir()
        out = folder / "rows.json"
        disk = Disk(folder, dies_at=cut_offs + 1)
        try:
            with disk.failing(monkeypatch):
                run(out)
        except Died:
            cut_offs += 1
            run(out)
            assert rows_of(out) == rows_of(whole), f"cut off at write {cut_offs}"
            assert not journal_file(out).exists(), f"cut off at write {cut_offs}"
        else:
            break
    assert cut_offs > 6, "writes were not seen"

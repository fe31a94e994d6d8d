"""Rows of a sweep that is not finished, beside its result file: the next run of the same command goes on.

One line for each row: the digest of its cell, then the row as JSON. The digest is of the code, the trace and
the job, so a row is only taken over where the same cell would give it again.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from xxhash import xxh3_128

from sgl_importance_lab.replay.source_digest import source_digest
from sgl_importance_lab.replay.trace import Trace

RowT = TypeVar("RowT")
SUFFIX = ".part"


def journal_file(results: Path) -> Path:
    """Where the rows of an unfinished sweep lie."""
    return results.with_name(results.name + SUFFIX)


class SweepJournal(Generic[RowT]):
    """Takes over the rows that an interrupted run left, and adds each new one as it comes.

    Args:
        results: the file that the finished sweep will be written to.
        row_type: dataclass of the rows.
        traces: of the sweep.
        jobs: of the sweep: dataclasses with a ``trace``, an index into the traces.

    Attributes:
        rows: those that were taken over, by index of the job.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self, results: Path, row_type: type[RowT], traces: Sequence[Trace], jobs: Sequence[Any]
    ) -> None:
        self.path = journal_file(results)
        names = [_trace_digest(trace) for trace in traces]
        self._cells = [_cell_digest(names[job.trace], job) for job in jobs]
        lines = self._lines()
        self.rows: dict[int, RowT] = {}
        for index, cell in enumerate(self._cells):
            if cell in lines:
                try:
                    self.rows[index] = msgspec.json.decode(lines[cell], type=row_type)
                except msgspec.MsgspecError:
                    continue  # cut off where it was being written
        # Written anew: rows of another sweep go, and so does a line without its end. Under another name,
        # so that a process which ends here leaves the rows that there were.
        unfinished = self.path.with_name(self.path.name + ".new")
        self._file = unfinished.open("wb")
        for index, row in self.rows.items():
            self.add(index, row)
        unfinished.replace(self.path)

    def _lines(self) -> dict[str, bytes]:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        lines = [line.partition(b" ") for line in content.splitlines()]
        return {cell.decode("ascii", "replace"): row for cell, _, row in lines}

    def add(self, index: int, row: RowT) -> None:
        """Keeps the row of a job; it survives the process from here on."""
        self._file.write(self._cells[index].encode() + b" " + msgspec.json.encode(row) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Leaves the rows for another run."""
        self._file.close()

    def remove(self) -> None:
        """The sweep is finished, and its results are written."""
        self.close()
        self.path.unlink(missing_ok=True)


def _trace_digest(trace: Trace) -> str:
    digest = xxh3_128()
    for field in fields(trace):
        value = getattr(trace, field.name)
        digest.update(
            np.ascontiguousarray(value).data if isinstance(value, np.ndarray) else repr(value).encode()
        )
    return digest.hexdigest()


def _cell_digest(trace: str, job: Any) -> str:
    cell = f"{source_digest()} {trace} {replace(job, trace=0)!r}"
    return base64.urlsafe_b64encode(xxh3_128(cell.encode()).digest()).decode()

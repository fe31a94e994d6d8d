"""What one server answered to one suite, as it is kept in a file."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from sgl_importance.errors import ImportanceError


class BenchError(ImportanceError):
    """The benchmark cannot be run or compared; the message says why and what to do."""


class Sample(msgspec.Struct, frozen=True):
    """One prompt and its answer.

    Attributes:
        number: of the prompt in its task.
        prompt: the harness's digest of its text.
        score: how right the answer is, by the harness, 0 to 1.
    """

    task: str
    number: int
    prompt: str
    score: float
    answer: str


class Part(msgspec.Struct):
    """All samples of one length.

    Attributes:
        length: tokens of prompt and answer at most; 0 where the data set decides.
        seconds: of all requests, added up.
    """

    length: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    samples: list[Sample]


class Asked(msgspec.Struct, frozen=True):
    """What must be equal where two runs are compared, or one goes on."""

    suite: str
    tasks: list[str]
    lengths: list[int]
    samples: int
    answer_tokens: int | None
    chat: bool
    harness: str


class Run(msgspec.Struct):
    """One server.

    Attributes:
        served: digest of what the server says of its model and, where it is sglang, of its command line.
        body: fields that were added to each request.
        budget: of pages that a step reads, tokens or a share below 1, where the server tells.
    """

    asked: Asked
    url: str
    model: str
    served: str
    body: dict[str, Any]
    selector: str | None
    budget: float | None
    parts: list[Part]

    @property
    def name(self) -> str:
        """For tables."""
        if self.selector is None or self.budget is None:
            return f"{self.model} {self.selector or ''}".rstrip()
        return f"{self.model} {self.selector} {self.budget:g}"


class Document(msgspec.Struct):
    """What ``--json`` writes: how it came about, and the runs, that of ``--url`` first."""

    command: str
    versions: dict[str, str]
    runs: list[Run]


def read_run(file: Path) -> Run:
    """The run of ``--url`` in a file of ``--json``.

    Raises:
        BenchError: it holds none.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Document).runs[0]
    except (OSError, msgspec.MsgspecError, IndexError) as error:
        raise BenchError(
            f"{file} is no run of this command: name one that --json wrote, or an address"
        ) from error


def write_runs(file: Path, runs: list[Run]) -> None:
    command = shlex.join(["sgl-importance", *sys.argv[1:]])
    versions = {name: version(name) for name in ("sgl-importance", "sgl-importance-lab")}
    document = Document(command, versions, runs)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")

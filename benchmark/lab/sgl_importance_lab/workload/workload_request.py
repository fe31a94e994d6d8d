"""One request of a workload, and the JSON lines that requests are kept in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from sgl_importance.errors import ImportanceError
from sgl_importance.json_text import BadJson, decode_json
from sgl_importance_lab.probe.tokenizer import encode, encode_text

Message = dict[str, str]


class WorkloadError(ImportanceError):
    """The workload cannot be made, read or run; the message says why and what to do."""


class WorkloadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request.

    Attributes:
        id: unique within the workload, "kind/session/turn"; servers that take request ids get it.
        kind: of the workload.
        session: requests of one session are sent in order, each after the answer to the one before.
        seconds: arrival time from the start, for open-loop runs.
        messages: of a chat; empty where ``prompt`` is set.
        prompt: text to be continued; empty for a chat.
        answer: the only right answer; None where there is none.
        max_tokens: most tokens to generate.
        ignore_eos: whether to generate that many whatever the model says.
        hints: what the request says of its own KV, for servers that take hints.
        answer_token: where the answer stands in the prompt already, in tokens of the model that the request
            was made for; None where it was made for the embedded one, or the answer stands nowhere.
    """

    id: str
    kind: str
    session: str
    seconds: float
    max_tokens: int
    messages: list[Message] = []
    prompt: str = ""
    answer: str | None = None
    ignore_eos: bool = False
    hints: dict[str, Any] = {}
    answer_token: int | None = None

    def token_ids(self) -> list[int]:
        """The prompt in tokens of the embedded model."""
        return encode_text(self.prompt) if self.prompt else encode(self.messages)

    def answer_position(self) -> int | None:
        """Where in the prompt the right answer stands, in tokens of the model that is asked; of the embedded
        one, the value of the record that the last message asks for. None where it stands nowhere."""
        if self.answer_token is not None:
            return self.answer_token
        if not self.messages or self.answer is None:
            return None
        name = self.messages[-1]["content"].rpartition(" ")[2]
        record = encode_text(f"{name} {self.answer}")
        tokens = self.token_ids()
        starts = range(len(tokens) - len(record) + 1)
        name_tokens = len(encode_text(f"{name} "))
        return next((i + name_tokens for i in starts if tokens[i : i + len(record)] == record), None)


def write_requests(requests: Iterable[WorkloadRequest], path: Path) -> None:
    """Writes one JSON object per line."""
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))


def read_requests(path: Path) -> list[WorkloadRequest]:
    """Reads what ``write_requests`` wrote.

    Raises:
        WorkloadError: the file cannot be read, a line is no request, or there is none; names file, line and
            cause.
    """
    requests = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}: name a file that can be read") from error
    decoder = msgspec.json.Decoder(WorkloadRequest)
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            requests.append(decode_json(decoder.decode, line))
        except BadJson as error:
            raise WorkloadError(
                f"{path}:{number}: {error}; write it with 'sgl-importance workload make'"
            ) from error
    if not requests:
        raise WorkloadError(f"{path} holds no request: write it with 'sgl-importance workload make'")
    return requests

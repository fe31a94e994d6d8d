"""Where the reports on a request stand in its answer, whole or streamed, in each family's form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse, ORJSONResponse, Response, StreamingResponse

from sglang_importance.placement.hint_reports import REPORT_KEY

Document = dict[str, Any]
Reports = Callable[[], Any]
"""What is to be told once the answer has ended; None where there is nothing."""

_DATA = "data: "


@dataclass(frozen=True)
class AnswerPlace:
    """The object of an answer that takes the reports.

    Attributes:
        path: of the reports, as documents name it.
        in_answer: finds it in a whole answer; None where there is none.
        in_event: finds it in an event of a stream; None in all but one.
        markers: words of which that event has one, so that others need not be read.
    """

    path: str
    in_answer: Callable[[Document], Document | None]
    in_event: Callable[[Document], Document | None]
    markers: tuple[str, ...]

    def with_reports(self, answer: Any, reports: Reports) -> Any:
        """The answer of a route with the reports in it; errors as they are."""
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = self._events(answer.body_iterator, reports)
            return answer
        if not isinstance(answer, Response):
            # As sglang writes it: a log probability may be minus infinity.
            return ORJSONResponse(_filled(jsonable_encoder(answer), self.in_answer, reports))
        if answer.status_code == 200 and answer.media_type == JSONResponse.media_type:
            document = _filled(json.loads(bytes(answer.body)), self.in_answer, reports)
            return JSONResponse(document, background=answer.background)
        return answer

    async def _events(self, chunks: AsyncIterable[Any], reports: Reports) -> AsyncIterator[Any]:
        async for chunk in chunks:
            text = chunk.decode() if isinstance(chunk, bytes) else chunk
            if not any(marker in text for marker in self.markers):
                yield chunk
                continue
            yield "\n".join(self._line(line, reports) for line in text.split("\n"))

    def _line(self, line: str, reports: Reports) -> str:
        """A line of Server-Sent Events, or of JSON documents one a line."""
        prefix = _DATA if line.startswith(_DATA) else ""
        text = line.removeprefix(prefix)
        if not text.startswith("{"):
            return line
        document = json.loads(text)
        if self.in_event(document) is None:
            return line
        return prefix + json.dumps(_filled(document, self.in_event, reports))


def _filled(document: Document, place: Callable[[Document], Document | None], reports: Reports) -> Document:
    holder, told = place(document), reports()
    if holder is not None and told is not None:
        holder[REPORT_KEY] = told
    return document


def _usage(document: Document) -> Document | None:
    return document.get("usage") or None


def _usage_at_end(document: Document) -> Document | None:
    return None if document.get("choices") else _usage(document)


def _usage_of_message(document: Document) -> Document | None:
    return _usage(document) if document.get("type") == "message_delta" else None


_RESPONSE_ENDS = ("response.completed", "response.incomplete", "response.failed")


def _usage_of_response(document: Document) -> Document | None:
    return _usage(document["response"]) if document.get("type") in _RESPONSE_ENDS else None


def _itself(document: Document) -> Document:
    return document


def _itself_at_end(document: Document) -> Document | None:
    return document if document.get("done") else None


OPENAI = AnswerPlace("usage.kv_importance", _usage, _usage_at_end, ('"choices":[]',))
RESPONSES = AnswerPlace("usage.kv_importance", _usage, _usage_of_response, _RESPONSE_ENDS)
ANTHROPIC = AnswerPlace("usage.kv_importance", _usage, _usage_of_message, ("message_delta",))
OLLAMA = AnswerPlace("kv_importance", _itself, _itself_at_end, ('"done":true',))
"""Ollama's answers have no usage: the reports stand beside their counts."""

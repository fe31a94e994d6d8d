"""A stream whose first chunk is there before its status is sent: an error in it can still be a 400."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse


async def begin(answer: StreamingResponse) -> None:
    """Waits for the first chunk of an answer that has not been sent yet.

    Raises:
        Exception: whatever the stream raises before it.
    """
    chunks = aiter(answer.body_iterator)
    try:
        first = await anext(chunks)
    except StopAsyncIteration:
        return

    async def all_chunks() -> AsyncIterator[Any]:
        yield first
        async for chunk in chunks:
            yield chunk

    answer.body_iterator = all_chunks()

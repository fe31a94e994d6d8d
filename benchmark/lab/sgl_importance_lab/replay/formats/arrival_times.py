"""When requests came that say it by a time, by a delay within their session, or not at all."""

from __future__ import annotations


class ArrivalTimes:
    """Seconds of requests in the order of a file.

    A delay, as in aiperf's traces (its ``mooncake_trace`` loader), counts in milliseconds from the request of
    the same session before; how long that one's answer took is not in the trace.

    Attributes:
        without_time: requests so far that said nothing: each follows the one above it at once.
    """

    def __init__(self) -> None:
        self.without_time = 0
        self._latest = 0.0
        self._by_session: dict[str | int, float] = {}

    def of(
        self, seconds: float | None, session_id: str | int | None = None, delay: float | None = None
    ) -> float:
        """
        Args:
            seconds: of the request's own time; None where it has none.
            session_id: of its session.
            delay: milliseconds since the request of the session before.
        """
        before = None if session_id is None else self._by_session.get(session_id)
        if seconds is None and delay is not None and before is not None:
            seconds = before + delay / 1000
        elif seconds is None:
            self.without_time += 1
            seconds = self._latest
        self._latest = seconds
        if session_id is not None:
            self._by_session[session_id] = seconds
        return seconds

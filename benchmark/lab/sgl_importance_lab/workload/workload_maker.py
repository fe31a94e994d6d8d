"""Makes a workload: which session speaks next, what it asks, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from sgl_importance_lab.workload.kinds import KINDS, Session, Shape, Turn
from sgl_importance_lab.workload.popularity import Zipf
from sgl_importance_lab.workload.workload_request import WorkloadError, WorkloadRequest

# Questions about a document come from many users; turns of a conversation from one who waits for the answer.
_INDEPENDENT = ("documents", "generation")


class _Sessions:
    """The live sessions of one kind; one that ends makes room for the next."""

    def __init__(self, kind: str, shape: Shape, seed: int) -> None:
        self._kind = kind
        self._shape = shape
        self._seed = seed
        self._popularity = Zipf(shape.sessions, shape.document_skew)
        self._started = 0
        self._live = [self._start() for _ in range(shape.sessions)]

    def _start(self) -> tuple[int, Session]:
        index = self._started
        self._started += 1
        return index, KINDS[self._kind](self._shape, self._seed, index)

    def next(self, rng: Random) -> tuple[int, Turn]:
        """The next turn, with the number of its session."""
        place = self._popularity.draw(rng)
        while True:
            index, session = self._live[place]
            turn = next(session, None)
            if turn is not None:
                return index, turn
            self._live[place] = self._start()


def make_workload(
    kinds: Sequence[str], count: int, *, shape: Shape | None = None, seed: int = 0, rate: float = 4.0
) -> Iterator[WorkloadRequest]:
    """``count`` requests of the given kinds, in equal shares on average; the same seed, the same requests.

    Args:
        kinds: names in ``KINDS``.
        count: number of requests.
        shape: of every kind.
        seed: of every choice.
        rate: arrivals per second on average, exponentially spaced.

    Raises:
        WorkloadError: a kind is unknown, or nothing can be made of a shape.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise WorkloadError(f"unknown kind {', '.join(unknown) or '(none)'}: choose from {', '.join(KINDS)}")
    if not rate > 0:
        raise WorkloadError(f"a rate of {rate:g} requests per second never ends: raise --rate")
    shape = shape or Shape()
    rng = Random(f"workload/{seed}/{','.join(kinds)}")
    try:
        sessions = {kind: _Sessions(kind, shape, seed) for kind in kinds}
        seconds = 0.0
        for number in range(count):
            kind = rng.choice(kinds)
            index, turn = sessions[kind].next(rng)
            name = f"{kind}/{index}"
            identifier = f"{name}/{number}"
            yield WorkloadRequest(
                id=identifier,
                kind=kind,
                session=identifier if kind in _INDEPENDENT else name,
                seconds=round(seconds, 3),
                max_tokens=turn.max_tokens,
                messages=list(turn.messages),
                prompt=turn.prompt,
                answer=turn.answer,
                ignore_eos=turn.ignore_eos,
            )
            seconds += rng.expovariate(rate)
    except ValueError as error:
        raise WorkloadError(f"{error}: change the lengths or skews of the workload") from error

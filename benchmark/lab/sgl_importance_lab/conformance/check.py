"""Runs golden cases against somebody's producer or accumulator; nothing here knows a test framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import numpy as np

from sgl_importance.interface import BlockImportance, Importance, SignalKind
from sgl_importance_lab.conformance.cases import (
    Ask,
    ConsumerCase,
    Evict,
    ProducerCase,
    ServedQuery,
    consumer_cases,
    producer_cases,
)

DEFAULT_TOLERANCE = 1e-4
MAX_CALLS = 64
"""Look-ups after which a source must know a page that it holds."""

Producer = Callable[[ProducerCase], BlockImportance]
"""Runs attention on the inputs of a case; must not read the case's expected numbers."""


class Accumulator(Protocol):
    """An empty cache that folds what queries saw, and can be asked."""

    def serve(self, query: ServedQuery) -> None: ...

    def evict_all(self) -> None: ...

    def get_importance(self, key: bytes) -> Importance | None: ...


AccumulatorFactory = Callable[[ConsumerCase], Accumulator]
"""Makes an accumulator with the page size, half-life and memory of a case."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one case.

    Attributes:
        case: its name.
        problem: what is wrong and where, in one line; None where nothing is.
    """

    case: str
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None


class _Problem(Exception):
    """One line for the verdict."""


def check_producer(producer: Producer, *, tolerance: float = DEFAULT_TOLERANCE) -> list[Verdict]:
    """One verdict per golden case.

    Args:
        producer: what is checked.
        tolerance: the producer's stated bound on each value; it is not applied to proxies, of which only the
            form is checked.
    """
    return [_judge(case.name, partial(_produce, producer, case, tolerance)) for case in producer_cases()]


def check_accumulator(make: AccumulatorFactory, *, tolerance: float = 1e-6) -> list[Verdict]:
    """One verdict per golden case.

    Args:
        make: what is checked.
        tolerance: on each value; sums are in float64, of observations in float32.
    """
    return [_judge(case.name, partial(_live, make, case, tolerance)) for case in consumer_cases()]


def _judge(name: str, run: Callable[[], None]) -> Verdict:
    try:
        run()
    except _Problem as problem:
        return Verdict(name, str(problem))
    except Exception as error:  # a third party's code may raise anything: that is a verdict, too
        return Verdict(name, f"raised {type(error).__name__}: {' '.join(str(error).split())}")
    return Verdict(name)


def _produce(producer: Producer, case: ProducerCase, tolerance: float) -> None:
    said = producer(case)
    if not isinstance(said, BlockImportance):
        raise _Problem(f"gave {type(said).__name__}, not BlockImportance")
    try:
        said.check_integrity()
    except AssertionError as error:
        raise _Problem(str(error)) from None
    _expect("num_pages", said.num_pages, len(case.mass))
    _expect("page_size", said.page_size, case.page_size)
    _expect("query_tokens", said.query_tokens, case.q.shape[1])
    if said.kind is SignalKind.PROXY:
        return
    for name in ("mass", "body_mass", "peak"):
        wanted, given = getattr(case, name), getattr(said, name)
        page = int(np.abs(given - wanted).argmax())
        if abs(float(given[page]) - float(wanted[page])) > tolerance:
            raise _Problem(f"{name} of page {page} is {given[page]:.6g}, not {wanted[page]:.6g}")


def _live(make: AccumulatorFactory, case: ConsumerCase, tolerance: float) -> None:
    accumulator = make(case)
    for number, step in enumerate(case.steps):
        match step:
            case ServedQuery():
                accumulator.serve(step)
            case Evict():
                accumulator.evict_all()
            case Ask():
                _ask(accumulator, step, f"step {number}, key {step.key.hex()[:8]}", tolerance)


def _ask(accumulator: Accumulator, ask: Ask, where: str, tolerance: float) -> None:
    for known in _answers(accumulator, ask):
        if known is not None and not isinstance(known, Importance):
            raise _Problem(f"{where}: gave {type(known).__name__}, not Importance or None")
        if (known is None) == (ask.expected is None):
            break
    else:
        told = "None for a page it holds" if ask.expected else "something for a page that it never saw"
        raise _Problem(f"{where}: answered {told}")
    if known is None or ask.expected is None:
        return
    for field in fields(Importance):
        wanted, given = getattr(ask.expected, field.name), getattr(known, field.name)
        is_same = given == wanted
        if isinstance(wanted, float):
            is_same = isinstance(given, float) and math.isclose(given, wanted, rel_tol=0, abs_tol=tolerance)
        if not is_same:
            raise _Problem(f"{where}: {field.name} is {given!r}, not {wanted!r}")


def _answers(accumulator: Accumulator, ask: Ask) -> Iterator[Importance | None]:
    """An accumulator may catch up with its tree while it is asked."""
    for _ in range(MAX_CALLS if ask.expected is not None else 1):
        try:
            yield accumulator.get_importance(ask.key)
        except Exception as error:
            raise _Problem(f"get_importance raised {type(error).__name__} for {ask.key.hex()}") from None


def _expect(name: str, given: object, wanted: object) -> None:
    if given != wanted:
        raise _Problem(f"{name} is {given}, not {wanted}")

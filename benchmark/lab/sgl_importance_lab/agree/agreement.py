"""How far two answers to one prompt agree: equal tokens, divergence, first difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_importance_lab.study.statistics import Estimate, mean_of, median_of, ratio_of


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token.

    Attributes:
        token: that came out.
        logprobs: of the likeliest tokens and of that one, in nats; up to a constant where it was forced.
    """

    token: str
    logprobs: dict[str, float]

    @property
    def likeliest(self) -> str:
        """What greedy decoding would take."""
        return max(self.logprobs, key=self.logprobs.__getitem__)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of one prompt.

    Attributes:
        line: of the prompt in its file.
        compared: tokens before which both servers had seen the same.
        equal: those of them that both find likeliest.
        divergence: sum over the compared tokens of ``kl``, nats.
        first_difference: tokens before the first that differs; None where none does.
    """

    line: int
    compared: int
    equal: int
    divergence: float
    first_difference: int | None


def kl(first: dict[str, float], second: dict[str, float]) -> float:
    """Kullback-Leibler divergence of the second from the first over the tokens that the first names, nats.

    Both are renormalised over these tokens. One that the second does not name counts as its least likely
    named one, which it cannot exceed.
    """
    floor = min(second.values())
    shares = _normalised(first)
    others = _normalised({token: second.get(token, floor) for token in first})
    return sum(math.exp(p) * (p - others[token]) for token, p in shares.items())


def _normalised(logprobs: dict[str, float]) -> dict[str, float]:
    top = max(logprobs.values())
    total = top + math.log(sum(math.exp(value - top) for value in logprobs.values()))
    return {token: value - total for token, value in logprobs.items()}


def agreement(line: int, first: Sequence[Step], second: Sequence[Step]) -> Agreement:
    """Compares step by step for as long as both have generated the same."""
    compared = equal = 0
    divergence = 0.0
    first_difference = None
    for one, other in zip(first, second, strict=False):
        is_equal = one.likeliest == other.likeliest
        if first_difference is None and not is_equal:
            first_difference = compared
        compared += 1
        equal += is_equal
        divergence += kl(one.logprobs, other.logprobs)
        if one.token != other.token:  # from here on each goes on from an answer of its own
            break
    else:
        if first_difference is None and len(first) != len(second):
            first_difference = compared
    return Agreement(line, compared, equal, divergence, first_difference)


def summary(agreements: Sequence[Agreement]) -> dict[str, Estimate]:
    """With intervals over prompts, by what is estimated."""
    found = {
        "equal tokens": ratio_of([(each.equal, each.compared) for each in agreements]),
        "KL of top logprobs, nats a token": ratio_of(
            [(each.divergence, each.compared) for each in agreements]
        ),
        "prompts without a difference": mean_of([each.first_difference is None for each in agreements]),
    }
    differences = [each.first_difference for each in agreements if each.first_difference is not None]
    if differences:
        found["first difference behind so many tokens, median of the others"] = median_of(differences)
    return found

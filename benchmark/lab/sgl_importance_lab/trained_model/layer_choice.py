"""Chooses the layers that shall emit page scores, and for how many tokens, from planted questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_importance.errors import ImportanceError
from sgl_importance_lab.study.statistics import Estimate, mean_of
from sgl_importance_lab.trained_model.planted_questions import MOST_OBSERVED, Question

WINDOWS = (1, 8, MOST_OBSERVED)
"""Last tokens of a prompt that are observed, to be chosen among; the last is what servers observe."""
FOUND = 0.9
"""Of the questions that the model answers, in which a layer must find the page to be chosen."""
FEWEST_ANSWERED = 10
"""Questions that the model must answer: what it cannot answer says nothing about where it looks."""


class CalibrationError(ImportanceError):
    """The questions do not say which layers find an answer; the message names the cure."""


@dataclass(frozen=True)
class Found:
    """Which layers find the answer with one window; shares are of the answered questions.

    Attributes:
        window: last tokens of a prompt that are observed.
        by_layer: where a layer's best pages hold the answer, in the order of ``LayerChoice.layers``.
        chosen: layers that find it in ``FOUND`` of them; the best one where none does.
        together: the same of the chosen layers' joint scores, which a server that emits them has.
        beside: the same of the layers that it was to be compared with; None where there are none.
    """

    window: int
    by_layer: Sequence[Estimate]
    chosen: Sequence[int]
    together: Estimate
    beside: Estimate | None


@dataclass(frozen=True)
class LayerChoice:
    """
    Attributes:
        asked: questions.
        answered: of these, those that the model answers; only they count.
        layers: that were looked at: those that see the whole context.
        windows: of every window.
    """

    asked: int
    answered: int
    layers: Sequence[int]
    windows: Sequence[Found]

    @property
    def best(self) -> Found:
        """The window whose chosen layers find most answers together, the widest of equals."""
        return max(self.windows, key=lambda found: (found.together.value, found.window))


def calibrate(questions: Sequence[Question], beside: Sequence[int] = ()) -> LayerChoice:
    """
    Args:
        questions: of one model.
        beside: layers whose joint scores are judged as well.

    Raises:
        CalibrationError: the model answers too few.
    """
    answered = [question for question in questions if question.is_answered]
    if len(answered) < FEWEST_ANSWERED:
        raise CalibrationError(
            f"the model answers {len(answered)} of {len(questions)} questions, and {FEWEST_ANSWERED} are "
            "needed: give more --documents, or shorter ones with --document-tokens"
        )
    windows = [_found(answered, beside, size) for size in WINDOWS]
    return LayerChoice(len(questions), len(answered), sorted(answered[0].scores), windows)


def _found(answered: Sequence[Question], beside: Sequence[int], window: int) -> Found:
    def share(layers: Sequence[int]) -> Estimate:
        return mean_of([float(question.is_found_by(layers, window)) for question in answered])

    by_layer = {layer: share([layer]) for layer in sorted(answered[0].scores)}
    best = max(by_layer, key=lambda layer: by_layer[layer].value)
    chosen = [layer for layer, found in by_layer.items() if found.value >= FOUND] or [best]
    return Found(window, list(by_layer.values()), chosen, share(chosen), share(beside) if beside else None)

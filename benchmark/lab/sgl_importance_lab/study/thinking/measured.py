"""The recordings of a study of thoughts, measured request by request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_importance.terminal import counted
from sgl_importance_lab.replay.residency.page_steps import PageRecording
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, StudyError
from sgl_importance_lab.study.thinking.marks import Marks
from sgl_importance_lab.study.thinking.request_measures import (
    KEPT_SHARES,
    RequestMeasures,
    RuleCell,
    measure_request,
    summed,
)
from sgl_importance_lab.study.thinking.wants import Wants, read_wants

# Chosen before the first run.
WANTED_SHARE = 0.1
SHORTEST_ANSWER = 32
SHORTEST_OTHER = 6
"""Of kinds that no verdict is read from, such as a model that answers at once."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Kinds of requests, from ids "kind/...": those that think, and those that are normal decode."""

    thought: str
    normal: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.thought, self.normal))


@dataclass(frozen=True, slots=True)
class Measured:
    """All recordings with pages of one size, request by request."""

    page_size: int
    requests: Sequence[RequestMeasures]

    def of_kind(self, kind: str) -> list[RequestMeasures]:
        return [each for each in self.requests if each.kind == kind]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(each.kind for each in self.requests))


def measure_recordings(
    recordings: Sequence[PageRecording], marks: Mapping[str, Marks], kinds: Kinds
) -> list[Measured]:
    """Everything of every long answer, by page size.

    Raises:
        StudyError: a recording lists too few pages, or there are no long answers of one of the two kinds with
            pages of a size.
    """
    by_size: dict[int, list[RequestMeasures]] = {}
    total = sum(recording.num_requests for recording in recordings)
    with counted("measuring requests", total) as advance:
        for recording in recordings:
            check_lists(recording)
            inputs = {request.rid: request.input_tokens for request in recording.requests}
            requests = by_size.setdefault(recording.page_size, [])
            for wants in read_wants(recording, WANTED_SHARE, SHORTEST_OTHER, marks):
                if wants.kind not in kinds or is_long(wants):
                    requests.append(measure_request(wants, marks.get(wants.rid), inputs[wants.rid]))
                advance()
    found = [Measured(page_size, requests) for page_size, requests in sorted(by_size.items())]
    for measured in found:
        _check_kinds(measured, kinds)
    return found


def is_long(wants: Wants) -> bool:
    """Whether verdicts are read from this answer: it has tokens enough, and pages of its own."""
    return wants.num_steps >= SHORTEST_ANSWER and int(wants.num_pages[-1]) > wants.prompt_pages


def _check_kinds(measured: Measured, kinds: Kinds) -> None:
    for kind in kinds:
        if not measured.of_kind(kind):
            raise StudyError(
                f"no answers of kind '{kind}' of {SHORTEST_ANSWER} tokens or more that leave the last page "
                f"of their prompt, with pages of {measured.page_size} tokens (kinds there: "
                f"{', '.join(measured.kinds) or 'none'}): send request ids such as {kind}/1, or name other "
                "kinds with --thought and --normal"
            )


def check_lists(recording: PageRecording) -> None:
    for step in recording.steps:
        pages = -(-step.seq_len // recording.page_size)
        if step.wanted.shape[-1] < max(KEPT_SHARES) * pages - 1:
            raise StudyError(
                f"{recording.name} lists {step.wanted.shape[-1] / pages:.0%} of the pages: record with "
                f"trace.pages = {max(KEPT_SHARES):g} or more of --kv-importance-config"
            )


def rule_parts(found: Sequence[RequestMeasures], cell: RuleCell, measure: str) -> list[tuple[float, float]]:
    """Numerator and denominator of a measure, of each request that has the cell."""
    return [summed(each.rules[cell][measure]) for each in found if cell in each.rules]


def notes_of(decisive: Measured, kinds: Kinds) -> tuple[str, ...]:
    """What every finding must say of its units."""
    steps = {kind: [each.num_steps for each in decisive.of_kind(kind)] for kind in kinds}
    numbers = [
        f"{len(found)} {kind} ({np.median(found):,.0f} tokens in the median)" for kind, found in steps.items()
    ]
    return (
        f"pages of {decisive.page_size} tokens; wanted are the {WANTED_SHARE:.0%} of a context's "
        "pages with the largest attention, of each layer and KV head; requests are the resampled units: "
        + ", ".join(numbers),
        OF_THESE_MODELS,
    )

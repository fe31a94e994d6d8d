"""KV heads apart: what is moved, and what is fetched ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sgl_importance.trace.page_steps import PageRecording
from sgl_importance_lab.study.heads.answers import read_answers
from sgl_importance_lab.study.heads.head_slots import study_units
from sgl_importance_lab.study.heads.prefetch import study_prefetch
from sgl_importance_lab.study.study_report import Finding
from sgl_importance_lab.study.thinking.marks import Marks


def study_heads(
    recordings: Sequence[PageRecording], marks: Mapping[str, Marks], *, figures: Path | None = None
) -> list[Finding]:
    """A finding on slots of single heads, one on fetching by distance.

    Args:
        recordings: those with pages of one size are taken together; the verdicts are read from pages of 16
            tokens, or else from the smallest.
        marks: by request id, where milestones are known.
        figures: folder for a PNG file for each finding.

    Raises:
        StudyError: the recordings cannot answer the questions.
    """
    answers = read_answers(recordings, marks)
    studies = {"heads-residency": study_units, "heads-prefetch": study_prefetch}
    return [
        study(answers, None if figures is None else figures / f"{name}.png")
        for name, study in studies.items()
    ]

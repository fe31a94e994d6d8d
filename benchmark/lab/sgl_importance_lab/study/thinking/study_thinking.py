"""Rules that decide what stays on a device, put to long thoughts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sgl_importance_lab.replay.residency.page_steps import PageRecording
from sgl_importance_lab.study.study_report import Finding
from sgl_importance_lab.study.thinking.attention_score import study_attention_score
from sgl_importance_lab.study.thinking.marks import Marks
from sgl_importance_lab.study.thinking.measured import Kinds, measure_recordings
from sgl_importance_lab.study.thinking.page_loads import study_residency
from sgl_importance_lab.study.thinking.recency import study_recency
from sgl_importance_lab.study.thinking.stability import study_stability

DECISIVE_PAGE = 16  # chosen before the first run


def study_thinking(
    recordings: Sequence[PageRecording],
    marks: Mapping[str, Marks],
    kinds: Kinds,
    *,
    figures: Path | None = None,
) -> list[Finding]:
    """A finding for each of three rules that systems rest on, and one for a rule that learns.

    Args:
        recordings: those with pages of one size are taken together; the verdicts are read from pages of 16
            tokens, or else from the smallest.
        marks: by request id, where milestones are known.
        kinds: of the requests that are compared.
        figures: folder for a PNG file for each finding.

    Raises:
        StudyError: the recordings cannot answer the questions.
    """
    measured = measure_recordings(recordings, marks, kinds)
    decisive = next((each for each in measured if each.page_size == DECISIVE_PAGE), measured[0])
    studies = {
        "thinking-recency": study_recency,
        "thinking-stability": study_stability,
        "thinking-attention": study_attention_score,
    }
    found = [
        study(measured, decisive, kinds, None if figures is None else figures / f"{name}.png")
        for name, study in studies.items()
    ]
    figure = None if figures is None else figures / "thinking-residency.png"
    return [*found, study_residency(recordings, measured, marks, decisive.page_size, kinds.thought, figure)]

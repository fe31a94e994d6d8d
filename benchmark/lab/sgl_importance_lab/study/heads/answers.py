"""Long answers of recordings, by size of their pages: what each head wanted, and who knows milestones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_importance.trace.page_steps import PageRecording
from sgl_importance_lab.study.study_report import StudyError
from sgl_importance_lab.study.thinking.marks import Marks
from sgl_importance_lab.study.thinking.measured import SHORTEST_ANSWER, WANTED_SHARE, check_lists
from sgl_importance_lab.study.thinking.wants import Wants, read_wants

DECISIVE_PAGE = 16
KEPT_SHARES = (0.1, 0.2, 0.4)
DECISIVE_SHARE = 0.2
PAYS = 0.15
"""Share that must be saved for a verdict in favour. All chosen before the first run."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        wants: of every KV head, those of the first layer first.
        kv_heads: of a layer.
        marks: None where nobody knows them.
    """

    wants: Wants
    kv_heads: int
    marks: Marks | None

    @property
    def layer_steps(self) -> int:
        """Steps x layers."""
        return self.wants.num_steps * self.wants.num_heads // self.kv_heads


def read_answers(
    recordings: Sequence[PageRecording], marks: Mapping[str, Marks]
) -> dict[tuple[int, str], list[Answer]]:
    """Answers by size of their pages and kind of their requests.

    Raises:
        StudyError: no answer is long enough, a recording lists too few pages, or its model has one KV head.
    """
    found: dict[tuple[int, str], list[Answer]] = {}
    for recording in recordings:
        check_lists(recording)
        kv_heads = recording.steps[0].wanted.shape[1]
        if kv_heads < 2:
            raise StudyError(
                f"{recording.name}: its layers have one KV head, which is the whole page: record a model "
                "with several"
            )
        for wants in read_wants(recording, WANTED_SHARE, SHORTEST_ANSWER):
            of_kind = found.setdefault((recording.page_size, wants.kind), [])
            of_kind.append(Answer(wants, kv_heads, marks.get(wants.rid)))
    for (page_size, kind), answers in found.items():
        if len(answers) < 2:
            raise StudyError(
                f"one answer of kind '{kind}' with pages of {page_size}: what is said of it is learnt from "
                "others of its kind, so record two or more"
            )
    if not found:
        raise StudyError(f"no answers of {SHORTEST_ANSWER} tokens or more: let clients ask for longer ones")
    return dict(sorted(found.items()))


def decisive_page(found: Mapping[tuple[int, str], Sequence[Answer]]) -> int:
    """Size of the pages that verdicts are read from: 16, or else the smallest there is."""
    sizes = {page_size for page_size, _ in found}
    return DECISIVE_PAGE if DECISIVE_PAGE in sizes else min(sizes)


def limits_of(found: Mapping[tuple[int, str], Sequence[Answer]]) -> str:
    """What a finding must say of its units before anything else."""
    page = decisive_page(found)
    answers = [each for of_kind in found.values() for each in of_kind]
    heads = " and ".join(map(str, sorted({each.kv_heads for each in answers})))
    counts = ", ".join(f"{len(each)} {kind}" for (size, kind), each in found.items() if size == page)
    return (
        f"{heads} KV heads a layer: with more of them a whole page moves more that nobody asked for, and "
        f"copies of single heads are more and smaller. Pages of {page} tokens, wanted are the "
        f"{WANTED_SHARE:.0%} with the largest attention of each head; answers are the resampled units: "
        f"{counts}"
    )

"""Does fetching the pages that come into a head's reach save steps from waiting for them?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_importance.terminal import counted
from sgl_importance_lab.study.heads import prefetchers
from sgl_importance_lab.study.heads.answers import (
    DECISIVE_SHARE,
    KEPT_SHARES,
    PAYS,
    Answer,
    decisive_page,
    limits_of,
)
from sgl_importance_lab.study.heads.distance_profile import fit_profile, own_profile
from sgl_importance_lab.study.heads.prefetchers import Prefetcher
from sgl_importance_lab.study.heads.slot_run import SlotRun, run_slots
from sgl_importance_lab.study.links import BY_COPY, BY_GATHER, LINKS, unit_bytes
from sgl_importance_lab.study.statistics import Estimate, ratio_of
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, Finding, draw, verdict_of_parts
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES
from sgl_importance_lab.study.thinking.marks import Marks

NONE, PROFILE, OWN_PROFILE, ORACLE = "none", "profile", "profile of the answer", "oracle"
RULE = "EMA"
"""Of the slots: no rule that learns nothing loads less (``study thinking``)."""
BUFFER_SHARES = (0.02, 0.05)
CLAIM = (
    "fetching the pages that come into a head's reach, by a profile of distances learnt from other answers, "
    "leaves steps at least 15 % less to wait for, more than fetching by anything else that does not see the "
    "future, and lets go no more bytes unread than it saves"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A prefetcher with its buffer, and the share of the pages that the device bytes hold."""

    name: str
    buffer: float
    share: float


Cells = dict[Cell, list[SlotRun]]
"""An entry for each answer."""


def study_prefetch(found: Mapping[tuple[int, str], Sequence[Answer]], figure: Path | None) -> Finding:
    """Replays every answer with each prefetcher, slots of single heads."""
    table: dict[tuple[int, str], Cells] = {}
    with counted("fetching ahead", sum(map(len, found.values()))) as advance:
        for key, answers in found.items():
            cells = table.setdefault(key, {})
            marked = all(answer.marks is not None for answer in answers)
            for number, answer in enumerate(answers):
                # Every second answer learns from the others, these from it.
                profile = fit_profile([each.wants for each in answers[1 - number % 2 :: 2]])
                named = _prefetchers(answer.marks if marked else None)
                for cell, run in _runs(answer, {**named, PROFILE: profile}):
                    cells.setdefault(cell, []).append(run)
                advance()
    page = decisive_page(found)
    decisive = {kind: cells for (size, kind), cells in table.items() if size == page}
    judged = {kind: _judged(cells, page) for kind, cells in decisive.items()}
    rows = [_row(*key, cell, cells) for key, cells in table.items() for cell in cells]
    if figure is not None:
        draw(figure, [(f"loads and waste, {kind}", _painter(rows, page, kind)) for kind in decisive])
    return Finding(
        study="heads-prefetch",
        claim=CLAIM,
        value=next(iter(judged.values())).saved[PROFILE],
        verdict=verdict_of_parts(*(each.part(kind) for kind, each in judged.items())),
        notes=(
            limits_of(found),
            f"value: {next(iter(judged))}, share of the wait that is saved ({BY_GATHER}; copies ahead are "
            f"taken to cost no time). Slots by {RULE}, device bytes for {DECISIVE_SHARE:.0%} of the pages; "
            f"of these the buffer takes {' or '.join(f'{share:.0%}' for share in BUFFER_SHARES)}, whichever "
            "saves more",
            "the profile is learnt from every second answer of a kind and judged by the others, and the "
            f"other way round; '{OWN_PROFILE}' learns from the answer itself while it is written",
            "left to load and copied ahead for nothing, as a part of the loads without prefetch: "
            + "; ".join(f"{kind} {each.loaded_or_unread}" for kind, each in judged.items()),
            OF_THESE_MODELS,
        ),
        rows=tuple(rows),
    )


def _prefetchers(marks: Marks | None) -> dict[str, Prefetcher]:
    found: dict[str, Prefetcher] = {
        "random": prefetchers.any_page,
        "recency": KEEP_RULES["recency"],
        "next page": prefetchers.next_page,
        "EMA": KEEP_RULES["EMA"],
        OWN_PROFILE: own_profile,
        ORACLE: prefetchers.next_reads,
    }
    if marks is not None:
        found["milestone"] = prefetchers.behind_milestones(marks)
    return found


def _runs(answer: Answer, named: Mapping[str, Prefetcher]) -> Iterator[tuple[Cell, SlotRun]]:
    rule = KEEP_RULES[RULE]
    for run in run_slots(answer.wants, rule, KEPT_SHARES, pool_heads=answer.kv_heads):
        yield Cell(NONE, 0.0, run.share), run
    for name, prefetcher in named.items():
        for buffer in BUFFER_SHARES:
            for run in run_slots(
                answer.wants,
                rule,
                KEPT_SHARES,
                pool_heads=answer.kv_heads,
                prefetcher=prefetcher,
                buffer_share=buffer,
            ):
                yield Cell(name, buffer, run.share), run


@dataclass(frozen=True, slots=True)
class _Judged:
    """Of one kind, each prefetcher with the buffer that suits it.

    Attributes:
        saved: share of the wait, by prefetcher.
        loaded_or_unread: what the profile leaves to wait for and what it lets go unread, as a part of what is
            waited for without it.
    """

    saved: Mapping[str, Estimate]
    loaded_or_unread: Estimate

    @property
    def best_other(self) -> str:
        blind = [name for name in self.saved if name not in (PROFILE, OWN_PROFILE, ORACLE)]
        return max(blind, key=lambda name: self.saved[name].value)

    def part(self, kind: str) -> tuple[bool, bool, str]:
        saved, other = self.saved[PROFILE], self.saved[self.best_other]
        return (
            saved.low >= PAYS and saved.low > other.high and self.loaded_or_unread.high <= 1,
            saved.high < PAYS or saved.high < other.low or self.loaded_or_unread.low > 1,
            f"{kind}: it saves {saved} of the wait, '{self.best_other}' {other}, "
            f"the oracle {self.saved[ORACLE]}",
        )


def _judged(cells: Cells, page: int) -> _Judged:
    saved, best = {}, {}
    for name in dict.fromkeys(cell.name for cell in cells if cell.name != NONE):
        of_buffer = {
            cell: _one_minus(_beside_none(cells, cell, _waits(BY_GATHER, page)))
            for cell in (Cell(name, buffer, DECISIVE_SHARE) for buffer in BUFFER_SHARES)
        }
        best[name] = max(of_buffer, key=lambda cell: of_buffer[cell].value)
        saved[name] = of_buffer[best[name]]
    return _Judged(saved, _beside_none(cells, best[PROFILE], lambda run: run.loaded + run.unread, _loaded))


def _loaded(run: SlotRun) -> float:
    return run.loaded


def _waits(link: str, page: int) -> Callable[[SlotRun], float]:
    return lambda run: LINKS[link].seconds(run.loaded, run.batches, unit_bytes(page, 1))


def _one_minus(part: Estimate) -> Estimate:
    return part.from_one()


def _beside_none(
    cells: Cells,
    cell: Cell,
    measure: Callable[[SlotRun], float],
    of_none: Callable[[SlotRun], float] | None = None,
) -> Estimate:
    """A measure as a part of what it, or another, is where nothing is fetched ahead; over answers."""
    pairs = zip(cells[cell], cells[Cell(NONE, 0.0, cell.share)], strict=True)
    return ratio_of([(measure(run), (of_none or measure)(none)) for run, none in pairs])


def _row(page: int, kind: str, cell: Cell, cells: Cells) -> dict[str, Any]:
    runs = cells[cell]
    gather = _one_minus(_beside_none(cells, cell, _waits(BY_GATHER, page)))
    copies = _one_minus(_beside_none(cells, cell, _waits(BY_COPY, page)))
    fetched, unread = (
        _beside_none(cells, cell, measure, _loaded) for measure in (lambda r: r.fetched, lambda r: r.unread)
    )
    return {
        "page": page,
        "kind": kind,
        "answers": len(runs),
        "kept": cell.share,
        "buffer": cell.buffer,
        "prefetcher": cell.name,
        "loads a token": sum(run.loaded for run in runs) / sum(run.steps for run in runs),
        "swap-ins a token": sum(run.batches for run in runs) / sum(run.steps for run in runs),
        "loaded of read": sum(run.loaded for run in runs) / sum(run.read for run in runs),
        "wait saved, gather": gather.value,
        "low": gather.low,
        "high": gather.high,
        "wait saved, copies": copies.value,
        "copies low": copies.low,
        "copies high": copies.high,
        "fetched": fetched.value,
        "unread": unread.value,
        "unread low": unread.low,
        "unread high": unread.high,
    }


def _painter(rows: Sequence[dict[str, Any]], page: int, kind: str) -> Callable[[Any], None]:
    def paint(axis: Any) -> None:
        for row in rows:
            if (row["page"], row["kind"], row["kept"]) != (page, kind, DECISIVE_SHARE):
                continue
            axis.plot(row["unread"], row["wait saved, gather"], "o")
            axis.annotate(
                f"{row['prefetcher']}, {row['buffer']:.0%}",
                (row["unread"], row["wait saved, gather"]),
                fontsize=6,
            )
        axis.axhline(0, color="k", lw=0.5)
        axis.set_xlabel("let go unread, of the loads without prefetch", fontsize=8)
        axis.set_ylabel("share of the wait that is saved", fontsize=8)

    return paint

"""Do slots of single KV heads move less than slots of whole pages, with the same device bytes?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_importance.terminal import counted
from sgl_importance_lab.study.heads.answers import (
    DECISIVE_SHARE,
    KEPT_SHARES,
    PAYS,
    Answer,
    decisive_page,
    limits_of,
)
from sgl_importance_lab.study.heads.choices import (
    LAYER_CHOICE,
    SAME_ATTENTION,
    SINGLE_HEADS,
    WHOLE_PAGES,
    arms_of,
)
from sgl_importance_lab.study.heads.slot_run import SlotRun, run_slots
from sgl_importance_lab.study.links import BY_COPY, BY_GATHER, FROM_FLASH, LINKS, unit_bytes
from sgl_importance_lab.study.statistics import Estimate, ratio_of
from sgl_importance_lab.study.study_report import OF_THESE_MODELS, Finding, draw, verdict_of_parts
from sgl_importance_lab.study.thinking.keep_rules import KEEP_RULES

RULES = ("LRU", "EMA", "random, prompt kept", "oracle")
CLAIM = (
    "where each head reads pages of its own, slots of single heads move at least 15 % fewer bytes than slots "
    "of whole pages with the same device bytes, and steps wait for them less"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to choose and to move, one rule, and the share of the pages that the device bytes hold."""

    arm: str
    rule: str
    share: float


DECISIVE = Cell(SINGLE_HEADS, "EMA", DECISIVE_SHARE)


@dataclass(frozen=True, slots=True)
class Moved:
    """Of one answer.

    Attributes:
        size: bytes that steps waited for.
        copies: keys and values apart.
        waits: seconds, by link.
        left: bytes of the answer that left their slots, each counted once.
        read: bytes that steps read of a page's heads.
        covered: attention on what was read, of 1 for each KV head.
    """

    size: int
    copies: int
    waits: Mapping[str, float]
    left: int
    read: int
    covered: float


Table = dict[tuple[int, str], dict[Cell, list[Moved]]]
"""By size of the pages and kind of the requests; an entry for each answer."""


def study_units(found: Mapping[tuple[int, str], Sequence[Answer]], figure: Path | None) -> Finding:
    """Replays every answer with each unit of residency."""
    table: Table = {}
    with counted("whole pages and single heads", sum(map(len, found.values()))) as advance:
        for key, answers in found.items():
            cells = table.setdefault(key, {})
            for answer in answers:
                for cell, moved in moves_of(answer).items():
                    cells.setdefault(cell, []).append(moved)
                advance()
    page = decisive_page(found)
    kinds = [kind for size, kind in found if size == page]
    decisive = {kind: table[page, kind] for kind in kinds}
    saved = {kind: _saved(cells) for kind, cells in decisive.items()}
    waits = {kind: _beside(cells, DECISIVE, _waits(BY_GATHER)) for kind, cells in decisive.items()}
    rows = [_row(*key, cell, found[key], cells) for key, cells in table.items() for cell in cells]
    if figure is not None:
        draw(figure, [(f"bytes moved, {kind}", _painter(rows, page, kind)) for kind in kinds])
    return Finding(
        study="heads-residency",
        claim=CLAIM,
        value=saved[kinds[0]],
        verdict=verdict_of_parts(
            *(
                (
                    saved[kind].low >= PAYS and waits[kind].high < 1,
                    saved[kind].high < PAYS or waits[kind].low >= 1,
                    f"{kind}: {saved[kind]} of the bytes are saved, and steps wait {waits[kind]} "
                    "times as long",
                )
                for kind in kinds
            )
        ),
        notes=(
            limits_of(found),
            f"value: {kinds[0]}, rule {DECISIVE.rule}, device bytes for {DECISIVE_SHARE:.0%} of the pages of "
            f"the context at each step; steps wait {BY_GATHER}. '{LAYER_CHOICE}' is what the server does "
            f"today; '{SAME_ATTENTION}' reads more pages, so many that it covers what the heads' own choices "
            "cover",
            f"waiting: {'; '.join(f'{name}: {link.cost.describe()}' for name, link in LINKS.items())}; "
            f"a head of a page has {unit_bytes(page, 1):,} bytes (dimension 128, bfloat16)",
            *(_demotion(kind, cells) for kind, cells in decisive.items()),
            *(_layer_choice(kind, cells) for kind, cells in decisive.items()),
            _metadata(),
            OF_THESE_MODELS,
        ),
        rows=tuple(rows),
    )


def moves_of(answer: Answer) -> dict[Cell, Moved]:
    """One answer, every way."""
    moved = {}
    for name, arm in arms_of(answer.wants, answer.kv_heads).items():
        covered = float(arm.covered.sum()) / (answer.layer_steps * answer.kv_heads)
        for rule in RULES:
            for run in run_slots(arm.wants, KEEP_RULES[rule], KEPT_SHARES, pool_heads=arm.pool_heads):
                moved[Cell(name, rule, run.share)] = _moved(
                    run, unit_bytes(answer.wants.page_size, arm.unit_heads), covered
                )
    return moved


def _moved(run: SlotRun, size: int, covered: float) -> Moved:
    return Moved(
        size=run.loaded * size,
        copies=run.loaded * LINKS[BY_COPY].accesses_per_unit,
        waits={name: link.seconds(run.loaded, run.batches, size) for name, link in LINKS.items()},
        left=run.left * size,
        read=run.read * size,
        covered=covered,
    )


def _beside(
    cells: Mapping[Cell, Sequence[Moved]],
    cell: Cell,
    measure: Callable[[Moved], float],
    other: str = WHOLE_PAGES,
) -> Estimate:
    """A measure as a part of what it is with another way to choose and to move, over answers."""
    pairs = zip(cells[cell], cells[replace(cell, arm=other)], strict=True)
    return ratio_of([(measure(one), measure(another)) for one, another in pairs])


def _size(moved: Moved) -> float:
    return moved.size


def _waits(link: str) -> Callable[[Moved], float]:
    return lambda moved: moved.waits[link]


def _saved(cells: Mapping[Cell, Sequence[Moved]]) -> Estimate:
    moved = _beside(cells, DECISIVE, _size)
    return moved.from_one()


def _demotion(kind: str, cells: Mapping[Cell, Sequence[Moved]]) -> str:
    written = _beside(cells, DECISIVE, lambda moved: moved.left)
    read = _beside(cells, DECISIVE, _size)
    waits = _beside(cells, DECISIVE, _waits(FROM_FLASH))
    return (
        f"{kind}, the same as demotion of an answer's pages to flash, beside whole pages: {written} of the "
        f"bytes are written, {read} are read back, and steps wait {waits} times as long"
    )


def _layer_choice(kind: str, cells: Mapping[Cell, Sequence[Moved]]) -> str:
    named = {
        name: (_beside(cells, DECISIVE, _size, name), _beside(cells, DECISIVE, lambda m: m.covered, name))
        for name in (LAYER_CHOICE, SAME_ATTENTION)
    }
    said = "; ".join(
        f"beside '{name}' {size} of the bytes, with {covered.value:.3f} times the attention covered"
        for name, (size, covered) in named.items()
    )
    return f"{kind}, single heads: {said}"


def _metadata() -> str:
    """The device's tables at a large model's size, as the server's ``SlotTable`` has them."""
    from sgl_importance_kernels.pages.page_history import PageHistory  # imports torch
    from sgl_importance_kernels.pages.slot_table import SlotTable

    of_page = SlotTable(PageHistory("ema", 1, 1, "cpu"), 1, 1, 0, 0, "cpu").num_bytes
    layers, heads, pages = 80, 8, 32 * 131_072 // 16
    whole = of_page * layers * pages
    return (
        f"tables: {of_page} bytes for each layer and page, or head of it; with {layers} layers, {heads} KV "
        f"heads and 32 contexts of 131,072 tokens {whole / 1e9:.2f} GB of device memory for whole pages, "
        f"{heads * whole / 1e9:.2f} GB for single heads"
    )


def _row(
    page: int, kind: str, cell: Cell, answers: Sequence[Answer], cells: Mapping[Cell, Sequence[Moved]]
) -> dict[str, Any]:
    moved = cells[cell]
    layer_steps = sum(answer.layer_steps for answer in answers)
    size, gather, copy = (
        _beside(cells, cell, measure) for measure in (_size, _waits(BY_GATHER), _waits(BY_COPY))
    )
    return {
        "page": page,
        "kind": kind,
        "answers": len(moved),
        "kept": cell.share,
        "rule": cell.rule,
        "units": cell.arm,
        "covered": sum(each.covered for each in moved) / len(moved),
        "read KiB": sum(each.read for each in moved) / layer_steps / 1024,
        "moved KiB": sum(each.size for each in moved) / layer_steps / 1024,
        "copies": sum(each.copies for each in moved) / layer_steps,
        **{f"us, {name}": 1e6 * sum(each.waits[name] for each in moved) / layer_steps for name in LINKS},
        "left KiB": sum(each.left for each in moved) / len(moved) / 1024,
        "bytes of whole pages": size.value,
        "low": size.low,
        "high": size.high,
        "wait of whole pages, gather": gather.value,
        "gather low": gather.low,
        "gather high": gather.high,
        "wait of whole pages, copies": copy.value,
        "copies low": copy.low,
        "copies high": copy.high,
    }


def _painter(rows: Sequence[dict[str, Any]], page: int, kind: str) -> Callable[[Any], None]:
    def paint(axis: Any) -> None:
        shown = [
            row for row in rows if (row["page"], row["kind"], row["rule"]) == (page, kind, DECISIVE.rule)
        ]
        for name in dict.fromkeys(row["units"] for row in shown):
            of_arm = [row for row in shown if row["units"] == name]
            axis.plot([r["kept"] for r in of_arm], [r["moved KiB"] for r in of_arm], "o-", label=name)
        axis.set_xlabel("share of the context's pages that fit", fontsize=8)
        axis.set_ylabel("KiB for each token and layer", fontsize=8)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)

    return paint

"""Damage to stored pages and around them: the right tokens, no hang, and a counter that says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_importance.storage.page_record import HEADER_BYTES, MissReason, decode_header, encode_header

from support.store_bench import PAGE_TOKENS, PROMPT_PAGES, Bench, report

pytestmark = pytest.mark.server

DAMAGED_PAGE = 4


def flip(offset: int, bit: int = 0) -> Callable[[list[Path]], None]:
    def damage(files: list[Path]) -> None:
        data = bytearray(files[DAMAGED_PAGE].read_bytes())
        data[offset] ^= 1 << bit
        files[DAMAGED_PAGE].write_bytes(data)

    return damage


def cut(length: int) -> Callable[[list[Path]], None]:
    return lambda files: files[DAMAGED_PAGE].write_bytes(files[DAMAGED_PAGE].read_bytes()[:length])


def lengthen(files: list[Path]) -> None:
    files[DAMAGED_PAGE].write_bytes(files[DAMAGED_PAGE].read_bytes() + b"\0")


def swap(files: list[Path]) -> None:
    first, second = files[DAMAGED_PAGE].read_bytes(), files[DAMAGED_PAGE + 1].read_bytes()
    files[DAMAGED_PAGE].write_bytes(second)
    files[DAMAGED_PAGE + 1].write_bytes(first)


def of_another_model(files: list[Path]) -> None:
    data = files[DAMAGED_PAGE].read_bytes()
    header, body = decode_header(data[:HEADER_BYTES]), np.frombuffer(data[HEADER_BYTES:], np.uint8)
    stranger = encode_header(page=header.page, identity=bytes(32), depth=header.depth, body=body)
    files[DAMAGED_PAGE].write_bytes(stranger + body.tobytes())


def remove(files: list[Path]) -> None:
    files[DAMAGED_PAGE].unlink()


def pipe(files: list[Path]) -> None:
    files[DAMAGED_PAGE].unlink()
    os.mkfifo(files[DAMAGED_PAGE])


DAMAGES: dict[str, tuple[Callable[[list[Path]], None], MissReason]] = {
    "bit flip in magic": (flip(0, 3), MissReason.MAGIC),
    "bit flip in version": (flip(8), MissReason.HEADER),
    "bit flip in reserved": (flip(10), MissReason.HEADER),
    "bit flip in depth": (flip(12, 5), MissReason.HEADER),
    "bit flip in length": (flip(16, 4), MissReason.HEADER),
    "bit flip in page digest": (flip(24, 7), MissReason.HEADER),
    "bit flip in identity": (flip(56, 1), MissReason.HEADER),
    "bit flip in body CRC": (flip(88), MissReason.HEADER),
    "bit flip in header CRC": (flip(92, 2), MissReason.HEADER),
    "bit flip in first byte of body": (flip(HEADER_BYTES), MissReason.BODY),
    "bit flip inside body": (flip(HEADER_BYTES + 5000, 6), MissReason.BODY),
    "bit flip in last byte of body": (flip(-1, 7), MissReason.BODY),
    "file emptied": (cut(0), MissReason.TRUNCATED),
    "file cut inside header": (cut(50), MissReason.TRUNCATED),
    "file cut inside body": (cut(HEADER_BYTES + 1000), MissReason.TRUNCATED),
    "file one byte too long": (lengthen, MissReason.LENGTH),
    "two pages swapped": (swap, MissReason.PAGE),
    "pipe in its place": (pipe, MissReason.IO),
    "page of another model": (of_another_model, MissReason.IDENTITY),
}


def damages() -> list[Any]:
    """Parameters of a test: by day one damage of each reason, of which test_record.py has every bit."""
    first = {reason: name for name, (_, reason) in reversed(DAMAGES.items())}
    return [
        name if first[reason] == name else pytest.param(name, marks=pytest.mark.nightly)
        for name, (_, reason) in DAMAGES.items()
    ]


@pytest.mark.parametrize("fault", damages())
def test_a_damaged_page_is_computed_again_and_set_aside(bench: Bench, fault: str) -> None:
    damage, reason = DAMAGES[fault]
    index = bench.fresh()
    files = bench.store_prompt(index)
    damage(files)
    missed, aside = bench.count("missed_pages", reason=reason.value), bench.count("quarantined_pages")
    bench.flush()
    assert bench.ask(index) == DAMAGED_PAGE * PAGE_TOKENS
    assert bench.wait_for("missed_pages", missed + 1, reason=reason.value) == missed + 1
    assert bench.wait_for("quarantined_pages", aside + 1) >= aside + 1
    assert any(reason.value in file.name for file in (bench.disk.store / "quarantine").iterdir())
    if fault == "two pages swapped":
        # The other one of the two is found, or has been replaced, at the next visit.
        bench.flush()
        bench.ask(index)
    bench.wait_for("written_pages", bench.count("written_pages"))
    bench.flush()
    assert bench.ask(index) >= DAMAGED_PAGE * PAGE_TOKENS
    report(fault, "page set aside and computed again", f'missed_pages{{reason="{reason.value}"}}')


def test_an_undamaged_page_is_served(bench: Bench) -> None:
    index = bench.fresh()
    bench.store_prompt(index)
    missed, read = bench.count("missed_pages"), bench.count("read_pages")
    bench.flush()
    assert bench.ask(index) == PROMPT_PAGES * PAGE_TOKENS
    assert bench.wait_for("read_pages", read + PROMPT_PAGES) == read + PROMPT_PAGES
    assert bench.count("missed_pages") == missed


def test_a_disk_that_hangs(bench: Bench) -> None:
    """Reads come back when the disk is mended: the answer, which is there before, did not wait for them."""
    index = bench.fresh()
    bench.store_prompt(index)
    bench.flush()
    late = bench.count("missed_pages", reason="timeout")
    bench.disk.break_("hangs")
    try:
        assert bench.ask(index) == 0
        bench.wait_for("missed_pages", late + 1, reason="timeout")
    finally:
        bench.disk.mend()
    report("reads hang", "computed after the fetch timeout", 'missed_pages{reason="timeout"}')
    bench.flush()
    assert bench.ask(index) == PROMPT_PAGES * PAGE_TOKENS


THREAD_FAULTS = {
    "read_raises": ("missed_pages", {"reason": "io"}),
    "prefetch_raises": ("thread_faults", {"thread": "prefetch"}),
    "prefetch_io_raises": ("thread_faults", {"thread": "prefetch_io"}),
    "prefetch_dies": ("thread_faults", {"thread": "prefetch"}),
    "prefetch_io_dies": ("thread_faults", {"thread": "prefetch_io"}),
    "prefetch_sync_dies": ("thread_faults", {"thread": "prefetch_sync"}),
}


@pytest.mark.parametrize("fault", THREAD_FAULTS)
def test_a_fault_in_a_prefetch_thread_hangs_no_request(bench: Bench, fault: str) -> None:
    counter, labels = THREAD_FAULTS[fault]
    index = bench.fresh()
    bench.store_prompt(index)
    bench.flush()
    before = bench.count(counter, **labels)
    bench.disk.break_(fault)
    try:
        bench.ask(index)
    finally:
        bench.disk.mend()
    bench.wait_for(counter, before + 1, **labels)
    bench.flush()
    assert bench.ask(index) == PROMPT_PAGES * PAGE_TOKENS, "the thread did not recover"
    label = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    report(f"thread fault: {fault}", "request computed; the next one is served", f"{counter}{{{label}}}")


WRITE_FAULTS = {
    "disk_full": ("unwritten_pages", {"reason": "disk_full"}),
    "read_only": ("unwritten_pages", {"reason": "read_only"}),
    "backup_raises": ("thread_faults", {"thread": "backup"}),
    "backup_dies": ("thread_faults", {"thread": "backup"}),
}


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_a_fault_in_writing_costs_the_page_only(bench: Bench, fault: str) -> None:
    counter, labels = WRITE_FAULTS[fault]
    before = bench.count(counter, **labels)
    bench.disk.break_(fault)
    try:
        index = bench.fresh()
        bench.ask(index)
        bench.wait_for(counter, before + 1, **labels)
        bench.flush()
        bench.ask(index)
    finally:
        bench.disk.mend()
    after = bench.fresh()
    bench.flush()
    bench.store_prompt(after)
    bench.flush()
    assert bench.ask(after) == PROMPT_PAGES * PAGE_TOKENS
    kind = " (real)" if bench.disk.is_real and fault in ("disk_full", "read_only") else ""
    label = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    report(f"write fault: {fault}{kind}", "nothing stored; the next page is", f"{counter}{{{label}}}")


def test_directory_removed_while_serving(bench: Bench) -> None:
    index = bench.fresh()
    bench.store_prompt(index)
    bench.flush()
    lost = bench.count("lost_directories")
    shutil.rmtree(bench.disk.store)
    assert bench.ask(index) == 0
    bench.wait_for("lost_directories", lost + 1)
    after = bench.fresh()
    written = bench.count("written_pages")
    bench.ask(after)
    bench.wait_for("written_pages", written + PROMPT_PAGES)
    bench.flush()
    assert bench.ask(after) == PROMPT_PAGES * PAGE_TOKENS
    report("directory removed while serving", "computed; directory made again", "lost_directories")

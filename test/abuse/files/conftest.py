"""The recording that tests of this folder spoil."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sgl_importance.observe.trace.records import (
    Detail,
    Fold,
    RequestAdmitted,
    RequestFinished,
)
from sgl_importance.observe.trace.segments import segment_files
from sgl_importance.observe.trace.token_sequence import TokenSequence
from sgl_importance.observe.trace.writer import NO_PAGES, TraceWriter

from support.workloads.ledger_rows import PAGE
from support.workloads.recordings import make_header


def write_recording(folder: Path) -> None:
    """Twelve requests on two prompts that share their first pages."""
    header = make_header(page_size=PAGE, digest="xxh3-128-chain", layers=(1,), cost={}, detail=Detail.FOLDS)
    writer = TraceWriter(folder, header, max_bytes=1 << 20)
    for request in range(12):
        prompt = TokenSequence((None, None), [*range(5 * PAGE), *([100 + request % 2] * PAGE)])
        body = np.full(6, 1 / 6, np.float32)
        writer.put(
            RequestAdmitted(
                request, f"a/{request}", request + 1, request, 0, 6 * PAGE, {"device": 0}, NO_PAGES
            ),
            prompt,
        )
        writer.put(Fold(request, request + 1, request + 1, 1.0, True, body, body))
        writer.put(RequestFinished(request, request + 1, request, "length", 1, NO_PAGES), prompt)
    writer.close()


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only file of a recording."""
    folder = tmp_path_factory.mktemp("recording")
    write_recording(folder)
    (file,) = segment_files(folder)
    return file

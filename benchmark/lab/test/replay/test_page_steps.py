"""Page lists come back as they were written, from whole recordings and from broken ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance.observe.trace import TraceError
from sgl_importance.observe.trace.framing import MAGIC, frame
from sgl_importance.observe.trace.records import PageLists, decode, encode
from sgl_importance.observe.trace.segments import segment_files
from sgl_importance.observe.trace.writer import TraceWriter
from sgl_importance_lab.replay.residency.page_steps import (
    PageRecording,
    PageStep,
    RequestEnd,
    load_page_steps,
)

from support.workloads.page_recordings import Asked, lists_of, random_asked, write_asked
from support.workloads.recordings import PAGE_SIZE, make_header, write_recording


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_record_comes_back_as_it_went_in(dtype: type) -> None:
    (asked,) = random_asked(0, requests=1, tokens=2)
    lists = lists_of(asked, 0, 1, asked.prompt_tokens + 1, 1, 0, 1.0)
    lists = msgspec.structs.replace(lists, pages=lists.pages.astype(dtype), read=lists.read.astype(dtype))
    again = decode(encode(lists))
    assert isinstance(again, PageLists)
    assert again.pages.dtype == dtype
    assert encode(again) == encode(lists)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 99),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 2),
    st.sampled_from([0.3, 1.0]),
)
def test_a_recording_says_what_each_token_wanted(
    seed: int, requests: int, tokens: int, heads: int, share: float
) -> None:
    asked = random_asked(seed, requests=requests, tokens=tokens, heads=heads)
    with tempfile.TemporaryDirectory() as name:
        write_asked(Path(name), asked, share=share)
        recording = load_page_steps(Path(name))
    assert [request.input_tokens for request in recording.requests] == [each.prompt_tokens for each in asked]
    steps = recording.steps
    assert len(steps) == requests * (tokens + 1)
    assert sum(isinstance(event, RequestEnd) for event in recording.events) == requests
    for number, request in enumerate(asked):
        of_request = [step for step in steps if step.request == number]
        assert [step.is_generated for step in of_request] == [False] + [True] * tokens
        assert not any(step.is_behind for step in of_request)
        for at, step in enumerate(of_request[1:]):
            pages = -(-step.seq_len // PAGE_SIZE)
            mass = request.wants[at][..., :pages]
            count = int(np.ceil(share * pages))
            np.testing.assert_array_equal(step.wanted, np.argsort(-mass, axis=-1, kind="stable")[..., :count])
            np.testing.assert_allclose(
                step.mass, np.take_along_axis(mass, step.wanted, axis=-1), rtol=1e-3, atol=1e-6
            )
            assert step.read == (None,) * len(step.layers)
    check_pages(recording, asked)


def check_pages(recording: PageRecording, asked: list[Asked]) -> None:
    """Requests about the same document share the whole pages of their prompts, and no others."""
    for one, first in zip(recording.requests, asked, strict=True):
        for other, second in zip(recording.requests, asked, strict=True):
            shared = set(one.pages.tolist()) & set(other.pages.tolist())
            if one is not other and first.document != second.document:
                assert not shared
            else:
                assert shared >= set(one.pages[: first.prompt_tokens // PAGE_SIZE].tolist())
        assert len(set(one.pages.tolist())) == len(one.pages)
    assert max(int(request.pages.max()) for request in recording.requests) < recording.num_pages


def test_pages_that_a_selector_chose(tmp_path: Path) -> None:
    (asked,) = random_asked(1, requests=1, tokens=3)
    reads = [[0, 3, 9], [1], [0, 2, 4, 9]]
    write_asked(tmp_path, [Asked(0, asked.prompt_pages, asked.wants, reads)])
    _, *steps = load_page_steps(tmp_path).steps
    for step, expected in zip(steps, reads, strict=True):
        for chosen in step.read:
            assert chosen is not None
            assert chosen[0].tolist() == expected
            assert chosen[1].tolist() == [1.0] * len(expected)


def test_the_step_behind_an_answer_is_told_apart(tmp_path: Path) -> None:
    (asked,) = random_asked(2, requests=1, tokens=4)
    write_asked(tmp_path, [asked])
    writer = TraceWriter(tmp_path, make_header(), max_bytes=1 << 20)
    (_, *_, last) = load_page_steps(tmp_path).steps
    writer.put(lists_of(asked, 0, 9, last.seq_len + 1, 1, 3, 1.0))
    writer.close()
    assert [step.is_behind for step in load_page_steps(tmp_path).steps] == [False] * 5 + [True]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_a_crash_cuts_off_the_rest_is_read_or_one_line_says_why(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_asked(folder, random_asked(3, requests=2, tokens=3))
        whole = load_page_steps(folder).steps
        (file,) = segment_files(folder)
        content = file.read_bytes()
        file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        found: list[PageStep] = []
        message = "record again"
        try:
            found = load_page_steps(folder).steps
        except TraceError as error:
            message = str(error)
    assert "\n" not in message
    assert "record" in message
    assert len(found) <= len(whole)
    for left, right in zip(found, whole, strict=False):
        np.testing.assert_array_equal(left.wanted, right.wanted)


def test_foreign_directories_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no recording in"):
        load_page_steps(tmp_path)
    write_recording(tmp_path, queries=1)
    with pytest.raises(TraceError, match=r"no page lists: record with trace\.pages"):
        load_page_steps(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": np.zeros(3, np.uint16)},
        {"read": np.zeros(1, np.uint16)},
        {"num_read": (0,)},
        {"pages": np.full(20, 900, np.uint16)},
        {"kv_heads": 0},
        {"new_tokens": 0},
    ],
)
def test_lists_that_cannot_be_right_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    (asked,) = random_asked(4, requests=1, tokens=2)
    write_asked(tmp_path, [asked])
    (file,) = segment_files(tmp_path)
    wrong = msgspec.structs.replace(lists_of(asked, 0, 3, asked.prompt_tokens + 1, 1, 0, 1.0), **changes)
    file.write_bytes(file.read_bytes() + frame(encode(wrong)))
    with pytest.raises(TraceError, match="page lists that cannot be right: record again"):
        load_page_steps(tmp_path)
    assert file.read_bytes().startswith(MAGIC)

"""Every format: what it reads, that it is found by content, and what it says of records it cannot use."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import time
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.replay.formats import bailian, mooncake, openai_chat, oracle_general
from sgl_importance_lab.replay.formats.detect import READERS, detect_reader, load_reader, read_trace
from sgl_importance_lab.replay.formats.line_reader import BadRecord, ReadOptions, TraceError

from support.workloads.replay_traces import shared_data, write_records

CHECKPOINT = checkpoint_path()


def _mooncake(hash_ids: list[int], *, tokens: int | None = None, ms: int = 0) -> dict[str, Any]:
    length = 512 * len(hash_ids) if tokens is None else tokens
    return {"timestamp": ms, "input_length": length, "output_length": 7, "hash_ids": hash_ids}


def _bailian(hash_ids: list[int], *, seconds: float = 0.0) -> dict[str, Any]:
    return {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": seconds,
        "input_length": 16 * len(hash_ids) - 3,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": hash_ids,
    }


def test_mooncake(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "a.jsonl", _mooncake([70, 71], tokens=1000), "", _mooncake([70, 9, 8], ms=1500)
    )
    assert detect_reader(path).NAME == "mooncake"
    trace = read_trace(path)
    trace.check_integrity()
    assert trace.name == "a"
    assert trace.block_tokens == 512
    assert [trace.request(index).tolist() for index in range(2)] == [[0, 1], [0, 2, 3]]
    assert trace.parents is not None
    assert trace.parents.tolist() == [-1, 0, 0, 2]
    assert trace.input_tokens.tolist() == [1000, 1536]
    assert trace.output_tokens.tolist() == [7, 7]
    assert trace.seconds.tolist() == [0.0, 1.5]


def test_requests_are_put_in_order_of_time(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", _mooncake([5], ms=3000), _mooncake([6], ms=1000))
    trace = read_trace(path)
    assert trace.seconds.tolist() == [0.0, 2.0]
    assert trace.blocks.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"timestamp": 0, "input_length": 5', "Input data was truncated"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "missing required field `hash_ids`"),
        (json.dumps(_mooncake([1]) | {"hash_ids": "1"}), "Expected `array`, got `str`"),
        (json.dumps(_mooncake([1]) | {"input_length": -1}), "Expected `int` >= 0"),
        (json.dumps(_mooncake([1, 2, 3], tokens=512)), "3 hash_ids, but 512 tokens make 1 blocks of 512"),
        (json.dumps(_mooncake([1, 1])), "a block appears twice in one request"),
        (json.dumps(_mooncake([4, 2])), "block 2 follows another block than before"),
        ("\udcff", "invalid character"),
    ],
)
def test_bad_records_are_located(tmp_path: Path, line: str, cause: str) -> None:
    path = tmp_path / "bad.jsonl"
    good = json.dumps(_mooncake([1, 2]))
    path.write_bytes(f"{good}\n{line}\n{good}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)

    skipped: list[BadRecord] = []
    trace = read_trace(path, on_bad_record=skipped.append)
    assert [record.line for record in skipped] == [2]
    assert trace.blocks.tolist() == [0, 1, 0, 1]


def test_a_bad_first_line_does_not_hide_the_format(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", "{", _mooncake([1]))
    assert detect_reader(path).NAME == "mooncake"


def test_bailian_chains_its_blocks(tmp_path: Path) -> None:
    """Hash 3 behind 1 and behind 2 are different prefixes."""
    path = write_records(
        tmp_path / "b.jsonl", _bailian([1, 3]), _bailian([2, 3], seconds=1.25), _bailian([1, 3, 3])
    )
    assert detect_reader(path).NAME == "bailian"
    trace = read_trace(path)
    trace.check_integrity()
    assert trace.block_tokens == 16
    assert [trace.request(index).tolist() for index in range(3)] == [[0, 1], [0, 1, 2], [3, 4]]
    assert trace.seconds.tolist() == [0.0, 0.0, 1.25]
    objects = read_trace(path, ReadOptions(object_level=True))
    assert objects.parents is None
    assert objects.blocks.tolist() == [0, 1, 0, 1, 1, 2, 1]


def test_chat_prompts_become_chained_blocks_of_bytes(tmp_path: Path) -> None:
    shared, tail = "s" * 32, "t" * 20
    path = write_records(
        tmp_path / "chat.jsonl",
        {"text": shared + "a" * 16, "timestamp": 1_760_000_000_000_000, "output": "four"},
        {"prompt": shared + tail, "timestamp": "2025-10-09T08:53:25+00:00"},
    )
    assert detect_reader(path).NAME == "openai-chat"
    trace = read_trace(path)
    trace.check_integrity()
    assert [trace.request(index).tolist() for index in range(2)] == [[0, 1, 2], [0, 1, 3]]
    assert trace.input_tokens.tolist() == [48, 52]  # the last 4 bytes fill no block
    assert trace.output_tokens.tolist() == [4, 0]
    assert trace.seconds.tolist() == [0.0, 5.0]
    assert read_trace(path, ReadOptions(block_tokens=8)).request(0).tolist() == [0, 1, 2, 3, 4, 5]


def test_messages_of_chat_and_batch_requests(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Answer in one word, whatever you are asked. " * 2}
    first = {"messages": [system, {"role": "user", "content": "Why?"}]}
    second = {"messages": [system, {"role": "user", "content": "Where? " * 9}]}
    path = write_records(tmp_path / "chat.jsonl", first, {"body": second}, {"body": first})
    trace = read_trace(path)
    one, two, three = (trace.request(index).tolist() for index in range(3))
    assert one == three
    assert one[:5] == two[:5]
    assert len(two) > len(one)
    with_tools = write_records(tmp_path / "tools.jsonl", first, first | {"tools": [{"type": "function"}]})
    assert read_trace(with_tools).request(1)[0] != 0


def test_prompts_may_be_token_ids(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "ids.jsonl", {"prompt": list(range(40))}, {"prompt": [*range(16), *range(16)]}
    )
    assert [read_trace(path).request(index).tolist() for index in range(2)] == [[0, 1], [0, 2]]


@pytest.mark.parametrize("make", [lambda text: text, lambda text: list(text.encode())])
def test_a_list_of_prompts_is_as_many_requests(tmp_path: Path, make: Callable[[str], Any]) -> None:
    prompts = [make("s" * 16 + end * 16) for end in "ab"]
    trace = read_trace(write_records(tmp_path / "chat.jsonl", {"prompt": prompts, "timestamp": 3}))
    assert [trace.request(index).tolist() for index in range(2)] == [[0, 1], [0, 2]]
    assert trace.seconds.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("prompt", [["a" * 16, [1]], [1, "a"], [[1] * 16, []]])
def test_a_list_of_unlike_prompts_is_bad(tmp_path: Path, prompt: list[Any]) -> None:
    path = write_records(tmp_path / "chat.jsonl", {"prompt": "p" * 16}, {"prompt": prompt})
    with pytest.raises(TraceError, match=r"chat.jsonl:2: (prompt: |needs exactly one of)"):
        read_trace(path)


def test_tools_part_texts_too(tmp_path: Path) -> None:
    one, two = ({"input": "a" * 64, "tools": [{"type": kind}]} for kind in ("function", "web_search"))
    trace = read_trace(write_records(tmp_path / "chat.jsonl", one, two, one))
    assert trace.request(0).tolist() == trace.request(2).tolist()
    assert trace.request(0)[-1] != trace.request(1)[-1]


def test_what_aiperf_writes(tmp_path: Path) -> None:
    """Of its ``mooncake_trace``: texts, messages or whole bodies, by a time or by delays within sessions."""
    message = {"role": "user", "content": "u" * 40}
    path = write_records(
        tmp_path / "aiperf.jsonl",
        {"timestamp": 1000, "session_id": "a", "text_input": "t" * 32, "output_length": 5},
        {"session_id": "b", "messages": [message], "tools": None, "delay": None, "timestamp": 3000},
        {"session_id": "a", "delay": 4500.0, "payload": {"model": "m", "messages": [message]}},
    )
    assert detect_reader(path).NAME == "openai-chat"
    trace = read_trace(path)
    assert trace.output_tokens.tolist() == [5, 0, 0]
    assert trace.num_requests == 3


def test_delays_count_within_a_session(tmp_path: Path) -> None:
    records = (
        {"input_length": 512, "hash_ids": [1], "timestamp": 2000, "session_id": "a", "output_length": 1},
        {"input_length": 512, "hash_ids": [2], "timestamp": 3000, "session_id": "b", "output_length": 1},
        {"input_length": 512, "hash_ids": [3], "delay": 2500, "session_id": "a", "output_length": 1},
    )
    said: list[str] = []
    trace = read_trace(write_records(tmp_path / "a.jsonl", *records), ReadOptions(remark=said.append))
    assert trace.seconds.tolist() == [0.0, 1.0, 2.5]
    assert said == []


def test_a_tokenizer_cuts_blocks_of_its_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    messages = [{"role": "user", "content": "What does the record say? " * 8}]
    path = write_records(tmp_path / "chat.jsonl", {"messages": messages}, {"messages": messages})
    trace = read_trace(path, ReadOptions(tokenizer=str(CHECKPOINT)))
    assert trace.request(0).tolist() == trace.request(1).tolist()
    assert 0 < trace.input_tokens[0] < read_trace(path).input_tokens[0]
    assert len(trace.request(0)) == trace.input_tokens[0] // 16
    with pytest.raises(TraceError, match=r"--tokenizer .*: give a folder or a model's name"):
        read_trace(path, ReadOptions(tokenizer=str(tmp_path)))


@pytest.mark.parametrize(
    "record",
    [{"prompt": "a", "input": "b"}, {"prompt": ""}, {"output": "x"}, {"prompt": "a", "timestamp": "noon"}],
)
def test_records_without_one_prompt_are_bad(tmp_path: Path, record: dict[str, Any]) -> None:
    path = write_records(tmp_path / "chat.jsonl", {"prompt": "p" * 16}, record)
    with pytest.raises(TraceError, match=r"chat.jsonl:2: (needs exactly one of|timestamp 'noon')"):
        read_trace(path)


@pytest.mark.parametrize("units_per_second", [1, 1e3, 1e6, 1e9])
def test_unix_times_are_told_apart_by_size(tmp_path: Path, units_per_second: float) -> None:
    times = (1_760_000_000, 1_760_000_090)
    records = ({"prompt": "p" * 16, "timestamp": time * units_per_second} for time in times)
    assert read_trace(write_records(tmp_path / "chat.jsonl", *records)).seconds.tolist() == [0.0, 90.0]


def test_times_without_a_zone_are_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks in Berlin went back between these two; UTC did not."""
    times = ("2024-10-27T00:30:00", "2024-10-27T01:30:00Z")
    path = write_records(
        tmp_path / "chat.jsonl", *({"prompt": "p" * 16, "timestamp": each} for each in times)
    )
    for zone in ("UTC", "Europe/Berlin", "America/New_York"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert read_trace(path).seconds.tolist() == [0.0, 3600.0]
    monkeypatch.undo()
    time.tzset()


def test_a_mark_of_utf_8_in_front_is_no_record(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", _mooncake([1]), _mooncake([1, 2], ms=1000))
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert read_trace(path).num_requests == 2


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_trace_is_named(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = write_records(tmp_path / "a.jsonl", _mooncake([1]))
    path.write_bytes(pack(path.read_bytes()))
    with pytest.raises(TraceError, match="unpack it first"):
        read_trace(path)


@pytest.mark.parametrize("format_name", [None, "kv-cache-tester", "mooncake"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, format_name: str | None) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="write it to a file first"):
        read_trace(tmp_path / "pipe", format_name=format_name)


def test_a_folder_of_sessions_is_merged_by_time(tmp_path: Path) -> None:
    write_records(
        tmp_path / "one.jsonl", {"input": "a" * 16, "timestamp": 3}, {"input": "a" * 32, "timestamp": 7}
    )
    write_records(tmp_path / "two.jsonl", {"input": "b" * 16, "timestamp": 5})
    trace = read_trace(tmp_path)
    assert [trace.request(index).tolist() for index in range(3)] == [[0], [1], [0, 2]]
    assert trace.seconds.tolist() == [0.0, 2.0, 4.0]


def test_azure_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,374,44"
    )
    with pytest.raises(TraceError, match="no prefix ids"):
        read_trace(path)


@pytest.mark.parametrize("text", ["hello\n", '{"a": 1}\n', "\x00" * 7])
def test_unknown_content_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "what"
    path.write_text(text)
    with pytest.raises(TraceError, match="unknown format; name it with --format"):
        read_trace(path)


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        ({"timestamp": 0, "input_length": 1024.0, "hash_ids": [1, 2]}, "Expected `int`.*input_length"),
        ({"input_length": 1024, "hash_ids": ["a", "b"]}, "Expected `int`.*hash_ids"),
        ({"chat_id": 1, "input_length": 16, "hash_ids": None}, "Expected `array`.*hash_ids"),
        ({"messages": ["Why?"]}, "Expected `object`.*messages"),
        ({"body": {"prompt": [-1]}}, "prompt"),
        ({"prompt": "p" * 16, "text": "t" * 16}, "needs exactly one of"),
    ],
)
def test_a_record_that_is_nearly_one_says_what_is_wrong(tmp_path: Path, record: Any, cause: str) -> None:
    with pytest.raises(TraceError, match=rf"near.jsonl:1: .*{cause}"):
        read_trace(write_records(tmp_path / "near.jsonl", record, record))


def test_mooncake_with_more_fields(tmp_path: Path) -> None:
    record = {"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2], "request_id": "r", "priority": 3}
    assert detect_reader(write_records(tmp_path / "more.jsonl", record)).NAME == "mooncake"


def test_missing_files_empty_traces_and_unknown_formats(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none")
    empty = write_records(tmp_path / "empty.jsonl")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(empty, format_name="mooncake")
    with pytest.raises(TraceError, match=r"unknown format 'csv'; known: .*mooncake"):
        load_reader("csv")


@pytest.mark.parametrize("name", READERS)
def test_registered_name_is_the_readers(name: str) -> None:
    assert name == load_reader(name).NAME


def test_shared_traces_are_told_apart() -> None:
    assert mooncake.matches(shared_data("traces/mooncake_conversation.jsonl"))
    session = next(shared_data("agents/miniswe").glob("*.jsonl"))
    assert openai_chat.matches(session)
    for reader in (mooncake, bailian, oracle_general):
        assert not reader.matches(session)
    trace = read_trace(shared_data("agents/taubench"))
    trace.check_integrity()
    assert trace.num_requests > 400


def test_ids_have_64_bits_and_what_is_missing_is_said(tmp_path: Path) -> None:
    record = {"input_length": 1024, "hash_ids": [2**63 + 5, 2**64 - 1], "session_id": "a", "delay": 3.0}
    said: list[str] = []
    trace = read_trace(write_records(tmp_path / "a.jsonl", record, record), ReadOptions(remark=said.append))
    assert trace.blocks.tolist() == [0, 1, 0, 1]
    assert [text.partition(": ")[2].partition(":")[0] for text in said] == [
        "1 requests without timestamp",  # the other says how long it waited in its session
        "2 requests without output_length",
    ]
    path = write_records(tmp_path / "b.jsonl", record | {"hash_ids": [1, 2**64]})
    with pytest.raises(TraceError, match="more than 64 bits"):
        read_trace(path)


def test_an_array_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([_mooncake([1])], indent=1))
    with pytest.raises(TraceError, match="a JSON array: write one record a line"):
        read_trace(path)

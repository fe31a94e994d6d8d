"""Every file that we read, spoiled in a thousand ways: read as it was written, refused, or left out."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from array import array
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sgl_importance.ledger.ledger import Ledger
from sgl_importance.ledger.ledger_database import LedgerError, LedgerUnusable
from sgl_importance.ledger.prefix_record import PrefixRecord
from sgl_importance.ledger.reuse_evidence import ReuseEvidence
from sgl_importance.options import ImportanceOptions
from sgl_importance.pins.pin import Pin
from sgl_importance.replay.formats.detect import READERS, read_trace
from sgl_importance.replay.formats.line_reader import BadRecord, TraceError
from sgl_importance.replay.formats.oracle_general import RECORD
from sgl_importance.reuse.estimator import ReuseEstimator
from sgl_importance.storage.inspect import files_of, summarize, verify
from sgl_importance.storage.page_record import PageMiss
from sgl_importance.storage.store import PageStore
from sgl_importance.storage.store_counters import StoreCounters
from sgl_importance.trace import TraceError as RecordingError
from sgl_importance.trace import open_trace
from sgl_importance.trace.framing import MAGIC, FrameReader, frame
from sgl_importance.trace.records import (
    FORMAT_VERSION,
    SCHEMA,
    Detail,
    Fold,
    Header,
    RequestAdmitted,
    RequestFinished,
)
from sgl_importance.trace.segments import segment_files
from sgl_importance.trace.token_sequence import TokenSequence
from sgl_importance.trace.writer import NO_PAGES, TraceWriter
from sgl_importance.workload.workload_request import WorkloadError, read_requests
from sglang_importance.launch.preflight import checkpoint_problems
from sglang_importance.storage.install import mount
from sglang_importance.upstream.refusal import LaunchRefused

from support.fuzz import check_message, check_one_line, damage, examples, json_lines, nested, spoil, value
from support.workloads.ledger_rows import PAGE, record

NOBODY = "http://127.0.0.1:9"  # the discard port, where nobody answers
MODEL = bytes(range(32))
PAGE_BYTES = 512


# ---- pages of the store ----


@examples(400, 20_000)
def test_a_spoiled_page_is_never_served(tmp_path: Path, count: int) -> None:
    rng = random.Random(1)
    store = PageStore(tmp_path, budget_bytes=1 << 20, counters=StoreCounters())
    right = np.frombuffer(rng.randbytes(PAGE_BYTES), np.uint8)
    store.write(MODEL, "key", right, depth=3, moment=10**18)
    path = store.path(MODEL, "key")
    intact = path.read_bytes()
    body = np.empty(PAGE_BYTES, np.uint8)
    misses = 0
    for _ in range(count):
        spoiled = damage(rng, intact)
        path.write_bytes(spoiled)
        found = verify(tmp_path, quarantine=False, files=files_of(tmp_path), advance=lambda size: None)
        assert bool(found.damaged) == (spoiled != intact)
        try:
            store.read(MODEL, "key", body)
        except PageMiss:
            misses += 1
        else:
            assert spoiled == intact
            assert (body == right).all()
    assert misses > 0.9 * count


@examples(200, 5000)
def test_a_spoiled_identity_is_unknown(tmp_path: Path, count: int) -> None:
    rng = random.Random(2)
    store = PageStore(tmp_path, budget_bytes=1 << 20, counters=StoreCounters())
    store.write(MODEL, "key", np.zeros(PAGE_BYTES, np.uint8), depth=0, moment=10**18)
    facts = {
        "weights": "ab",
        "weights_version": "1",
        "tp_rank": 0,
        "tp_size": 1,
        "page_size": 16,
        "dtype": "f",
    }
    store.describe(MODEL, json.dumps(facts))
    path = store.path(MODEL, "key").with_name("identity.json")
    for _ in range(count):
        path.write_bytes(json_lines(rng, [facts]) if rng.random() < 0.98 else nested(20_000))
        assert summarize(tmp_path)["pages"] == 1
        if rng.random() < 0.1:
            assert check_one_line(["store", "stat", str(tmp_path)]) == 0


# ---- the ledger ----


def prefix(number: int, parent: PrefixRecord | None) -> PrefixRecord:
    return record([number] * PAGE, after=parent, last_access=number, accesses=number, at_risk_as=number % 5)


@pytest.fixture(scope="module")
def ledger_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of 60 prefixes and 20 pins, half in the log beside it, as a killed server leaves it."""
    folder, copy = tmp_path_factory.mktemp("ledger"), tmp_path_factory.mktemp("copy")
    records: list[PrefixRecord] = []
    for number in range(60):
        records.append(prefix(number, records[-1] if number % 3 else None))
    with closing(Ledger(folder / "ledger.sqlite", MODEL, page_size=PAGE)) as ledger:
        estimator = ReuseEstimator()
        evidence = ReuseEvidence.of(estimator)
        ledger.write(records[:30], clock=30, requests=30, evidence=evidence, namespaces=[(None, None)])
        ledger.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ledger.write(records[30:], clock=60, requests=30)
        pins = [Pin(f"pin{number}", array("q", range(number, number + PAGE))) for number in range(20)]
        ledger.pins.write(pins, (), now=0.0, budget_bytes=1 << 20)
        for file in folder.iterdir():
            shutil.copy(file, copy)
    return copy


@examples(120, 2000)
def test_a_spoiled_ledger_tells_no_lies(ledger_files: Path, tmp_path: Path, count: int) -> None:
    rng = random.Random(3)
    truth = {prefix(number, None).token_ids[0]: number for number in range(60)}
    known = 0
    for example in range(count):
        folder = tmp_path / str(example)
        shutil.copytree(ledger_files, folder)
        for name in rng.choice(
            (("ledger.sqlite",), ("ledger.sqlite-wal",), ("ledger.sqlite", "ledger.sqlite-wal"))
        ):
            file = folder / name
            file.write_bytes(damage(rng, file.read_bytes()))
        if rng.random() < 0.1:
            (folder / "ledger.sqlite-shm").write_bytes(rng.randbytes(rng.randrange(40_000)))
        try:
            ledger = Ledger(folder / "ledger.sqlite", MODEL, page_size=PAGE)
        except LedgerUnusable:
            continue
        with closing(ledger):
            try:
                for row in ledger.prefixes():
                    assert row.token_ids is not None
                    number = truth[row.token_ids[0]]
                    assert (row.accesses, tuple(row.token_ids)) == (number, (number,) * PAGE)
                    known += 1
                for pin in ledger.pins.read(0.0, page_size=PAGE):
                    assert pin.tokens == array("q", range(int(pin.pin_id[3:]), int(pin.pin_id[3:]) + PAGE))
                ledger.evidence()
                ledger.namespaces()
                ledger.write([prefix(1, None)], clock=61, requests=1)
                ledger.forget(1 << 10, lambda *_: 1.0)
            except LedgerError:
                pass  # what a server does with it: test_ledger_feed.py, test_ledger_writer.py
        shutil.rmtree(folder)
    assert known > count


# ---- traces ----

BLOCKS = {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]}
CHAT = {
    "messages": [{"role": "system", "content": "a" * 40}, {"role": "user", "content": "b" * 30}],
    "timestamp": "2025-01-01T10:00:00Z",
    "output": "c",
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
ANSWERED = {"t": 0.0, "type": "n", "in": 200, "out": 5, "stop": "tool_use", "hash_ids": [1, 2, 3]}
LINES: dict[str, list[Any]] = {
    "mooncake": [{**BLOCKS, "timestamp": 10 * index, "hash_ids": [0, index + 1]} for index in range(6)],
    "bailian": [
        {**BLOCKS, "chat_id": index, "parent_chat_id": -1, "type": "text", "turn": 1, "input_length": 32}
        for index in range(6)
    ],
    "openai-chat": [
        CHAT,
        {"body": CHAT, "custom_id": "x"},
        {"prompt": "d" * 50, "timestamp": 1.7e9},
        {"prompt": list(range(40))},
        {"input": "e" * 50},
        {"input": CHAT["messages"]},
    ],
    "kv-cache-tester": [
        {
            "id": f"{index}",
            "block_size": 64,
            "requests": [ANSWERED, {**ANSWERED, "t": 9.0, "hash_runs": [1, 3]}],
        }
        for index in range(5)
    ]
    + [{"id": "s", "block_size": 64, "requests": [{"t": 9.0, "type": "subagent", "requests": [ANSWERED]}]}],
}


@pytest.mark.parametrize("name", LINES)
@examples(250, 4000)
def test_a_spoiled_trace_is_refused_by_line_or_read(tmp_path: Path, name: str, count: int) -> None:
    rng = random.Random(name)
    path = tmp_path / "trace.jsonl"
    refused = read = 0
    for example in range(count):
        path.write_bytes(json_lines(rng, LINES[name]))
        bad: list[BadRecord] = []
        strict = rng.random() < 0.5
        try:
            if strict:
                trace = read_trace(path, format_name=name if rng.random() < 0.7 else None)
            else:
                trace = read_trace(path, format_name=name, on_bad_record=bad.append)
        except TraceError as error:
            refused += 1
            check_message(error)
        else:
            read += 1
            trace.check_integrity()
            assert trace.num_requests + len(bad) >= 1
        if example % 50 == 0:
            check_one_line(
                ["replay", str(path), "--capacity-blocks", "3", "--policies", "lru", "--jobs", "1"]
            )
            check_one_line(["size", str(path), "--hours", "1", "--jobs", "1"])
    assert refused > 0.1 * count
    assert read > 0.1 * count


def oracle_general() -> bytes:
    records = np.zeros(40, RECORD)
    records["time"] = np.arange(40) // 3
    records["object"] = np.arange(40) % 7
    records["size"] = 100
    records["next"] = np.where(np.arange(40) < 33, np.arange(40) + 7, -1)
    return records.tobytes()


@examples(300, 10_000)
def test_a_spoiled_binary_trace(tmp_path: Path, count: int) -> None:
    rng = random.Random(4)
    path = tmp_path / "trace.oracleGeneral.bin"
    read = 0
    for _ in range(count):
        path.write_bytes(damage(rng, oracle_general()))
        bad: list[BadRecord] = []
        try:
            trace = read_trace(path, format_name="oracle-general", on_bad_record=bad.append)
        except TraceError as error:
            check_message(error)
        else:
            read += 1
            trace.check_integrity()
    assert read > 0.5 * count


@pytest.mark.parametrize("name", READERS)
@examples(60, 3000)
def test_what_is_no_trace_at_all(tmp_path: Path, name: str, count: int) -> None:
    rng = random.Random(5)
    path = tmp_path / "trace"
    for _ in range(count):
        kind = rng.random()
        path.write_bytes(rng.randbytes(rng.randrange(300)) if kind < 0.5 else json.dumps(value(rng)).encode())
        for given in (name, None):
            try:
                read_trace(path, format_name=given)
            except TraceError as error:
                check_message(error)


# ---- recordings ----


def write_recording(folder: Path) -> None:
    """Twelve requests on two prompts that share their first pages."""
    header = Header(
        version=FORMAT_VERSION,
        run="run",
        segment=0,
        schema=SCHEMA,
        created=1e9,
        page_size=PAGE,
        digest="xxh3-128-chain",
        model="model",
        layers=(1,),
        options={"policy": "observe", "half_life_queries": 32.0, "window": 32, "g": "auto"},
        capacity_tokens={"device": 64},
        cost={},
        detail=Detail.FOLDS,
    )
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


def check_recording(folder: Path, *, commands: bool) -> None:
    try:
        records = list(open_trace(folder))
    except RecordingError as error:
        check_message(error)
    else:
        assert len(records) <= 2 + 3 * 12
    if commands:
        check_one_line(["trace", "info", str(folder)])
        check_one_line(["trace", "convert", str(folder), str(folder.with_name("out.jsonl"))])
        check_one_line(["replay", str(folder), "--capacity-blocks", "3", "--policies", "lru", "--jobs", "1"])
        check_one_line(["study", "h2", str(folder), "--no-figure", "--out", str(folder.parent)])


@examples(150, 4000)
def test_a_spoiled_recording_is_read_up_to_the_damage(segment: Path, tmp_path: Path, count: int) -> None:
    rng = random.Random(6)
    folder = tmp_path / "spoiled"
    folder.mkdir()
    for example in range(count):
        (folder / segment.name).write_bytes(damage(rng, segment.read_bytes()))
        check_recording(folder, commands=example % 15 == 0)


@examples(300, 10_000)
def test_nonsense_in_whole_frames_is_refused(segment: Path, tmp_path: Path, count: int) -> None:
    """Frames whose checksum is right and whose content no writer of ours has written."""
    rng = random.Random(7)
    with segment.open("rb") as file:
        frames = list(FrameReader(file))
    folder = tmp_path / "nonsense"
    folder.mkdir()
    for example in range(count):
        spoiled = list(frames)
        place = rng.randrange(len(spoiled))
        match rng.randrange(4):
            case 0:
                spoiled[place] = damage(rng, spoiled[place])
            case 1:
                with suppress(OverflowError):  # MessagePack has no such number
                    spoiled[place] = msgspec.msgpack.encode(
                        spoil(rng, msgspec.msgpack.decode(spoiled[place]))
                    )
            case 2:
                del spoiled[place]
            case 3:
                spoiled.insert(place, rng.choice(frames))
        (folder / segment.name).write_bytes(MAGIC + b"".join(map(frame, spoiled)))
        check_recording(folder, commands=example % 30 == 0)


# ---- workloads, prompts ----

REQUESTS = [
    {
        "id": "chat/0/0",
        "kind": "chat",
        "session": "s",
        "seconds": 0.5,
        "max_tokens": 4,
        "prompt": "Alice copper.",
    },
    {
        "id": "chat/0/1",
        "kind": "chat",
        "session": "s",
        "seconds": 1.5,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "Alice copper. Question: Alice"}],
        "answer": "copper",
    },
]


@examples(200, 3000)
def test_a_spoiled_workload_is_refused_by_line_or_sent(segment: Path, tmp_path: Path, count: int) -> None:
    rng = random.Random(8)
    path = tmp_path / "requests.jsonl"
    codes = Counter[str]()
    for _ in range(count):
        path.write_bytes(json_lines(rng, REQUESTS))
        try:
            read_requests(path)
            codes["read"] += 1
        except WorkloadError as error:
            codes["refused"] += 1
            check_message(error)
        if rng.random() < 0.05:
            assert check_one_line(["workload", "run", str(path), "--url", NOBODY]) == 2
            words = ["study", "sensitivity", str(segment.parent), "--no-figure", "--out", str(tmp_path)]
            assert check_one_line([*words, "--workload", str(path)]) == 2
    assert min(codes.values()) > 0.1 * count, codes


@pytest.mark.parametrize("form", ["messages", "input-ids", "text-file"])
@examples(20, 600)
def test_a_spoiled_prompt_is_refused(tmp_path: Path, form: str, count: int) -> None:
    rng = random.Random(9)
    path = tmp_path / "prompt.json"
    good: Any = CHAT["messages"] if form == "messages" else [1, 2, 3]
    for example in range(count):
        spoiled = json.dumps(spoil(rng, good)).encode()
        path.write_bytes(
            nested(20_000) if example == 0 else damage(rng, spoiled) if rng.random() < 0.4 else spoiled
        )
        for command in ("pin", "prewarm"):
            assert check_one_line([command, f"--{form}", str(path), "--url", NOBODY]) == 2


# ---- checkpoints and the like, at the launch of a server ----


@examples(150, 10_000)
def test_a_spoiled_checkpoint_is_refused_before_it_is_loaded(tmp_path: Path, count: int) -> None:
    rng = random.Random(10)
    from safetensors.numpy import save

    weights = save({"a": np.zeros(8, np.float32)})
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    refused = 0
    for _ in range(count):
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_bytes(json_lines(rng, [{"architectures": ["LlamaForCausalLM"]}]))
        (folder / "model-00001-of-00001.safetensors").write_bytes(damage(rng, weights))
        (folder / "model.safetensors.index.json").write_bytes(json_lines(rng, [index]))
        problems = list(checkpoint_problems(str(folder)))
        refused += bool(problems)
        for problem in problems:
            check_message(problem)
        shutil.rmtree(folder)
    assert refused > 0.5 * count


@examples(150, 10_000)
def test_a_spoiled_extra_config_is_refused(tmp_path: Path, count: int) -> None:
    rng = random.Random(11)
    path = tmp_path / "extra.json"
    options = ImportanceOptions(policy="importance", store=str(tmp_path / "store"))
    for _ in range(count):
        path.write_bytes(json_lines(rng, [{"prefetch_threshold": 16, "backend_name": "x"}]))
        given = f"@{path}" if rng.random() < 0.5 else path.read_bytes().decode(errors="replace")
        args = argparse.Namespace(
            hicache_storage_backend=rng.choice([None, "file", "dynamic"]),
            hicache_storage_backend_extra_config=given,
        )
        try:
            mount(args, options)
        except LaunchRefused as refused:
            for reason in refused.reasons:
                check_message(reason)
